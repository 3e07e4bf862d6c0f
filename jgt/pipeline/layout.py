"""Where values are in a pipeline: gathered over the batch's axes, laid out over the stages, their gradients reduced again.

A parameter may be sharded over the batch's axes (FSDP), over the stages, over others (tensor), or several at once; its
`Dims` come from the rules. The batch's axes are manual inside the pipeline, where the partitioner cannot gather over them,
so every value crosses two borders here. On the way in it becomes whole over the batch's axes: once a step, outside of the
shard_map, where the partitioner gathers best, or layer by layer inside of it. On the way out its gradient is
reduced: stacked along a new dim of data shards that the shard_map's output spec assembles, then reduce-scattered to the
layout of the parameter. The invariant is that a gradient crosses the batch's axes once a step, not once a microbatch.

A weight [layers, embed, ffn] with dims ((stage,), (fsdp,), (tensor,)) on fsdp=2, stage=2, tensor=2, local shapes:

    stored                [layers/2, embed/2, ffn/2]
    gathered, staged      [1, layers/2, embed, ffn/2]         whole over fsdp, split over stage and tensor
    its gradient, parts   [1, layers/2, embed, ffn/2]         globally [fsdp, layers, embed, ffn], a sum over microbatches
    reduced               [layers/2, embed/2, ffn/2]          reduce-scattered over fsdp
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jgt.program import jaxpr as jx
from jgt.program import scopes
from jgt.program.dims import Dims, num_parts
from jgt.program.jaxpr import Var

FREE = PartitionSpec.UNCONSTRAINED

Specs = Any
"""A tree of PartitionSpecs, which may be a prefix of the tree of arrays that it is for."""

Axes = tuple[str, ...]
AxisCollective = Callable[[jax.Array, Axes, int], jax.Array]
"""(x, axes, dim) → x gathered or scattered along the dim."""

_Own = TypeVar("_Own")
_Common = TypeVar("_Common")
_T = TypeVar("_T")
StageResults = TypeVar("StageResults", bound=tuple[Any, ...])


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A mesh with a stage axis and axes that split the batch; the other axes are the partitioner's.

    dims: the axes of each dim of a value as it is stored; a value without an entry has no known layout. signals: the region
    that each value is used in, for readers of the compiled program. by_layer: weights become whole over the batch's axes
    layer by layer, each time that a layer reads them, and not once a step. stacked: the number of dims of a weight in front of
    those of one layer. sums: the type in which a value's gradient is added up over the batch's axes, where that is not its own.
    held: by value, an axis of the batch whose devices have different parts of it, such as experts, which are not brought together.
    """

    mesh: Mesh | AbstractMesh
    axis: str
    batch_axes: Axes
    dims: Mapping[Var, Dims]
    signals: Mapping[Var, tuple[str, ...]]
    by_layer: bool
    stacked: int = 1
    sums: Mapping[Var, Any] = field(default_factory=dict[Var, Any])
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

    def manual(self, fn: Callable[..., _T], axes: Sequence[str], in_specs: Specs, out_specs: Specs) -> Callable[..., _T]:
        """`fn` in a shard_map over some axes; without axes `fn` itself."""
        if not axes:
            return fn
        around = jx.mesh_around()
        # Inside another shard_map, JAX takes the mesh from the context and rejects any other.
        mesh = self.mesh if around is None else None
        # Gradients are taken inside, of local functions: no collective is ever differentiated, and programs that were
        # traced outside know nothing of varying axes.
        return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes), check_vma=False)

    # -- over the batch's axes ------------------------------------------------------------------------------------------

    def spec(self, var: Var) -> PartitionSpec:
        """The batch's axes of a stored value."""
        return PartitionSpec(*[(*axes, *held) or None for axes, held in zip(self._batch_dims(var), self._held_dims(var), strict=True)])

    def whole_spec(self, var: Var) -> PartitionSpec:
        """The batch's axes of a value that was brought together: those that hold different parts of it."""
        return PartitionSpec(*[axes or None for axes in self._held_dims(var)]) if var in self.held else PartitionSpec()

    def pinned(self, var: Var, x: jax.Array) -> jax.Array:
        """A value that is whole over the batch's axes, constrained to its sharding over the others, if that is known."""
        # Where no other axis splits the value, a constraint would only pin it to being whole.
        dims = self._other_dims(var)
        return self.constrained(x, PartitionSpec(*dims)) if dims and any(dims) else x

    def gathered(self, var: Var, x: jax.Array) -> jax.Array:
        """A stored value made whole over the batch's axes, outside of any shard_map: the partitioner gathers best."""
        dims = self._outer_dims(var)
        with self._signals_of(var):
            return x if dims is None else self.constrained(x, PartitionSpec(*dims))

    def narrowed(self, var: Var, x: jax.Array, dtype: Any) -> jax.Array:
        """A stored value in another type, laid out as it is stored: what becomes whole after this travels in this type."""
        dims = self.dims.get(var)
        with self._signals_of(var):
            narrow = x.astype(dtype)
            return narrow if dims is None else self.constrained(narrow, PartitionSpec(*[axes or None for axes in dims]))

    def summed(self, x: jax.Array) -> jax.Array:
        """The sum over all data shards."""
        return _psum(x, self.batch_axes)

    def parts(self, var: Var, gradient: jax.Array) -> jax.Array:
        """One data shard's gradient as the shard_map returns it: stacked with the other shards', or their sum."""
        # Rounded in front of the border, or the partitioner could move the wide array.
        return self._to_send(var, gradient)[None] if self._is_stacked(var) else _psum(gradient, self._axes_of_parts(var))

    def parts_spec(self, var: Var) -> PartitionSpec:
        """The batch's axes of the result of `parts`."""
        if not self._is_stacked(var):
            return self.whole_spec(var)
        return PartitionSpec(self._axes_of_parts(var), *[axes or None for axes in self._held_dims(var)])

    def reduced(self, var: Var, parts: jax.Array) -> jax.Array:
        """The sum of all parts, laid out like the value: reduce-scattered over the batch's axes that it is stored over."""
        if not self._is_stacked(var):
            return parts.astype(jx.dtype_of(var))
        stored = self._batch_dims(var)
        # Over an axis that the value is not stored over, every device needs the whole sum.
        over = tuple(a for a in self._axes_of_parts(var) if not any(a in axes for axes in stored))

        def local(part: jax.Array) -> jax.Array:
            # [1, ...] → [...]: the dim of data shards that `parts` added has one entry on each device.
            gradient = _each_dim(stored, part[0], _scattered)
            return _psum(gradient, over)

        # All axes are manual here: in a shard_map over some of them the partitioner gathers operands over the others first.
        outer = self._outer_dims(var) or []
        whole = PartitionSpec(self._axes_of_parts(var), *outer)
        # A scatter splits what the other axes left of a dim, so those come first, whatever the order that it is stored in.
        made = [(*(others or ()), *axes) or None for others, axes in zip(outer, stored, strict=True)]
        with self._signals_of(var), scopes.backward():
            # A shard_map takes equal parts only. What the partitioner splits unevenly, such as a vocabulary, is padded for it.
            more = [-size % num_parts(axes, self.mesh.shape) for size, axes in zip(parts.shape[1:], self.dims[var], strict=True)]
            even = jnp.pad(parts, [(0, 0), *((0, n) for n in more)]) if any(more) else parts
            gradient = self.manual(local, self.mesh.axis_names, whole, PartitionSpec(*made))(even)
            return jax.lax.slice(gradient, [0] * gradient.ndim, parts.shape[1:]).astype(jx.dtype_of(var))

    def rest_summed(self, var: Var, gradient: jax.Array) -> jax.Array:
        """A gradient that is scattered already over the axes its value is stored over, summed over the batch's other axes."""
        stored = {a for axes in self._batch_dims(var) for a in axes}
        over = tuple(a for a in self._axes_of_parts(var) if a not in stored)
        with self._signals_of(var), scopes.backward():
            return _psum(gradient, over).astype(jx.dtype_of(var))

    def gathered_layer(self, weight: Var, x: jax.Array) -> jax.Array:
        """One layer of a weight, on one stage, made whole over the batch's axes; with weights that are whole already, x itself."""
        with self._signals_of(weight):
            return self._on_layer(weight, x, _gathered)

    def scattered_layer(self, weight: Var, gradient: jax.Array) -> jax.Array:
        """The inverse for a gradient: summed over the axes that the weight is stored over."""
        with self._signals_of(weight), scopes.backward():
            return self._on_layer(weight, self._to_send(weight, gradient), _scattered).astype(gradient.dtype)

    def _on_layer(self, var: Var, x: jax.Array, collective: AxisCollective) -> jax.Array:
        stored, others = self._batch_dims(var)[self.stacked :], self._dims_on_stage(var) or []
        if not self.by_layer or not any(stored):
            return x
        # A dim that is split over both kinds of axes cannot be gathered piece by piece: the partitioner has to do it.
        mixed = any(a and b for a, b in zip(stored, others, strict=True))
        axes = () if mixed else tuple(a for axes in others if axes for a in axes)
        spec = PartitionSpec(*others)

        def local(x: jax.Array) -> jax.Array:
            return _each_dim(stored, x, collective)

        return self.manual(local, axes, spec, spec)(x)

    def _to_send(self, var: Var, gradient: jax.Array) -> jax.Array:
        return gradient.astype(self.sums.get(var, gradient.dtype))

    def _is_stacked(self, var: Var) -> bool:
        """Whether parts of a gradient leave the shard_map apart, to be reduce-scattered; a value of unknown layout is summed."""
        return bool(self._axes_of_parts(var)) and var in self.dims

    def _axes_of_parts(self, var: Var) -> Axes:
        """The axes of the batch whose devices have parts of a gradient."""
        return tuple(a for a in self.batch_axes if a != self.held.get(var))

    # -- over the stages --------------------------------------------------------------------------------------------------

    def on_stages(self, var: Var, x: jax.Array) -> jax.Array:
        """A value [stages, layers of a stage, ...], constrained to its sharding on the stages."""
        return self._stacked(self._dims_on_stage(var), (self.axis,), x)

    def as_stored(self, var: Var, x: jax.Array) -> jax.Array:
        """A value [stages, layers of a stage, ...], constrained to the sharding in which its layers can change places."""
        stored = (self._other_dims(var) or [None])[1:]
        # Where a dim of a layer is split over the stages, each device has its part of all layers. Elsewhere nothing is to change places.
        is_split = any(self.axis in (axes or ()) for axes in stored)
        return self._stacked(stored, None, x) if is_split else self.on_stages(var, x)

    def _stacked(self, dims: list[Axes | None] | None, stages: Axes | None, x: jax.Array) -> jax.Array:
        # A value of unknown layout is left to the partitioner, except for the dim of stages.
        rest = [FREE] * (x.ndim - 2) if dims is None else [*dims, *[None] * x.ndim][: x.ndim - 2]
        return self.constrained(x, PartitionSpec(stages, None, *rest))

    def _dims_on_stage(self, var: Var) -> list[Axes | None] | None:
        """The axes of each dim of one layer, on its stage."""
        dims = self._other_dims(var)
        return None if dims is None else [tuple(a for a in axes or () if a != self.axis) or None for axes in dims[self.stacked :]]

    def on_every_stage(
        self, fn: Callable[[_Own, _Common], StageResults], own: _Own, common: _Common, has_stages: tuple[bool, ...]
    ) -> StageResults:
        """fn(own, common) on every stage; arrays of `own` have a leading dim of stages, which fn does not see.

        has_stages: whether each result of fn gets that dim, or is the same on all stages.
        """

        def local(own: _Own, common: _Common) -> tuple[Any, ...]:
            results = fn(jax.tree.map(_without_first_dim, own), common)
            return tuple(jax.tree.map(_with_first_dim, x) if staged else x for x, staged in zip(results, has_stages, strict=True))

        specs = tuple(PartitionSpec(self.axis) if staged else PartitionSpec() for staged in has_stages)
        outer = self.outer_axes
        # Axes of one device that the outer shard_map did not make manual. `outer_axes` says why they have to be.
        ones = [axis for axis, size in dict(self.mesh.shape).items() if size == 1 and axis not in (self.axis, *outer)]
        in_specs = (PartitionSpec(self.axis), PartitionSpec())
        return cast(StageResults, self.manual(local, (self.axis, *ones), in_specs, specs)(own, common))

    def shard_index(self) -> jax.Array:
        """Which part of the batch this data shard has."""
        return jax.lax.axis_index(self.batch_axes) if self.batch_axes else jnp.int32(0)

    def _signals_of(self, var: Var) -> AbstractContextManager[None]:
        return scopes.signals(self.signals.get(var, ()))

    def _batch_dims(self, var: Var) -> list[Axes]:
        return [tuple(a for a in axes if a in self._axes_of_parts(var)) for axes in self.dims.get(var, ())]

    def _held_dims(self, var: Var) -> list[Axes]:
        return [tuple(a for a in axes if a == self.held.get(var)) for axes in self.dims.get(var, ())]

    def _outer_dims(self, var: Var) -> list[Axes | None] | None:
        """The axes of each dim of a value that was brought together, outside of any shard_map."""
        others = self._other_dims(var)
        return None if others is None else [(*(o or ()), *h) or None for o, h in zip(others, self._held_dims(var), strict=True)]

    def dims_inside(self, var: Var) -> Dims | None:
        """The axes of each dim that are not the batch's; None for a value of unknown layout."""
        dims = self._other_dims(var)
        return None if dims is None else tuple(axes or () for axes in dims)

    def _other_dims(self, var: Var) -> list[Axes | None] | None:
        if var not in self.dims:
            return None
        sizes = dict(self.mesh.shape)
        return [tuple(a for a in axes if a not in self.batch_axes and sizes[a] > 1) or None for axes in self.dims[var]]

    def constrained(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """A value with this sharding over the axes that are not manual around it."""
        return jax.lax.with_sharding_constraint(x, self.sharding(spec))

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """A spec over the axes that are not manual around."""
        # Inside a shard_map JAX accepts a constraint only on the abstract mesh of the context.
        return NamedSharding(jx.mesh_around() or self.mesh, spec)


def axes_inside(sizes: Mapping[str, int], axis: str, batch_axes: Sequence[str]) -> Axes:
    """The axes of a mesh that split a stage's work on its rows: neither the stage axis nor the batch's axes."""
    return tuple(a for a, size in sizes.items() if size > 1 and a not in (axis, *batch_axes))


def _each_dim(dims: Sequence[Axes], x: jax.Array, collective: AxisCollective) -> jax.Array:
    """A collective along every dim that has axes."""
    for dim, axes in enumerate(dims):
        if axes:
            x = collective(x, axes, dim)
    return x


def _psum(x: jax.Array, axes: Axes) -> jax.Array:
    return cast(jax.Array, jax.lax.psum(x, axes)) if axes else x


def _gathered(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    return cast(jax.Array, jax.lax.all_gather(x, axes, axis=dim, tiled=True))


def _scattered(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    return cast(jax.Array, jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True))


def _without_first_dim(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[1:])


def _with_first_dim(x: jax.Array) -> jax.Array:
    return x[None]
