"""YAML files, and the files that they extend."""

from __future__ import annotations

from pathlib import Path

from jgt.document.edit import merge
from jgt.document.node import InputError, Node, describe
from jgt.document.reader import build

MAX_BYTES = 1_000_000


def read(path: str | Path) -> Node:
    """Reads a YAML file, following `extends:` (a path beside the file). Raises InputError with every problem."""
    problems: list[str] = []
    node = _read(Path(path), problems, seen=())
    if problems:
        raise InputError(problems)
    return node


def _read(path: Path, problems: list[str], seen: tuple[Path, ...]) -> Node:
    resolved = path.resolve()
    if resolved in seen:
        circle = " -> ".join(p.name for p in (*seen, resolved))
        problems.append(f"{path}: extends: the files extend each other in a circle: {circle}")
        return Node({}, str(path))
    text = _text(path, problems)
    node = Node({}, str(path)) if text is None else build(text, str(path), problems)
    if not isinstance(node.value, dict):
        if node.value is not None:
            problems.append(f"{node.where}: the file must be a mapping of keys to values, not {describe(node.value)}")
        return Node({}, str(path))
    extends = node.value.pop("extends", None)
    parent = None if extends is None else _parent(path, extends, problems)
    return node if parent is None else merge(node, _read(parent, problems, (*seen, resolved)))


def _text(path: Path, problems: list[str]) -> str | None:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror or error}")
        return None
    if len(data) > MAX_BYTES:
        problems.append(f"{path}: the file is larger than {MAX_BYTES:,} bytes, the most a YAML file may have here")
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        problems.append(f"{path}:{line}: not UTF-8: byte {data[error.start]:#04x} at offset {error.start}. Save the file as UTF-8")
        return None


def _parent(path: Path, extends: Node, problems: list[str]) -> Path | None:
    if not isinstance(extends.value, str):
        problems.append(extends.problem(f"must be the path of a file, not {describe(extends.value)}"))
        return None
    parent = path.parent / extends.value
    if not parent.is_file():
        problems.append(extends.problem(f"no such file: {parent}"))
        return None
    return parent
