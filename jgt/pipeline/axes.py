"""Which mesh axes split which dims of a pipeline's values: stored, brought together over the batch's axes, and on their stages.

A weight [layers, embed, ffn] with dims ((stage,), (fsdp,), (tensor,)), stacked 1, on fsdp=2, stage=2, tensor=2:

    batch_dims       (), (fsdp,), ()            what a gather brings together and a scatter splits again
    other_dims       (stage,), None, (tensor,)  what the partitioner lays out
    dims_on_stage    None, (tensor,)            of one layer
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jgt.program.dims import Dims
from jgt.program.jaxpr import Var

Axes = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PipelineAxes:
    """A mesh with a stage axis and axes that split the batch; the other axes are the partitioner's.

    dims: the axes of each dim of a value as it is stored; a value without an entry has no known layout. stacked: the number of dims of a
    weight in front of those of one layer. held: by value, an axis of the batch whose devices have different parts of it, such as experts,
    which are not brought together.
    """

    mesh: Mesh | AbstractMesh
    axis: str
    batch_axes: Axes
    dims: Mapping[Var, Dims]
    stacked: int = 1
    held: Mapping[Var, str] = field(default_factory=dict[Var, str])

    @property
    def num_shards(self) -> int:
        """The number of data shards, into which the batch's axes split the batch."""
        return math.prod(dict(self.mesh.shape)[a] for a in self.batch_axes)

    @property
    def outer_axes(self) -> Axes:
        """The manual axes of the outer shard_map: the batch's, and some of one device.

        Axes of one device are manual, too, here or in the stages: if none is left to the partitioner, kernels that JAX
        cannot split run unchanged. XLA wants the axes of the outer shard_map before those of the inner one.
        """
        sizes = dict(self.mesh.shape)
        last = max((list(sizes).index(axis) for axis in self.batch_axes), default=-1)
        return tuple(a for a in list(sizes)[: last + 1] if a in self.batch_axes or (sizes[a] == 1 and a != self.axis))

    @property
    def axes_inside(self) -> Axes:
        """The axes that split a stage's work on its rows."""
        return axes_inside(dict(self.mesh.shape), self.axis, self.batch_axes)

    def spec(self, var: Var) -> PartitionSpec:
        """The batch's axes of a stored value."""
        return PartitionSpec(*[(*axes, *held) or None for axes, held in zip(self.batch_dims(var), self.held_dims(var), strict=True)])

    def whole_spec(self, var: Var) -> PartitionSpec:
        """The batch's axes of a value that was brought together: those that hold different parts of it."""
        return PartitionSpec(*[axes or None for axes in self.held_dims(var)]) if var in self.held else PartitionSpec()

    def parts_spec(self, var: Var) -> PartitionSpec:
        """The batch's axes of the result of `parts`."""
        if not self.is_stacked(var):
            return self.whole_spec(var)
        return PartitionSpec(self.axes_of_parts(var), *[axes or None for axes in self.held_dims(var)])

    def is_stacked(self, var: Var) -> bool:
        """Whether parts of a gradient leave the shard_map apart, to be reduce-scattered; a value of unknown layout is summed."""
        return bool(self.axes_of_parts(var)) and var in self.dims

    def axes_of_parts(self, var: Var) -> Axes:
        """The axes of the batch whose devices have parts of a gradient."""
        return tuple(a for a in self.batch_axes if a != self.held.get(var))

    def dims_on_stage(self, var: Var) -> list[Axes | None] | None:
        """The axes of each dim of one layer, on its stage."""
        dims = self.other_dims(var)
        return None if dims is None else [tuple(a for a in axes or () if a != self.axis) or None for axes in dims[self.stacked :]]

    def batch_dims(self, var: Var) -> list[Axes]:
        """The batch's axes of each dim of a stored value, over which its gradient is a sum; empty for a value of unknown layout."""
        return [tuple(a for a in axes if a in self.axes_of_parts(var)) for axes in self.dims.get(var, ())]

    def held_dims(self, var: Var) -> list[Axes]:
        """The axis of each dim whose devices have different parts of a value; empty for a value of unknown layout."""
        return [tuple(a for a in axes if a == self.held.get(var)) for axes in self.dims.get(var, ())]

    def outer_dims(self, var: Var) -> list[Axes | None] | None:
        """The axes of each dim of a value that was brought together, outside of any shard_map."""
        others = self.other_dims(var)
        return None if others is None else [(*(o or ()), *h) or None for o, h in zip(others, self.held_dims(var), strict=True)]

    def dims_inside(self, var: Var) -> Dims | None:
        """The axes of each dim that are not the batch's; None for a value of unknown layout."""
        dims = self.other_dims(var)
        return None if dims is None else tuple(axes or () for axes in dims)

    def other_dims(self, var: Var) -> list[Axes | None] | None:
        """The axes of each dim that are not the batch's and split it; None for a value of unknown layout."""
        if var not in self.dims:
            return None
        sizes = dict(self.mesh.shape)
        return [tuple(a for a in axes if a not in self.batch_axes and sizes[a] > 1) or None for axes in self.dims[var]]


def axes_inside(sizes: Mapping[str, int], axis: str, batch_axes: Sequence[str]) -> Axes:
    """The axes of a mesh that split a stage's work on its rows: neither the stage axis nor the batch's axes."""
    return tuple(a for a, size in sizes.items() if size > 1 and a not in (axis, *batch_axes))
