"""A document in memory: values that know their line.

A YAML library returns dicts, and with them the places are lost: whoever finds a wrong value later can only say its name. Here
every value is a Node with the place it was written (`run.yaml:12`, or `command line: train.steps=3`) and its dotted key. A check
anywhere in the program turns a message into `node.problem(message)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from jgt.document.files import locate, path_problem, shipped_folder, similar_file, url_problem
from jgt.document.problems import InputError, shown

Value: TypeAlias = "dict[str, Node] | list[Node] | str | int | float | bool | None"
"""The content of a node."""


@dataclass(frozen=True, slots=True)
class Node:
    """A value of a document. where: its place, `file:line`; key: its dotted key, `train.steps` or `axes.batch[0]`."""

    value: Value
    where: str
    key: str = ""

    @classmethod
    def of(cls, value: object, where: str, key: str = "") -> Node:
        """Ordinary Python objects as a node, so that rules and configs built in code go through the same checks as files."""
        if isinstance(value, Mapping):
            entries = cast("Mapping[object, object]", value).items()
            return Node({str(k): Node.of(v, where, dotted_key(key, str(k))) for k, v in entries}, where, key)
        if isinstance(value, list | tuple):
            items = cast("Sequence[object]", value)
            return Node([Node.of(v, where, f"{key}[{i}]") for i, v in enumerate(items)], where, key)
        # An object that YAML cannot express stays as it is: whoever reads the node refuses it with its place.
        return Node("..." if value is ... else cast("Value", value), where, key)

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

    def in_words(self) -> str:
        """The value in words, for messages: `a list`, `the whole number 3`, `the text 'x'`."""
        names: dict[type, str] = {dict: "a mapping", list: "a list", int: "the whole number ", float: "the number ", str: "the text "}
        name = names.get(type(self.value), "code, an argument of jgt.run (such as loss=): " if callable(self.value) else "")
        return name if isinstance(self.value, dict | list) else f"{name}{shown(self.value)}"

    @property
    def file(self) -> Path:
        """The file in which the value was written."""
        return Path(self.where.rpartition(":")[0])

    def is_shipped(self, folder: str = "") -> bool:
        """Whether it was written in a file that comes with jgt. folder: in which of the folders of shipped files."""
        return self.file.resolve().is_relative_to(shipped_folder().resolve() / folder)

    def path(self, folder: Path, shipped: str = "") -> Path:
        """The path that the value names: beside the file in which it was written, or in `folder` if it was not written in a file.

        shipped: the folder of shipped files in which `jgt:NAME` is looked up.
        """
        # A shipped file has an absolute path, which replaces the folder.
        return (folder if path_problem(self.file) else self.file.parent) / locate(str(self.value), shipped)

    def existing_file(self, folder: Path, shipped: str = "") -> Path:
        """As `path`, for a file that must exist. Raises InputError."""
        if not isinstance(self.value, str):
            raise InputError([self.problem(f"must be the path of a file, not {self.in_words()}")])
        if problem := url_problem(self.value):
            raise InputError([self.problem(problem)])
        path = self.path(folder, shipped)
        if problem := path_problem(path):
            # A missing file needs no reason.
            is_shipped = not path_problem(shipped_folder() / shipped / f"{self.value}.yaml")
            near = f" Did you mean 'jgt:{self.value}'?" if is_shipped else similar_file(path)
            why = f".{near}" if path_problem(path, "folder") else f": {problem}"
            raise InputError([self.problem(f"no such file: {path}{why}")])
        return path


def dotted_key(key: str, name: str) -> str:
    """The dotted key of a name below a key."""
    return f"{key}.{name}" if key else name
