"""Reads the mesh axes in a rules file: a name, a group of names under `axes:`, or a spec, which lists the axes of each dim of a tensor.

A spec is JAX's PartitionSpec as a plain tuple, so that it can be read, compared and checked without JAX. `...` stands for any number of
dims that are not sharded: `[[data, fsdp], null, ...]` in a rules file is `(("data", "fsdp"), (), ...)`.

The names of groups are replaced by their mesh axes while a spec is read, so no other file knows them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import EllipsisType
from typing import Annotated

from jgt.document.bind import ReadBy
from jgt.document.node import Node

MAX_AXES = 32
"""The most axes that a mesh can have. A group is written out wherever its name appears, so its length is limited."""

AxisGroups = Mapping[str, tuple[str, ...]]
"""The axes of each group, by its name: what readers of axes are given."""

Entry = tuple[str, ...] | EllipsisType


def read_group(node: Node, problems: list[str], _: object = None) -> tuple[str, ...]:
    """The axes of a group. A group of one axis may be written without brackets."""
    children = node.value if isinstance(node.value, list) else [node]
    names = [child.value for child in children if isinstance(child.value, str)]
    if len(names) < len(children):
        problems.append(node.problem("an axes group is a list of mesh axes, for example batch: [data, fsdp]"))
    elif len(names) > MAX_AXES:
        problems.append(node.problem(f"has {len(names):,} axes; a mesh has at most {MAX_AXES}"))
    elif doubled := _doubled(names):
        problems += [node.problem(f"the axis {axis!r} appears twice in one group. Remove one of them") for axis in doubled]
    else:
        return tuple(names)
    return ()


def _read_axis(node: Node, problems: list[str], groups: AxisGroups) -> str:
    axes = _axes(node, problems, groups)
    if len(axes) > 1:
        problems.append(node.problem(f"takes one mesh axis, but {node.value!r} stands for {', '.join(axes)}. Write one of them"))
    return next(iter(axes), "")


def read_spec(node: Node, problems: list[str], groups: AxisGroups) -> tuple[Entry, ...]:
    """The axes of each dim of a spec."""
    if not isinstance(node.value, list):
        problem = f"a spec is a list with an axis, a list of axes, null or `...` for each dim ([] replicates), not {node.in_words()}"
        problems.append(node.problem(problem))
        return ()
    entries = tuple(_entry(child, problems, groups) for child in node.value)
    if entries.count(...) > 1:
        problems.append(node.problem("`...` may appear only once in a spec"))
    for axis in _doubled(axis for entry in entries if entry is not ... for axis in entry):
        problem = f"the axis {axis!r} appears twice in one spec, but an axis can shard only one dim of a tensor. Remove one of them"
        problems.append(node.problem(problem))
    # `[]` replicates a tensor of any rank, which only `...` can say.
    return entries or (...,)


def _entry(node: Node, problems: list[str], groups: AxisGroups) -> Entry:
    if node.value is None:
        return ()
    if node.value == "...":
        return ...
    if isinstance(node.value, str | list):
        return _read_axes(node, problems, groups)
    problems.append(node.problem(f"a spec entry is an axis, a list of axes, null or `...`, not {node.in_words()}"))
    return ()


def _read_axes(node: Node, problems: list[str], groups: AxisGroups) -> tuple[str, ...]:
    """The axes of a list of names, or of one name, each a mesh axis or a group."""
    children = node.value if isinstance(node.value, list) else [node]
    return tuple(axis for child in children for axis in _axes(child, problems, groups))


def _axes(node: Node, problems: list[str], groups: AxisGroups) -> tuple[str, ...]:
    if not isinstance(node.value, str) or node.value == "...":
        problems.append(node.problem(f"must be the name of a mesh axis or of a group in axes:, not {node.in_words()}"))
        return ()
    return groups.get(node.value, (node.value,))


def _doubled(axes: Iterable[str]) -> list[str]:
    return [axis for axis, count in Counter(axes).items() if count > 1]


_NAME = {"type": "string"}
_NAMES = {"type": "array", "items": _NAME}
_DIMS = "The mesh axes of each dim: an axis, a list of axes, null for a dim that is not split, or `...` for several of those."

Axis = Annotated[str, ReadBy(_read_axis, _NAME)]
AxisNames = Annotated[tuple[str, ...], ReadBy(_read_axes, {"anyOf": [_NAME, _NAMES]})]
Group = Annotated[tuple[str, ...], ReadBy(read_group, {"anyOf": [_NAME, _NAMES]})]
SPEC_SCHEMA = {"description": _DIMS, "type": "array", "items": {"anyOf": [_NAME, _NAMES, {"type": "null"}]}}
Spec = Annotated[tuple[Entry, ...], ReadBy(read_spec, SPEC_SCHEMA)]
"""The axes of each dim, major to minor; () for no axis. One entry may be `...`, for any number of dims."""
