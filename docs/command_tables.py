"""Writes the flags of all commands into docs/commands.md, from their parsers. Run it after a change of a command.

python docs/command_tables.py
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from jgt.command.commands import GROUPS, Command

PAGE = Path(__file__).parent / "commands.md"
_BEGIN, _END = "<!-- flags of all commands -->\n", "<!-- end of flags -->\n"


def main() -> None:
    """Writes the page."""
    PAGE.write_text(with_flags(PAGE.read_text()))


def with_flags(page: str) -> str:
    """The page with the flags of today."""
    before, rest = page.split(_BEGIN)
    text = "".join(f"\n{line}\n" for line in _lines())
    return f"{before}{_BEGIN}{text}\n{_END}{rest.split(_END)[1]}"


def _lines() -> Iterator[str]:
    for group, commands in GROUPS.items():
        yield f"### {group}"
        for name, command in commands.items():
            yield f"#### jgt {name}\n\n{_sentence(command.purpose)}"
            if table := "".join(_rows(command)):
                yield f"| argument | meaning |\n|---|---|\n{table}".rstrip()


def _rows(command: Command) -> Iterator[str]:
    parser = command.parser()
    for action in [] if parser is None else parser.arguments():
        if "--help" in action.option_strings or action.help == argparse.SUPPRESS:
            continue
        values = action.metavar or (None if action.nargs == 0 else "{" + ",".join(map(str, action.choices)) + "}" if action.choices else "")
        values = action.dest.upper() if values == "" else values
        text = " ".join(filter(None, [", ".join(action.option_strings), " ".join(values) if isinstance(values, tuple) else values]))
        meaning = re.sub(r"\s+", " ", (action.help or "") % vars(action) if "%(" in (action.help or "") else action.help or "")
        yield f"| `{text}` | {_sentence(meaning)} |\n".replace("\\|", "|").replace(text, text.replace("|", r"\|"))


def _sentence(text: str) -> str:
    """Help texts are parts of a sentence."""
    text = text.replace("%%", "%").replace("<", "&lt;").replace("|", r"\|")
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}" if text else ""


if __name__ == "__main__":
    main()
