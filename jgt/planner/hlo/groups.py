"""Which devices exchange data in a collective, and along which mesh axes.

XLA has several notations for the groups of a collective. For a mesh of data=2, stage=2, tensor=2 over eight devices, all of these say that
devices which differ only in `stage` exchange data:

    replica_groups={{0,2},{1,3},{4,6},{5,7}}           one group after another; {} is one group of all devices
    replica_groups=[4,2]<=[2,2,2]T(0,2,1)              the rows of np.arange(8).reshape(2,2,2).transpose(0,2,1).reshape(4,2)
    replica_groups=mesh['a'=2,'b'=2,'c'=2] {'b'}       groups along axis b of a mesh with names of XLA's own
    replica_groups=mesh['a'=4,'b'=2] {'a':(2)2}        along a part of axis a: the part of size 2 that comes after parts of size (2)
    replica_groups=mesh['a'=4,'b'=2], device_ids=(0,2,1,3,4,6,5,7) {'b'}    a mesh that lists its devices in another order

A collective-permute has pairs instead, `source_target_pairs={{0,1},{1,0}}`. XLA's own axis names say nothing about the user's mesh, so
every notation is expanded to device numbers, and an axis counts as involved if members of a group differ in it.

With `channel_id` and `use_global_device_ids=true` the numbers are devices; for all-gather, all-reduce and reduce-scatter with a
`channel_id` alone, they are replicas, each with all its partitions. JAX always makes one replica, so that `{{0}}` is every device
(GetCollectiveOpGroupMode in xla/service/collective_ops_utils.h).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jgt.planner.hlo.instruction import Instruction

# The value of replica_groups, in any notation: in braces, iota, or of a mesh.
_GROUPS = re.compile(
    r"\breplica_groups=(\{(?:\{[^}]*\},?\s*)*\}|\[[^ ]*?\](?:T\([\d,]+\))?(?=,|\s|$)|mesh\[[^\]]*\](?:, device_ids=\(.*?\)+)? \{[^}]*\})"
)
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?\s*)*)\}")
_EXPLICIT = re.compile(r"\{([\d,\s]*)\}")
# `[4,2]<=[2,2,2]T(0,2,1)`: the shape of the groups, of the numbers, and the order of their dims.
_IOTA = re.compile(r"^\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")
# `[2,4]T(1,0)` in device_ids: as above, without the shape of groups.
_ORDER = re.compile(r"^(?:<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?$")
# `mesh['a'=4,'b'=2], device_ids=(...) {'a':(2)2}`
_MESH = re.compile(r"^mesh\[([^\]]*)\](?:, device_ids=\((.*)\))? \{([^}]*)\}$")
# `'a'`, or a part of it, `'a':(2)2`; some versions of XLA leave out the quotes.
_AXIS = re.compile(r"^'?([^':=]+)'?(?::\((\d+)\)(\d+))?$")

Groups = tuple[tuple[int, ...], ...]


def groups_of(collective: Instruction, num_devices: int) -> Groups:
    """The groups of device numbers that exchange data; for a permutation, its pairs of source and target.

    Devices are numbered in the order of the program's mesh. Raises ValueError for an unknown notation.
    """
    if found := _PAIRS.search(collective.text):
        return tuple(_numbers(pair) for pair in _EXPLICIT.findall(found[1]))
    if found := _GROUPS.search(collective.text):
        # Numbers that do not fit together, or an axis that the mesh lacks: reported below, with the text.
        with contextlib.suppress(ValueError, KeyError):
            return _parse(found[1], num_devices, of_replicas=_are_of_replicas(collective))
    written = re.search(r"(?:replica_groups|source_target_pairs)=.{0,120}", collective.text)
    shown = written[0] if written else "no replica_groups"
    raise ValueError(f"the groups of {collective.op} {collective.name} are written in a notation that jgt does not know: {shown}")


class Participants(NamedTuple):
    """The devices of a collective: its groups of two or more, the mesh axes along which members differ, and the size of a group."""

    groups: Groups
    axes: tuple[str, ...]
    size: int


def participants_of(collective: Instruction, mesh: Mapping[str, int], num_devices: int) -> Participants:
    """The devices of a collective on a mesh of axis sizes. Raises ValueError like `groups_of`."""
    # Groups of one device exchange nothing, and neither do a permutation's pairs of a device with itself.
    groups = tuple(group for group in groups_of(collective, num_devices) if len(set(group)) > 1)
    axes = axes_between(groups, mesh)
    # A permutation's pairs are links, not groups: a ring of four has four pairs. Its group is what the links connect.
    is_permutation = collective.kind == "collective-permute"
    size = math.prod(mesh[axis] for axis in axes) if is_permutation else max((len(group) for group in groups), default=1)
    return Participants(groups=groups, axes=axes, size=size)


def axes_between(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which members of a group have different coordinates, in the mesh's order."""
    sizes = tuple(mesh.values())
    axes: set[str] = set()
    for group in groups:
        coordinates = np.stack(np.unravel_index(np.array(group), sizes))
        axes |= {axis for axis, along in zip(mesh, coordinates, strict=True) if (along != along[0]).any()}
    return tuple(axis for axis in mesh if axis in axes)


