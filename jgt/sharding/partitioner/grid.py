# pyright: basic
"""The devices of a mesh as the layouts of one operation see them.

A *layout* has, for each dim of an array, the parts of mesh axes that split it. Shardy may split a dim by a part of an axis, so an axis is
taken apart where one of the layouts of an operation does that. Each piece is a *sub-axis*.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

SubAxis = tuple[str, int, int]
"""A part of a mesh axis: its name, the number of parts before it, and its own size."""
Splits = tuple[tuple[SubAxis, ...], ...]
"""The sub-axes that split each dim, major to minor."""


@dataclass(frozen=True, kw_only=True)
class AxisGrid:
    """The devices of a mesh, seen from an operation: its sub-axes, and the ids of the devices, with one dim for each sub-axis."""

    sub_axes: tuple[SubAxis, ...]
    devices: np.ndarray

    @classmethod
    def around(cls, op: ir.Operation, mesh: sdy.MeshAttr, shardings: Sequence[sdy.TensorShardingAttr | None]) -> AxisGrid:
        """The grid for an operation whose arrays have these shardings."""
        axes = [sdy.MeshAxisAttr(axis) for axis in mesh.axes]
        cuts = {axis.name: {1, axis.size} for axis in axes}
        for ref in (ref for sharding in shardings for dim in _references(sharding) for ref in dim):
            if ref.sub_axis_info is not None:
                info = sdy.SubAxisInfoAttr(ref.sub_axis_info)
                cuts[ref.name] |= {info.pre_size, info.pre_size * info.size}
        pairs = [(axis.name, pair) for axis in axes for pair in itertools.pairwise(sorted(cuts[axis.name]))]
        sub_axes = [(name, low, high // low) for name, (low, high) in pairs]
        manual = _manual_axes(op)
        ids = np.array(list(mesh.device_ids) or range(math.prod(size for _, _, size in sub_axes)))
        ids = ids.reshape([size for _, _, size in sub_axes])[tuple(0 if name in manual else slice(None) for name, _, _ in sub_axes)]
        return cls(sub_axes=tuple(sub_axis for sub_axis in sub_axes if sub_axis[0] not in manual), devices=ids)

    def layout(self, sharding: sdy.TensorShardingAttr | None, rank: int) -> Splits:
        """The layout of an array of this rank."""
        if sharding is None:
            return ((),) * rank
        return tuple(tuple(sub_axis for ref in dim for sub_axis in self._parts(ref)) for dim in _references(sharding))

    def _parts(self, ref: sdy.AxisRefAttr) -> Iterator[SubAxis]:
        info = None if ref.sub_axis_info is None else sdy.SubAxisInfoAttr(ref.sub_axis_info)
        for name, low, size in self.sub_axes:
            if name == ref.name and (info is None or info.pre_size <= low < info.pre_size * info.size):
                yield name, low, size

    def groups(self, layout: Splits, dims: Sequence[int], and_copies: bool = False) -> list[list[int]]:
        """The devices that have the same part of these dims, in the order of the other dims.

        and_copies: devices that have the same part of the whole array are in different groups.
        """
        used = {sub_axis for axes in layout for sub_axis in axes}
        whole = [sub_axis for sub_axis in self.sub_axes if sub_axis not in used]
        front = [sub_axis for d in dims for sub_axis in layout[d]] + (whole if and_copies else [])
        inner = [sub_axis for d, axes in enumerate(layout) if d not in dims for sub_axis in axes] + ([] if and_copies else whole)
        order = [self.sub_axes.index(sub_axis) for sub_axis in (*front, *inner)]
        return self.devices.transpose(order).reshape(count_parts(front), -1).tolist()

    def constrain(self, value: ir.Value, layout: Splits, mesh: ir.Attribute) -> ir.OpResult:
        """A value that is constrained to a layout, where operations are inserted now."""
        dims = [sdy.DimensionShardingAttr.get([self._reference(a) for a in join_parts(axes)], is_closed=True) for axes in layout]
        return sdy.ShardingConstraintOp(value, sdy.TensorShardingAttr.get(mesh, dims)).result

    def move(self, value: ir.Value, before: Splits, after: Splits, mesh: ir.Attribute) -> ir.OpResult:
        """A value of one layout, constrained to another one."""
        # On more than three axes XLA dies of some moves of several axes at once. They begin with what the layouts have in common.
        dims = [*zip(before, after, strict=True)]
        moving = [a for axes, new in dims for a in axes if a not in new and a in itertools.chain(*after)]
        if len(moving) > 1 and sum(size > 1 for _, _, size in self.sub_axes) > 3:
            same = (itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*dim, strict=False)) for dim in dims)
            value = self.constrain(value, tuple(tuple(a for a, _ in pairs) for pairs in same), mesh)
        return self.constrain(value, after, mesh)

    def _reference(self, sub_axis: SubAxis) -> sdy.AxisRefAttr:
        name, low, size = sub_axis
        is_whole = size == count_parts(a for a in self.sub_axes if a[0] == name)
        return sdy.AxisRefAttr.get(name, None if is_whole else sdy.SubAxisInfoAttr.get(low, size))


def _manual_axes(op: ir.Operation) -> set[str]:
    """The axes of the shard_maps around an operation, which split nothing inside."""
    found, outer = set[str](), op.operation.parent
    while outer is not None:
        if outer.name == "sdy.manual_computation":
            found |= set(cast("Iterable[str]", sdy.ManualAxesAttr(outer.attributes["manual_axes"])))
        outer = outer.operation.parent
    return found


def count_parts(sub_axes: Iterable[SubAxis]) -> int:
    """The number of parts into which these sub-axes split a dim."""
    return math.prod(size for _, _, size in sub_axes)


def join_parts(axes: Sequence[SubAxis]) -> list[SubAxis]:
    """The sub-axes of a dim, with neighbouring parts of one axis as one."""
    result: list[SubAxis] = []
    for name, low, size in axes:
        if result and result[-1][0] == name and result[-1][1] * result[-1][2] == low:
            result[-1] = (name, result[-1][1], result[-1][2] * size)
        else:
            result.append((name, low, size))
    return result


def _references(sharding: sdy.TensorShardingAttr | None) -> list[list[sdy.AxisRefAttr]]:
    """The axes, or parts of axes, that a sharding names for each dim."""
    dims = () if sharding is None else sharding.dimension_shardings
    return [[sdy.AxisRefAttr(ref) for ref in sdy.DimensionShardingAttr(dim).axes] for dim in dims]
