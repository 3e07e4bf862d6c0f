"""Where values are in a pipeline: over the batch's axes, over the stages, and over the axes that are the partitioner's.

The `Dims` of a parameter come from the rules. The batch's axes are manual inside the pipeline, so a value is laid out in up to three ways
there: as it is stored, whole over the batch's axes, and as a gradient whose parts are yet to be added up.

A weight [layers, embed, ffn] with dims ((stage,), (fsdp,), (tensor,)) on fsdp=2, stage=2, tensor=2, local shapes:

    stored                [layers/2, embed/2, ffn/2]
    gathered, staged      [1, layers/2, embed, ffn/2]         whole over fsdp, split over stage and tensor
    its gradient, parts   [1, layers/2, embed, ffn/2]         globally [fsdp, layers, embed, ffn], a sum over microbatches
    reduced               [layers/2, embed/2, ffn/2]          reduce-scattered over fsdp
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from jgt.program.dims import Dims
from jgt.program.jaxpr import Var

Axes = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A mesh with a stage axis and axes that split the batch; the other axes are the partitioner's.

    dims: the axes of each dim of a value as it is stored; a value without an entry has no known layout. signals: the signals of the
    parameter that a value is, for readers of the compiled program. by_layer: weights become whole over the batch's axes layer by layer,
    each time that a layer reads them, and not once a step. is_stored: weights are stored on their stages, and come and go as
    [chunks of a stage, stages, layers of a chunk, ...]. sums: the type in which a value's gradient is added up over the batch's axes, where
    it differs from the value's. held: the axis of the batch whose devices have different parts of a value, such as experts, that are not
    brought together. replicas: the axes of a vmap around, over which each replica has its own batch, which `batch_axes` split.
    """

    mesh: Mesh | AbstractMesh
    axis: str
    batch_axes: Axes
    dims: Mapping[Var, Dims]
    signals: Mapping[Var, tuple[str, ...]]
    by_layer: bool
    is_stored: bool = False
    sums: Mapping[Var, DTypeLike] = field(default_factory=dict[Var, DTypeLike])
    held: Mapping[Var, str] = field(default_factory=dict[Var, str])
    replicas: Axes = ()

    @property
    def stacked(self) -> int:
        """The number of dims of a weight in front of the dims of one layer."""
        return 3 if self.is_stored else 1

    @property
    def sizes(self) -> dict[str, int]:
        """The mesh axes and their sizes."""
        return dict(self.mesh.shape)

    @property
    def num_shards(self) -> int:
        """The number of data shards, into which the batch's axes split the batch."""
        return math.prod(self.sizes[a] for a in self.batch_axes)

    @property
    def outer_axes(self) -> Axes:
        """The manual axes of the outer shard_map: the batch's, and some of one device.

        Axes of one device are manual, too, here or in the stages: if none is left to the partitioner, kernels that JAX
        cannot split run unchanged. XLA wants the axes of the outer shard_map before the axes of the inner one.
        """
        sizes = self.sizes
        last = max((list(sizes).index(axis) for axis in (*self.replicas, *self.batch_axes)), default=-1)
        ones = {a for a, size in sizes.items() if size == 1 and a not in (self.axis, *self.replicas)}
        return tuple(a for a in list(sizes)[: last + 1] if a in self.batch_axes or a in ones)

    @property
    def axes_inside(self) -> Axes:
        """The axes that split a stage's work on its rows."""
        return tuple(axis for axis, size in self.sizes.items() if size > 1 and axis not in (self.axis, *self.replicas, *self.batch_axes))

    def spec(self, var: Var) -> PartitionSpec:
        """The batch's axes of a stored value."""
        return PartitionSpec(*[(*axes, *held) or None for axes, held in zip(self.batch_dims(var), self.held_dims(var), strict=True)])

    def whole_spec(self, var: Var) -> PartitionSpec:
        """The batch's axes of a value that was brought together: those that hold different parts of it."""
        return PartitionSpec(*[axes or None for axes in self.held_dims(var)]) if var in self.held else PartitionSpec()

    def parts_spec(self, var: Var) -> PartitionSpec:
        """The batch's axes of the result of `Moves.parts`."""
        if not self.has_parts(var):
            return self.whole_spec(var)
        return PartitionSpec(self.axes_of_parts(var), *[axes or None for axes in self.held_dims(var)])

    def has_parts(self, var: Var) -> bool:
        """Whether parts of a gradient leave the shard_map apart, to be reduce-scattered; a value of unknown layout is summed."""
        return bool(self.axes_of_parts(var)) and var in self.dims

    def axes_of_parts(self, var: Var) -> Axes:
        """The axes of the batch whose devices have parts of a gradient."""
        return tuple(a for a in self.batch_axes if a != self.held.get(var))

    def batch_dims(self, var: Var) -> list[Axes]:
        """The axes of each dim over which a value is brought together and its gradient is scattered."""
        return [tuple(a for a in axes if a in self.axes_of_parts(var)) for axes in self.dims.get(var, ())]

    def held_dims(self, var: Var) -> list[Axes]:
        """The axis of the batch, at its dim, whose devices have different parts of a value."""
        return [tuple(a for a in axes if a == self.held.get(var)) for axes in self.dims.get(var, ())]

    def outer_dims(self, var: Var) -> list[Axes | None] | None:
        """The axes of each dim of a value that was brought together, outside of any shard_map."""
        others = self.other_dims(var)
        return None if others is None else [(*(o or ()), *h) or None for o, h in zip(others, self.held_dims(var), strict=True)]

    def other_dims(self, var: Var) -> list[Axes | None] | None:
        """The axes of each dim that are not the batch's, None for a dim without one; None for a value of unknown layout."""
        if var not in self.dims:
            return None
        return [tuple(a for a in axes if a not in self.batch_axes and self.sizes[a] > 1) or None for axes in self.dims[var]]

    def dims_on_stage(self, var: Var) -> list[Axes | None] | None:
        """The axes of each dim of one layer, on its stage."""
        dims = self.other_dims(var)
        return None if dims is None else [tuple(a for a in axes or () if a != self.axis) or None for axes in dims[self.stacked :]]
