"""The error of all wrong input, and the words of its messages.

A check turns a message into `file:line: key: what is wrong` and appends it to a list of problems instead of raising, so that a single run
reports all of them. At the end the list becomes one InputError, which sorts it by file and line.

Messages show names and values that come from the user's file, and that file may be hostile or broken. So all of them pass through `shown`,
which bounds their length and escapes what a terminal would obey.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Generator, Iterable

MAX_PROBLEMS = 1_000
"""An InputError lists this many problems, and only counts the rest."""

_MAX_SHOWN = 100
_MAX_HALF_LINE = 1_000
# The name of a file may contain colons; the first number between two colons is the line.
_PLACE = re.compile(r"(.+?):(\d{1,9}): ")


class InputError(ValueError):
    """The user's input is wrong.

    problems: messages of the form `file:line: key: what is wrong. What is allowed. What to change.`, each a printable line of
    bounded length, at most MAX_PROBLEMS of them, in the order of files and lines.
    """

    def __init__(self, problems: Iterable[str]):
        # A mistake that two checks find is reported once.
        lines = _in_order(dict.fromkeys(map(_line, problems)))
        rest = [f"and {len(lines) - MAX_PROBLEMS:,} more problems"] if len(lines) > MAX_PROBLEMS else []
        self.problems = (*lines[:MAX_PROBLEMS], *rest)
        super().__init__("\n".join(self.problems))

    @staticmethod
    @contextlib.contextmanager
    def collect(problems: list[str]) -> Generator[None]:
        """Appends the problems of an InputError raised inside to `problems` and continues after the block.

        with InputError.collect(problems):
            rules = rules_from_node(node)
        with InputError.collect(problems):      # also runs if the rules are wrong: both are reported
            table = find_table(...)
        """
        try:
            yield
        except InputError as error:
            problems += error.problems


def _line(problem: str) -> str:
    # A long message loses its middle: the place is at its beginning, and what is wrong at its end.
    return _printable(problem if len(problem) <= 2 * _MAX_HALF_LINE else f"{problem[:_MAX_HALF_LINE]}...{problem[-_MAX_HALF_LINE:]}")


def _in_order(problems: Iterable[str]) -> list[str]:
    """Problems file by file, in the order in which the files are first named, and line by line."""
    files: dict[str, int] = {}

    def place(problem: str) -> tuple[int, int]:
        file, line = match.groups() if (match := _PLACE.match(problem)) else ("", "0")
        return files.setdefault(file, len(files)), int(line)

    return sorted(problems, key=place)


def shown(value: object, most: int = _MAX_SHOWN, *, quotes: bool = True) -> str:
    """A value as YAML writes it, shortened to about `most` characters. quotes: whether text is in quotes; it is printable either way."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        text = value[:most]
        return f"{repr(text) if quotes else _printable(text)}{'...' if len(value) > most else ''}"
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def _printable(text: str) -> str:
    """The text with escapes in place of line ends, control characters and lone surrogates."""
    return text if text.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def nearest(name: str, known: Iterable[str], *, lists: bool = True) -> str:
    """`Did you mean 'x'?` with the most similar of the known names.

    If none is similar, a list of them; empty without `lists`, for a message that lists the names already.
    """
    options = list(dict.fromkeys(known))
    if (close := most_similar(name, options)) is not None:
        return f"Did you mean {close!r}?"
    if not lists:
        return ""
    return f"Known: {', '.join(options[:24])}{', ..' if len(options) > 24 else ''}." if options else "There is none."


def most_similar(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` may be a misspelling of, if there is one."""
    # difflib takes quadratic time, and a name this long is not a misspelt one.
    if len(name) > _MAX_SHOWN:
        return None
    # This finds 'stpes' and 'n_layers' for 'layers', and leaves unrelated names out, such as 'lion' for 'muon'.
    plain = {one.lower(): one for one in known}
    return next((plain[one] for one in difflib.get_close_matches(name.lower(), list(plain), n=1, cutoff=0.51)), None)
