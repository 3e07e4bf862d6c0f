"""YAML files, and the files that they extend."""

from __future__ import annotations

from pathlib import Path

from jgt.document.edit import merge
from jgt.document.node import InputError, Node, collect, describe
from jgt.document.reader import build
from jgt.document.regular import is_file, read_text

MAX_BYTES = 1_000_000
MAX_FILES = 32


def read(path: str | Path) -> Node:
    """Reads a YAML file, following `extends:` (a path beside the file). Raises InputError with every problem."""
    problems: list[str] = []
    node = _read(Path(path), problems, seen=())
    if problems:
        raise InputError(problems)
    return node


def _read(path: Path, problems: list[str], seen: tuple[Path, ...]) -> Node:
    nothing = Node({}, str(path))
    text = None
    with collect(problems):
        text = read_text(path, MAX_BYTES)
    if text is None:
        return nothing
    resolved = path.resolve()
    if resolved in seen:
        circle = " -> ".join(p.name for p in (*seen, resolved))
        problems.append(f"{path}: extends: the files extend each other in a circle: {circle}")
        return nothing
    if len(seen) == MAX_FILES:
        problems.append(f"{path}: extends: more than {MAX_FILES} files extend each other")
        return nothing
    node = build(text, str(path), problems)
    if not isinstance(node.value, dict):
        if node.value is not None:
            problems.append(f"{node.where}: the file must be a mapping of keys to values, not {describe(node.value)}")
        return nothing
    extends = node.value.pop("extends", None)
    parent = None if extends is None else _parent(path, extends, problems)
    return node if parent is None else merge(node, _read(parent, problems, (*seen, resolved)))


def _parent(path: Path, extends: Node, problems: list[str]) -> Path | None:
    if not isinstance(extends.value, str):
        problems.append(extends.problem(f"must be the path of a file, not {describe(extends.value)}"))
        return None
    parent = path.parent / extends.value
    if not is_file(parent):
        problems.append(extends.problem(f"no such file: {parent}"))
        return None
    return parent
