"""`jgt COMMAND`, the same as `python -m jgt COMMAND`. Commands are entry points, so that jgt need not know the trainer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

from jgt.document import nearest

USAGE = "usage: jgt COMMAND [options]      jgt COMMAND --help tells a command's options"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Exit code 2: no such command; otherwise the command's own."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    commands = {entry.name: entry for entry in entry_points(group="jgt.commands")}
    if name in ("-h", "--help"):
        print(f"{USAGE}\n\ncommands: {', '.join(sorted(commands))}\n\nTo train: python -m train --config FILE")
        return 0
    if name not in commands:
        wrong = "a command is missing" if not name else f"there is no command {name!r}"
        print(f"jgt: {wrong}. {nearest(name, sorted(commands))}\n{USAGE}", file=sys.stderr)
        return 2
    return commands[name].load()(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
