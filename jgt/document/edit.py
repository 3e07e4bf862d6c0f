"""One document over another: `extends:` and the overrides of a command line."""

from __future__ import annotations

from collections.abc import Sequence

from jgt.document.node import InputError, Node, describe, joined
from jgt.document.reader import MAX_DEPTH, MAX_KEY, parse

_SHOWN = 200


def merge(child: Node, parent: Node) -> Node:
    """`child` over `parent`, entry by entry: the child's entries come first, and a null removes the parent's."""
    if not (isinstance(child.value, dict) and isinstance(parent.value, dict)):
        return child
    merged: dict[str, Node] = {}
    for name, node in child.value.items():
        inherited = parent.value.get(name)
        if inherited is not None and node.value is None:
            continue
        merged[name] = node if inherited is None else merge(node, inherited)
    for name, node in parent.value.items():
        if name not in child.value:
            merged[name] = node
    return Node(merged, child.where, child.key)


def override(root: Node, assignment: str) -> Node:
    """Puts one `key.sub=value` of a command line in the place of what the key holds; the value is YAML. Raises InputError."""
    key, equals, text = assignment.partition("=")
    where = f"command line: {assignment if len(assignment) <= _SHOWN else f'{assignment[:_SHOWN]}...'}"
    parts = key.split(".")
    if not equals or not all(parts):
        raise InputError([f"{where}: an override is written key.sub=value, for example train.steps=300"])
    if len(parts) > MAX_DEPTH or len(key) > MAX_KEY:
        raise InputError([f"{where}: the key has {len(parts)} levels and {len(key):,} characters; at most {MAX_DEPTH} and {MAX_KEY:,} are read"])
    value = parse(text, where)
    return _replaced(root, parts, _relocate(value, where, key))


def _replaced(root: Node, parts: Sequence[str], node: Node) -> Node:
    """`root` with the value at a path replaced; mappings on the way that are missing are made."""
    if not parts:
        return node
    name, *rest = parts
    if not (root.value is None or isinstance(root.value, dict)):
        below = node.key.removeprefix(f"{root.key}.")
        raise InputError([f"{node.where}: {root.key or 'file'}: holds {describe(root.value)} ({root.where}), so {below!r} cannot be set below it"])
    values = dict(root.value) if root.value else {}
    values[name] = _replaced(values.get(name, Node(None, node.where, joined(root.key, name))), rest, node)
    return Node(values, root.where, root.key)


def _relocate(node: Node, where: str, key: str) -> Node:
    if isinstance(node.value, dict):
        return Node({k: _relocate(v, where, joined(key, k)) for k, v in node.value.items()}, where, key)
    if isinstance(node.value, list):
        return Node([_relocate(v, where, f"{key}[{i}]") for i, v in enumerate(node.value)], where, key)
    return Node(node.value, where, key)
