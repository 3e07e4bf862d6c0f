"""A document in memory: values that know their line, and the error that names it."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_PLACE = re.compile(r"(.+?):(\d{1,9}): ")
_SHOWN = 100
MAX_PROBLEMS = 1_000
_HALF = 1_000


class InputError(ValueError):
    """The input is wrong. `problems` has one `file:line: key: what, what is allowed, what to change` each.

    Each is one line that a terminal can show: names come from the input, what is not printable in them is escaped. Of a long
    message beginning and end are kept, of many messages the first MAX_PROBLEMS.
    """

    def __init__(self, problems: Iterable[str]):
        found = _in_order(dict.fromkeys(map(_line, problems)))
        more = [f"and {len(found) - MAX_PROBLEMS:,} more problems"] if len(found) > MAX_PROBLEMS else []
        self.problems = (*found[:MAX_PROBLEMS], *more)
        super().__init__("\n".join(self.problems))


def _line(problem: str) -> str:
    # What is wrong stands at the end.
    return printable(problem if len(problem) <= 2 * _HALF else f"{problem[:_HALF]}...{problem[-_HALF:]}")


def _in_order(problems: Iterable[str]) -> list[str]:
    """Problems file by file, as the files were first named, and line by line."""
    files: dict[str, int] = {}

    def place(problem: str) -> tuple[int, int]:
        file, line = match.groups() if (match := _PLACE.match(problem)) else ("", "0")
        return files.setdefault(file, len(files)), int(line)

    return sorted(problems, key=place)


@contextlib.contextmanager
def collect(problems: list[str]) -> Iterator[None]:
    """Appends what an InputError inside says to `problems` and goes on: the next part is checked too."""
    try:
        yield
    except InputError as error:
        problems += error.problems


@dataclass(frozen=True, slots=True)
class Node:
    """A value of a document: a dict of nodes, a list of nodes or a scalar; where it stands; its dotted key."""

    value: Any
    where: str
    key: str = ""

    def plain(self) -> Any:
        """The value as ordinary Python objects."""
        if isinstance(self.value, dict):
            return {name: child.plain() for name, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def find(self, key: str) -> Node:
        """The node at a dotted key, or its nearest ancestor that was written down."""
        node = self
        for part in filter(None, key.split(".")):
            if not (isinstance(node.value, dict) and part in node.value):
                break
            node = node.value[part]
        return node

    def problem(self, message: str) -> str:
        return f"{self.where}: {self.key or 'file'}: {message}"


def from_python(value: Any, where: str, key: str = "") -> Node:
    """Wraps ordinary Python objects, so that rules and configs built in code are checked like files."""
    if isinstance(value, Mapping):
        return Node({str(k): from_python(v, where, joined(key, str(k))) for k, v in value.items()}, where, key)
    if isinstance(value, list | tuple):
        return Node([from_python(v, where, f"{key}[{i}]") for i, v in enumerate(value)], where, key)
    return Node("..." if value is ... else value, where, key)


def printable(text: str) -> str:
    """The text with escapes for line ends, control characters and what is no character."""
    return text if text.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def joined(key: str, name: str) -> str:
    """The dotted key of a name below a key."""
    return f"{key}.{name}" if key else name


def describe(value: Any) -> str:
    """A value of a document, in words."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    kind = {bool: "", int: "the whole number ", float: "the number ", str: "the text "}.get(type(value), "")
    return f"{kind}{str(value).lower() if isinstance(value, bool) else shown(value)}"


def shown(value: Any, most: int = _SHOWN) -> str:
    """The repr of a value, cut after `most` characters."""
    if isinstance(value, str):
        return repr(value) if len(value) <= most else f"{value[:most]!r}..."
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def nearest(name: str, known: Iterable[str]) -> str:
    """`Did you mean 'x'?` with the nearest of `known`, or the list of them."""
    options = list(dict.fromkeys(known))
    close = suggestion(name, options)
    if close:
        return close.lstrip()
    if not options:
        return "None is known here."
    shown = ", ".join(options[:12]) + (", .." if len(options) > 12 else "")
    return f"Known: {shown}."


def suggestion(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` with the nearest of `known`, for a message that lists them already; empty when none is near."""
    if len(name) > _SHOWN:
        return ""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
