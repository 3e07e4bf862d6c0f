"""Values move in a pipeline: they are gathered over the batch's axes and laid out over the stages, and their gradients are reduced.

The partitioner cannot gather over the batch's axes, which are manual. So a value becomes whole over them on the way in: once a step,
outside of the shard_map, where the partitioner gathers best, or layer by layer inside of it. On the way out its gradient is stacked along a
new dim of data shards that the shard_map's output spec assembles, then reduce-scattered to the layout of the parameter.

The invariant is that a gradient crosses the batch's axes once a step, not once a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.experimental import layout as memory_layout
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jgt.pipeline.links.layout import Axes, Layout
from jgt.pipeline.links.manual import manual_of_replicas, with_dim, without_dim
from jgt.program import jaxpr as jx
from jgt.program import scopes
from jgt.program.dims import num_parts, partition_spec
from jgt.program.jaxpr import Var
from jgt.program.places import mesh_around

FREE = PartitionSpec.UNCONSTRAINED

Specs = Any
"""A tree of PartitionSpecs, which may be a prefix of the tree of arrays that it is for."""

AxisCollective = Callable[[jax.Array, Axes, int], jax.Array]
"""(x, axes, dim) → x gathered or scattered along the dim."""

_Own = TypeVar("_Own")
_Common = TypeVar("_Common")
_T = TypeVar("_T")
StageResults = TypeVar("StageResults", bound=tuple[Any, ...])


@dataclass(frozen=True, kw_only=True)
class Moves(Layout):
    """A layout, and how values move in it. A value comes with its variable, by which the layout knows it."""

    def manual(self, fn: Callable[..., _T], axes: Sequence[str], in_specs: Specs, out_specs: Specs) -> Callable[..., _T]:
        """`fn` in a shard_map over some axes; without axes `fn` itself."""
        if not axes:
            return fn
        around = mesh_around()
        # Inside another shard_map, JAX takes the mesh from the context and rejects any other.
        mesh = self.mesh if around is None else None
        # Gradients are taken inside, of local functions: no collective is ever differentiated, and programs that were
        # traced outside know nothing of varying axes.
        return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes), check_vma=False)

    def on_every_shard(self, fn: Callable[..., _T], in_specs: tuple[Specs, ...], out_specs: tuple[Specs, ...]) -> Callable[..., _T]:
        """`fn` on every data shard, of every replica."""
        replicas = {axis: self.sizes[axis] for axis in self.replicas}
        return manual_of_replicas(self.manual, fn, replicas, self.outer_axes, in_specs, out_specs)

    def constrain(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """A value with this sharding over the axes that are not manual around it."""
        return jax.lax.with_sharding_constraint(x, self.sharding(spec))

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """A spec over the axes that are not manual around."""
        # Inside a shard_map JAX accepts a constraint only on the abstract mesh of the context.
        return NamedSharding(mesh_around() or self.mesh, spec)

    # -- over the batch's axes ------------------------------------------------------------------------------------------

    def pin(self, var: Var, x: jax.Array) -> jax.Array:
        """A value that is whole over the batch's axes, constrained to its sharding over the others, if that is known."""
        # Where no other axis splits the value, a constraint would only pin it to being whole.
        dims = self.other_dims(var)
        return self.constrain(x, PartitionSpec(*dims)) if dims and any(dims) else x

    def row_major(self, x: jax.Array) -> jax.Array:
        """x in row-major order in memory, where a stage computes its rows alone.

        Without this, XLA gives a whole buffer the order that a single reader of its rows prefers, by a copy in every tick. Where other axes
        split a stage's work, the partitioner would gather x for the constraint.
        """
        if self.axes_inside or x.ndim < 2:
            return x
        constrained: Any = memory_layout.with_layout_constraint  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return cast(jax.Array, constrained(x, memory_layout.Layout(tuple(range(x.ndim)))))

    def gather(self, var: Var, x: jax.Array) -> jax.Array:
        """A stored value made whole over the batch's axes, outside of any shard_map: the partitioner gathers best."""
        dims = self.outer_dims(var)
        with self._signals_of(var):
            return x if dims is None else self.constrain(x, PartitionSpec(*dims))

    def narrow(self, var: Var, x: jax.Array, dtype: DTypeLike) -> jax.Array:
        """A stored value in another type, laid out as it is stored: what becomes whole after this travels in this type."""
        dims = self.dims.get(var)
        with self._signals_of(var):
            narrow = x.astype(dtype)
            return narrow if dims is None else self.constrain(narrow, partition_spec(dims))

    def sum_shards(self, x: jax.Array) -> jax.Array:
        """The sum over all data shards."""
        return _psum(x, self.batch_axes)

    def parts(self, var: Var, gradient: jax.Array) -> jax.Array:
        """One data shard's gradient as the shard_map returns it: stacked with the other shards', or their sum."""
        if not self.has_parts(var):
            with self._signals_of(var), scopes.backward():
                return _psum(gradient, self.axes_of_parts(var))
        # Rounded in front of the border, or the partitioner could move the wide array.
        return self._to_send(var, gradient)[None]

    def reduce(self, var: Var, parts: jax.Array) -> jax.Array:
        """The sum of all parts, laid out like the value: reduce-scattered over the batch's axes that it is stored over."""
        if not self.has_parts(var):
            return parts.astype(jx.dtype_of(var))
        stored = self.batch_dims(var)
        # Over an axis that the value is not stored over, every device needs the whole sum.
        over = tuple(a for a in self.axes_of_parts(var) if not any(a in axes for axes in stored))

        def local(part: jax.Array) -> jax.Array:
            # [1, ...] → [...]: the dim of data shards that `parts` added has one entry on each device.
            gradient = _each_dim(stored, part[0], _scattered)
            return _psum(gradient, over)

        # All axes are manual here: in a shard_map over some of them the partitioner gathers operands over the others first.
        outer = self.outer_dims(var) or []
        whole = PartitionSpec(self.axes_of_parts(var), *outer)
        # A scatter splits what the other axes left of a dim, so those come first, whatever the order that it is stored in.
        made = [(*(others or ()), *axes) or None for others, axes in zip(outer, stored, strict=True)]
        with self._signals_of(var), scopes.backward():
            # A shard_map takes equal parts only. What the partitioner splits unevenly, such as a vocabulary, is padded for it.
            splits = [num_parts(axes, self.mesh.shape) for axes in self.dims[var]]
            more = [-size % n for size, n in zip(parts.shape[1:], splits, strict=True)]
            even = jnp.pad(parts, [(0, 0), *((0, n) for n in more)]) if any(more) else parts
            gradient = self.manual(local, self.mesh.axis_names, whole, PartitionSpec(*made))(even)
            return jax.lax.slice(gradient, [0] * gradient.ndim, parts.shape[1:]).astype(jx.dtype_of(var))

    def sum_rest(self, var: Var, gradient: jax.Array) -> jax.Array:
        """A gradient that is scattered already over the axes its value is stored over, summed over the batch's other axes."""
        stored = {a for axes in self.batch_dims(var) for a in axes}
        over = tuple(a for a in self.axes_of_parts(var) if a not in stored)
        with self._signals_of(var), scopes.backward():
            return _psum(gradient, over).astype(jx.dtype_of(var))

    def gather_layer(self, weight: Var, x: jax.Array) -> jax.Array:
        """One layer of a weight, on one stage, made whole over the batch's axes; with weights that are whole already, x itself."""
        with self._signals_of(weight):
            return self._on_layer(weight, x, _gathered)

    def scatter_layer(self, weight: Var, gradient: jax.Array) -> jax.Array:
        """The inverse for a gradient: summed over the axes that the weight is stored over."""
        with self._signals_of(weight), scopes.backward():
            return self._on_layer(weight, self._to_send(weight, gradient), _scattered).astype(gradient.dtype)

    def _on_layer(self, var: Var, x: jax.Array, collective: AxisCollective) -> jax.Array:
        stored, others = self.batch_dims(var)[self.stacked :], self.dims_on_stage(var) or []
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

    # -- over the stages --------------------------------------------------------------------------------------------------

    def on_stages(self, var: Var, x: jax.Array) -> jax.Array:
        """A value [stages, layers of a stage, ...], constrained to its sharding on the stages."""
        return self._stacked(self.dims_on_stage(var), (self.axis,), x)

    def as_stored(self, var: Var, x: jax.Array) -> jax.Array:
        """A value [stages, layers of a stage, ...], constrained to the sharding in which its layers can change places."""
        stored = (self.other_dims(var) or [None])[1:]
        # Where a dim of a layer is split over the stages, each device has its part of all layers. Elsewhere nothing is to change places.
        is_split = any(self.axis in (axes or ()) for axes in stored)
        return self._stacked(stored, None, x) if is_split else self.on_stages(var, x)

    def _stacked(self, dims: list[Axes | None] | None, stages: Axes | None, x: jax.Array) -> jax.Array:
        # A value of unknown layout is left to the partitioner, except for the dim of stages.
        rest = [FREE] * (x.ndim - 2) if dims is None else [*dims, *[None] * x.ndim][: x.ndim - 2]
        return self.constrain(x, PartitionSpec(stages, None, *rest))

    def on_every_stage(
        self, fn: Callable[[_Own, _Common], StageResults], own: _Own, common: _Common, has_stages: tuple[bool, ...]
    ) -> StageResults:
        """fn(own, common) on every stage; arrays of `own` have a leading dim of stages, which fn does not see.

        has_stages: whether each result of fn gets that dim, or is the same on all stages.
        """

        def local(own: _Own, common: _Common) -> tuple[Any, ...]:
            results = fn(jax.tree.map(without_dim, own), common)
            return tuple(jax.tree.map(with_dim, x) if staged else x for x, staged in zip(results, has_stages, strict=True))

        specs = tuple(PartitionSpec(self.axis) if staged else PartitionSpec() for staged in has_stages)
        in_specs = (PartitionSpec(self.axis), PartitionSpec())
        return cast(StageResults, self.manual(local, self._stage_axes, in_specs, specs)(own, common))

    def as_on_a_stage(self) -> AbstractContextManager[object]:
        """Programs that are traced inside get the constraints of `on_every_stage`, which depend on the mesh around them."""
        around = mesh_around() or self.mesh.abstract_mesh
        return jax.sharding.use_abstract_mesh(around.update_axis_types(dict.fromkeys(self._stage_axes, AxisType.Manual)))

    @property
    def _stage_axes(self) -> Axes:
        """The manual axes of the inner shard_map: the stage axis, and axes of one device that the outer shard_map did not make manual."""
        # `outer_axes` says why axes of one device have to be manual.
        taken = (self.axis, *self.replicas, *self.outer_axes)
        ones = [axis for axis, size in self.sizes.items() if size == 1 and axis not in taken]
        return (self.axis, *ones)

    def _signals_of(self, var: Var) -> AbstractContextManager[None]:
        return scopes.signals(self.signals.get(var, ()))


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
