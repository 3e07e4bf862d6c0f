"""Who takes part in a collective: the ways XLA writes groups of devices, and the mesh axes that they span."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jgt.plan.hlo import Instruction

_GROUPS = re.compile(r"\breplica_groups=(\{(?:\{[^}]*\},?\s*)*\}|\[[^ ]*?\](?:T\([\d,]+\))?(?=,|\s|$)|mesh\[[^\]]*\](?:, device_ids=\(.*?\)+)? \{[^}]*\})")
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?\s*)*)\}")
_EXPLICIT = re.compile(r"\{([\d,\s]*)\}")
_IOTA = re.compile(r"^\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_ORDER = re.compile(r"^(?:<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_MESH = re.compile(r"^mesh\[([^\]]*)\](?:, device_ids=\((.*)\))? \{([^}]*)\}$")
_AXIS = re.compile(r"^'?([^':=]+)'?(?::\((\d+)\)(\d+))?$")

Groups = tuple[tuple[int, ...], ...]


def groups_of(collective: Instruction, num_devices: int) -> Groups:
    """The groups of device numbers that exchange data; for a permutation its pairs of source and target.

    Devices are numbered as the program's mesh lists them. Raises ValueError for a syntax that is not known.
    """
    if "source_target_pairs=" in collective.text:
        found = _PAIRS.search(collective.text)
        if found:
            return tuple(_numbers(pair) for pair in _EXPLICIT.findall(found[1]))
    elif found := _GROUPS.search(collective.text):
        with contextlib.suppress(ValueError, KeyError):
            return _read(found[1], num_devices, whole=_spans_replicas(collective))
    written = re.search(r"(?:replica_groups|source_target_pairs)=.{0,120}", collective.text)
    shown = written[0] if written else "no replica_groups"
    raise ValueError(f"the groups of {collective.op} {collective.name} are written in a way that jgt does not know: {shown}")


@dataclass(frozen=True)
class Span:
    """Who takes part in a collective: its groups without those of one device, the mesh axes in which members differ, members of one."""

    groups: Groups
    axes: tuple[str, ...]
    size: int


def span_of(collective: Instruction, mesh: Mapping[str, int], num_devices: int) -> Span:
    """The span of a collective on a mesh. Raises ValueError like `groups_of`."""
    groups = tuple(group for group in groups_of(collective, num_devices) if len(set(group)) > 1)
    axes = spanned(groups, mesh)
    # Pairs of a permutation are no groups: what they link is.
    is_permutation = collective.kind == "collective-permute"
    size = math.prod(mesh[axis] for axis in axes) if is_permutation else max((len(group) for group in groups), default=1)
    return Span(groups=groups, axes=axes, size=size)


def spanned(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of a mesh in which devices of one group differ, in the mesh's order."""
    sizes = tuple(mesh.values())
    axes: set[str] = set()
    for group in groups:
        places = np.stack(np.unravel_index(np.array(group), sizes))
        axes |= {axis for axis, place in zip(mesh, places, strict=True) if (place != place[0]).any()}
    return tuple(axis for axis in mesh if axis in axes)


def _spans_replicas(collective: Instruction) -> bool:
    """Whether groups name replicas, each with all devices of the program, as XLA has it without global ids."""
    ids = "channel_id=" in collective.text and "use_global_device_ids=true" not in collective.text
    return ids and collective.kind in ("all-gather", "all-reduce", "reduce-scatter")


@functools.lru_cache(maxsize=4096)
def _read(text: str, num_devices: int, *, whole: bool) -> Groups:
    if text.startswith("{"):
        groups = tuple(_numbers(group) for group in _EXPLICIT.findall(text[1:-1]))
        if not groups or (whole and groups == ((0,),)):
            return (tuple(range(num_devices)),)
        return groups
    if found := _IOTA.match(text):
        return _rows(_iota(found[2], found[3]).reshape(_numbers(found[1])))
    if found := _MESH.match(text):
        return _of_mesh(found[1], found[2], found[3])
    raise ValueError(f"groups of devices are written in a way that jgt does not know: {text[:120]}")


def _of_mesh(axes: str, device_ids: str | None, grouped: str) -> Groups:
    sizes = {name: int(size) for name, size in (part.replace("'", "").strip().rsplit("=", 1) for part in axes.split(","))}
    shape, taken = [], []
    parts = [_AXIS.match(part.strip()) for part in grouped.split(",") if part.strip()]
    if not all(parts):
        raise ValueError(f"axes of a group are written in a way that jgt does not know: {grouped}")
    wanted = [(p[1], int(p[2] or 1), int(p[3] or 0)) for p in parts if p]
    place: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        # An axis falls into sub-axes: `a:(2)4` is the part of a of size 4 with 2 before it.
        for pre, part in _sub_axes(size, [(pre, own or size) for axis, pre, own in wanted if axis == name]):
            place[name, pre] = len(shape)
            shape.append(part)
    taken = [place[name, pre] for name, pre, _ in wanted]
    ids = np.arange(math.prod(sizes.values())) if device_ids is None else _device_ids(device_ids)
    ids = ids.reshape(shape).transpose([d for d in range(len(shape)) if d not in taken] + taken)
    return _rows(ids.reshape(-1, math.prod(shape[d] for d in taken)))


def _sub_axes(size: int, used: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(what comes before, size) of the parts of an axis, outermost first, cut where the used ones begin and end."""
    cuts = sorted({1, size} | {pre for pre, _ in used} | {pre * part for pre, part in used})
    return [(a, b // a) for a, b in itertools.pairwise(cuts)] or [(1, 1)]


def _device_ids(text: str) -> np.ndarray:
    if found := _ORDER.match(text):
        return _iota(found[1], found[2])
    if not re.fullmatch(r"[\d,\s]+", text):
        raise ValueError(f"the devices of a mesh are written in a way that jgt does not know: {text[:120]}")
    return np.array([int(n) for n in re.findall(r"\d+", text)])


def _iota(dims: str, order: str | None) -> np.ndarray:
    shape = _numbers(dims)
    return np.arange(math.prod(shape)).reshape(shape).transpose(_numbers(order) if order else None)


def _rows(groups: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in groups.tolist())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n.strip())
