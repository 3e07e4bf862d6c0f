"""One document over another: a file over the file that it `extends:`, and a command line's overrides over both.

A run is described once and varied often. `extends: base.yaml` takes everything from another file and replaces single
entries; `train.steps=300` on the command line replaces one more. Both work on nodes, so that each value keeps the place it was
really written: a wrong value that comes from the base file is reported with the base file's line.

The child wins and its entries come first, because in rules the first match wins. A null removes what the parent has; a list
replaces the parent's list whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jgt.document.files import locate, read_text
from jgt.document.node import Node, dotted_key
from jgt.document.problems import InputError, shown
from jgt.document.reader import MAX_DEPTH, MAX_KEY, build, parse

MAX_BYTES = 1_000_000
"""The largest YAML file, and more than any person writes."""

MAX_FILES = 32
"""The longest chain of files that extend each other."""

_MAX_SHOWN = 200


def read(path: str | Path, folder: str = "") -> Node:
    """Reads a YAML file and the files that it extends. Raises InputError with every problem of them.

    `jgt:NAME` is a shipped file; folder: the folder of shipped files in which it is looked up.
    """
    problems: list[str] = []
    node = Node({}, str(path))
    with InputError.collect(problems):
        node = _read(locate(path, folder), problems, seen=())
    if problems:
        raise InputError(problems)
    return node


def merge(child: Node, parent: Node) -> Node:
    """`child` over `parent`, entry by entry: the child's entries come first, and a null removes the parent's."""
    if not (isinstance(child.value, dict) and isinstance(parent.value, dict)):
        return child
    merged: dict[str, Node] = {}
    for name, node in child.value.items():
        inherited = parent.value.get(name)
        # A null that removes nothing stays: it may be the value that the user wants in place of a default.
        if inherited is not None and node.value is None:
            continue
        merged[name] = node if inherited is None else merge(node, inherited)
    for name, node in parent.value.items():
        if name not in child.value:
            merged[name] = node
    return Node(merged, child.where, child.key)


def override(root: Node, assignment: str, where: str = "") -> Node:
    """The document with one `key.sub=value` applied, whose value is YAML. where: its place, if not the command line. Raises InputError."""
    key, equals, text = assignment.partition("=")
    where = where or f"command line: {assignment if len(assignment) <= _MAX_SHOWN else f'{assignment[:_MAX_SHOWN]}...'}"
    parts = key.split(".")
    if not equals or not all(parts):
        raise InputError([f"{where}: an override is written key.sub=value, for example train.steps=300"])
    if len(parts) > MAX_DEPTH or len(key) > MAX_KEY:
        limits = f"the limits are {MAX_DEPTH} levels and {MAX_KEY:,} characters"
        raise InputError([f"{where}: the key has {len(parts)} levels and {len(key):,} characters; {limits}"])
    # Parsed alone, the value has places such as "command line: ...:1" and keys that begin at itself. Rebuilt from plain values,
    # it has the place and the key that it gets inside the document.
    return _replace(root, parts, Node.of(parse(text, where).plain(), where, key))


def _replace(root: Node, parts: Sequence[str], node: Node) -> Node:
    """`root` with `node` at a path. Mappings that are missing along the path are created."""
    if not parts:
        return node
    name, *rest = parts
    if not (root.value is None or isinstance(root.value, dict)):
        below = node.key.removeprefix(f"{root.key}.")
        problem = f"is {root.in_words()} ({root.where}), not a mapping, so {shown(below)} cannot be set below it"
        raise InputError([f"{node.where}: {root.key or 'file'}: {problem}"])
    # Copied from the root down to the key; what is beside the path is shared with the old document.
    values = dict(root.children)
    values[name] = _replace(values.get(name, Node(None, node.where, dotted_key(root.key, name))), rest, node)
    return Node(values, root.where, root.key)


def _read(path: Path, problems: list[str], seen: tuple[Path, ...]) -> Node:
    """A file over its parents. `seen`: the files that lead to it, each extending the next.

    Appends the problems of a file that can still be merged to `problems`; raises InputError if nothing more can be read.
    """
    text = read_text(path, MAX_BYTES)
    # Resolved, a file is recognized under another spelling of its path.
    resolved = path.resolve()
    if resolved in seen:
        circle = " -> ".join(p.name for p in (*seen, resolved))
        raise InputError([f"{path}: extends: the files extend each other in a circle: {circle}"])
    if len(seen) == MAX_FILES:
        raise InputError([f"{path}: extends: more than {MAX_FILES} files extend each other"])
    num_before = len(problems)
    node = build(text, str(path), problems)
    if node.value is None:
        # Read as a file without keys, it would be a run or rules that the user did not write.
        if len(problems) == num_before:
            problems.append(f"{path}: the file is empty. Write its keys, or name another file")
        return Node({}, str(path))
    if not isinstance(node.value, dict):
        raise InputError([f"{node.where}: the file must be a mapping of keys to values, not {node.in_words()}"])
    # The node was built just now and is shared with no one, so that removing the key is safe.
    extends = node.value.pop("extends", None)
    return node if extends is None else merge(node, _read(extends.existing_file(path.parent), problems, (*seen, resolved)))
