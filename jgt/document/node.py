"""A document in memory: values that know their line, and the error that names it.

A YAML library returns dicts, and with them the places are lost: whoever finds a wrong value later can only say its name. Here
every value is a Node with the place it was written (`run.yaml:12`, or `command line: train.steps=3`) and its dotted key. A check
anywhere in the program turns a message into `node.problem(message)` and appends it to a list of problems instead of raising, so
that a single run reports all of them. At the end the list becomes one InputError, which sorts it by file and line.

Messages show names and values that come from the user's file, and that file may be hostile or broken. So all of them pass
through `shown` and `printable`, which bound their length and escape what a terminal would obey.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

MAX_PROBLEMS = 1_000
"""An InputError lists this many problems, and only counts the rest."""

_MAX_SHOWN = 100
_MAX_HALF_LINE = 1_000
# The name of a file may contain colons; the first number between two colons is the line.
_PLACE = re.compile(r"(.+?):(\d{1,9}): ")

Value: TypeAlias = "dict[str, Node] | list[Node] | str | int | float | bool | None"
"""The content of a node."""


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


def _line(problem: str) -> str:
    # A long message loses its middle: the place is at its beginning, and what is wrong at its end.
    return printable(problem if len(problem) <= 2 * _MAX_HALF_LINE else f"{problem[:_MAX_HALF_LINE]}...{problem[-_MAX_HALF_LINE:]}")


def _in_order(problems: Iterable[str]) -> list[str]:
    """Problems file by file, in the order in which the files are first named, and line by line."""
    files: dict[str, int] = {}

    def place(problem: str) -> tuple[int, int]:
        file, line = match.groups() if (match := _PLACE.match(problem)) else ("", "0")
        return files.setdefault(file, len(files)), int(line)

    return sorted(problems, key=place)


@contextlib.contextmanager
def collect(problems: list[str]) -> Generator[None]:
    """Appends the problems of an InputError raised inside to `problems` and continues after the block.

    with collect(problems):
        rules = rules_from_node(node)
    with collect(problems):         # also runs if the rules are wrong: both are reported
        table = find_table(...)
    """
    try:
        yield
    except InputError as error:
        problems += error.problems


@dataclass(frozen=True, slots=True)
class Node:
    """A value of a document. where: its place, `file:line`; key: its dotted key, `train.steps` or `axes.batch[0]`."""

    value: Value
    where: str
    key: str = ""

    def plain(self) -> Any:
        """The value as ordinary Python objects."""
        if isinstance(self.value, dict):
            return {name: child.plain() for name, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    @property
    def children(self) -> Mapping[str, Node]:
        """The entries of a mapping; empty for any other value."""
        return self.value if isinstance(self.value, dict) else {}

    def find(self, key: str) -> Node:
        """The node at a dotted key, such as `a.b[0].c`, or, if the document does not have it, its nearest ancestor."""
        node = self
        for part in filter(None, key.replace("[", ".[").split(".")):
            index = part[1:-1] if part.startswith("[") else ""
            if isinstance(node.value, list) and index.isdecimal() and int(index) < len(node.value):
                node = node.value[int(index)]
            elif part in node.children:
                node = node.children[part]
            else:
                break
        return node

    def problem(self, message: str) -> str:
        """A message about this value, with its place and key."""
        return f"{self.where}: {self.key or 'file'}: {message}"


def from_python(value: object, where: str, key: str = "") -> Node:
    """Ordinary Python objects as a node, so that rules and configs built in code go through the same checks as files."""
    if isinstance(value, Mapping):
        entries = cast("Mapping[object, object]", value).items()
        return Node({str(k): from_python(v, where, dotted_key(key, str(k))) for k, v in entries}, where, key)
    if isinstance(value, list | tuple):
        items = cast("Sequence[object]", value)
        return Node([from_python(v, where, f"{key}[{i}]") for i, v in enumerate(items)], where, key)
    # An object that YAML cannot express stays as it is: whoever reads the node refuses it with its place.
    return Node("..." if value is ... else cast("Value", value), where, key)


def dotted_key(key: str, name: str) -> str:
    """The dotted key of a name below a key."""
    return f"{key}.{name}" if key else name


# -- the words of messages


def printable(text: str) -> str:
    """The text with escapes in place of line ends, control characters and lone surrogates."""
    return text if text.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(value: object, most: int = _MAX_SHOWN) -> str:
    """A value as YAML writes it, shortened to about `most` characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return repr(value) if len(value) <= most else f"{value[:most]!r}..."
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def describe(value: object) -> str:
    """A value in words, for messages: `a list`, `the whole number 3`, `the text 'x'`."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return str(value).lower()
    kind = "the whole number " if isinstance(value, int) else "the number " if isinstance(value, float) else ""
    return f"{'the text ' if isinstance(value, str) else kind}{shown(value)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """`Did you mean 'x'?` with the most similar of the known names or, if none is similar, a list of them."""
    options = list(dict.fromkeys(known))
    if close := suggestion(name, options):
        return close.lstrip()
    if not options:
        return "No name is known here."
    return f"Known: {', '.join(options[:12])}{', ..' if len(options) > 12 else ''}."


def suggestion(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, for a message that lists the known names already; empty if none is similar."""
    close = most_similar(name, known)
    return "" if close is None else f" Did you mean {close!r}?"


def most_similar(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` may be a misspelling of, if there is one."""
    # difflib takes quadratic time, and a name this long is not a misspelt one.
    if len(name) > _MAX_SHOWN:
        return None
    # 0.5 finds 'stpes' and 'n_layers' for 'layers', and leaves unrelated names out.
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)), None)