def _are_of_replicas(collective: Instruction) -> bool:
    """Whether the groups list replicas instead of devices (see the module's docstring)."""
    ids = "channel_id=" in collective.text and "use_global_device_ids=true" not in collective.text
    return ids and collective.kind in ("all-gather", "all-reduce", "reduce-scatter")


# A program has many collectives and few different groups.
@functools.lru_cache(maxsize=4096)
def _parse(text: str, num_devices: int, *, of_replicas: bool) -> Groups:
    if text.startswith("{"):
        groups = tuple(_numbers(group) for group in _EXPLICIT.findall(text[1:-1]))
        if not groups or (of_replicas and groups == ((0,),)):
            return (tuple(range(num_devices)),)
        return groups
    if found := _IOTA.match(text):
        return _rows(_iota(found[2], found[3]).reshape(_numbers(found[1])))
    if found := _MESH.match(text):
        return _groups_of_mesh(found[1], found[2], found[3])
    raise ValueError(f"unknown notation: {text[:120]}")


def _groups_of_mesh(axes: str, device_ids: str | None, grouped: str) -> Groups:
    """Expands `mesh[axes], device_ids=(device_ids) {grouped}`: an array of devices with a dim for each axis or part of one.

    The dims that are grouped go last, in the order in which they are listed; each row is then a group.
    """
    sizes = {name: int(size) for name, size in (part.replace("'", "").strip().rsplit("=", 1) for part in axes.split(","))}
    parts = [_AXIS.match(part.strip()) for part in grouped.split(",") if part.strip()]
    if not all(parts):
        raise ValueError(f"unknown notation of axes: {grouped}")
    # (axis, product of the sub-axes before, size), where a size of 0 is the whole axis.
    wanted = [(p[1], int(p[2] or 1), int(p[3] or 0)) for p in parts if p]
    shape: list[int] = []
    dim_of: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        for before, part in _sub_axes(size, [(before, own or size) for axis, before, own in wanted if axis == name]):
            dim_of[name, before] = len(shape)
            shape.append(part)
    last = [dim_of[name, before] for name, before, _ in wanted]
    ids = np.arange(math.prod(sizes.values())) if device_ids is None else _device_ids(device_ids)
    ids = ids.reshape(shape).transpose([d for d in range(len(shape)) if d not in last] + last)
    return _rows(ids.reshape(-1, math.prod(shape[d] for d in last)))


def _sub_axes(size: int, used: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of an axis as (product of the parts before, size), outermost first, split where a used part begins or ends.

    Of an axis of 8, `(2)2` splits it into (1)2, (2)2 and (4)2.
    """
    bounds = sorted({1, size} | {before for before, _ in used} | {before * part for before, part in used})
    return [(a, b // a) for a, b in itertools.pairwise(bounds)] or [(1, 1)]


def _device_ids(text: str) -> np.ndarray:
    if found := _ORDER.match(text):
        return _iota(found[1], found[2])
    return np.array(_numbers(text))


def _iota(dims: str, order: str | None) -> np.ndarray:
    shape = _numbers(dims)
    return np.arange(math.prod(shape)).reshape(shape).transpose(_numbers(order) if order else None)


def _rows(groups: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in groups.tolist())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n.strip())
