"""Where values stand in a pipeline: gathered over the batch's axes, laid over the stages, their gradients reduced again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jgt import jaxpr as jx
from jgt import scopes
from jgt.jaxpr import Var
from jgt.pipeline.stages import Stages

Dims = tuple[tuple[str, ...], ...]
FREE = PartitionSpec.UNCONSTRAINED


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A mesh with a stage axis and axes that split the batch; the other axes are the partitioner's.

    dims: the axes of each dim of a value as it is stored; values that are not in it have no known layout. signals: the
    region that each value is used in, for those who read the compiled program.
    """

    mesh: Mesh | AbstractMesh
    axis: str
    batch_axes: tuple[str, ...]
    dims: Mapping[Var, Dims]
    signals: Mapping[Var, tuple[str, ...]]

    @property
    def num_shards(self) -> int:
        """Parts that the batch's axes make of the batch."""
        return math.prod(dict(self.mesh.shape)[a] for a in self.batch_axes)

    @property
    def outer_axes(self) -> tuple[str, ...]:
        """Those that split the batch, for the shard_map around all stages.

        Axes of one device are manual, too, here or in the stages: where none is left to the partitioner, kernels that JAX cannot
        split run as they are. XLA wants the axes of the outer shard_map before those of the inner one.
        """
        sizes = dict(self.mesh.shape)
        last = max((list(sizes).index(axis) for axis in self.batch_axes), default=-1)
        return tuple(a for a in list(sizes)[: last + 1] if a in self.batch_axes or (sizes[a] == 1 and a != self.axis))

    @property
    def axes_inside(self) -> tuple[str, ...]:
        """The axes over which the devices of a stage share the layers of a part of the batch."""
        return tuple(axis for axis, size in dict(self.mesh.shape).items() if size > 1 and axis not in (self.axis, *self.batch_axes))

    @property
    def on_cpu(self) -> bool:
        """Whether the devices share the cores of a host."""
        return isinstance(self.mesh, Mesh) and self.mesh.devices.flat[0].platform == "cpu"

    def manual(self, fn: Callable[..., Any], axes: Sequence[str], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """shard_map over some axes; over none of them the function itself."""
        if not axes:
            return fn
        around = jx.mesh_around()
        mesh = {"mesh": self.mesh} if around is None else {}
        # Gradients are taken inside, of local functions: no collective is ever differentiated, and programs that were
        # traced outside know nothing of varying axes.
        return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes), check_vma=False, **mesh)

    def spec(self, var: Var) -> PartitionSpec:
        """The batch axes of a stored value."""
        return PartitionSpec(*[axes or None for axes in self._batch_dims(var)])

    def pinned(self, var: Var, x: Any) -> Any:
        """A value that is whole over the batch's axes, with its sharding over the others, where that is known."""
        dims = self._other_dims(var)
        return self._constrained(x, PartitionSpec(*dims)) if dims and any(dims) else x

    def gathered(self, var: Var, x: Any) -> Any:
        """A stored value made whole over the batch's axes, outside of any shard_map: the partitioner gathers best."""
        dims = self._other_dims(var)
        with self._named(var):
            return x if dims is None else self._constrained(x, PartitionSpec(*dims))

    def summed(self, x: Any) -> Any:
        """The sum over all parts of the batch."""
        return jax.lax.psum(x, self.batch_axes) if self.batch_axes else x

    def parts(self, var: Var, gradient: Any) -> Any:
        """A gradient of one part of the batch, as it leaves the shard_map: stacked with the others', or their sum."""
        return gradient[None] if self._is_stacked(var) else self.summed(gradient)

    def parts_spec(self, var: Var) -> PartitionSpec:
        """The batch axes of what `parts` gives."""
        return PartitionSpec(self.batch_axes) if self._is_stacked(var) else PartitionSpec()

    def reduced(self, var: Var, parts: Any) -> Any:
        """The sum of all parts, laid out like the value: reduce-scattered over the axes that the value is stored over."""
        if not self._is_stacked(var):
            return parts.astype(var.aval.dtype)
        stored = self._batch_dims(var)
        over = tuple(a for a in self.batch_axes if not any(a in axes for axes in stored))

        def local(part: Any) -> Any:
            gradient = _each(stored, part[0], lambda x, axes, dim: jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True))
            return jax.lax.psum(gradient, over) if over else gradient

        # All axes are manual here: in a shard_map over some of them the partitioner gathers operands over the others first.
        whole = PartitionSpec(self.batch_axes, *(self._other_dims(var) or ()))
        # A scatter splits what the other axes left of a dim, so those come first, whatever the order that it is stored in.
        made = [(*(others or ()), *axes) or None for others, axes in zip(self._other_dims(var) or (), stored, strict=True)]
        with self._named(var), scopes.backward():
            return self.manual(local, self.mesh.axis_names, whole, PartitionSpec(*made))(parts).astype(var.aval.dtype)

    def rest_summed(self, var: Var, gradient: Any) -> Any:
        """A gradient that is scattered already over the axes its value is stored over, summed over the others."""
        stored = {a for axes in self._batch_dims(var) for a in axes}
        over = tuple(a for a in self.batch_axes if a not in stored)
        with self._named(var), scopes.backward():
            return (jax.lax.psum(gradient, over) if over else gradient).astype(var.aval.dtype)

    def gathered_layer(self, var: Var, x: Any) -> Any:
        """One layer of a weight, on one stage, made whole over the batch's axes."""
        with self._named(var):
            return self._on_layer(var, x, lambda x, axes, dim: jax.lax.all_gather(x, axes, axis=dim, tiled=True))

    def scattered_layer(self, var: Var, gradient: Any) -> Any:
        """The gradient of one layer, on one stage, summed over the axes that the weight is stored over."""
        with self._named(var), scopes.backward():
            return self._on_layer(var, gradient, lambda x, axes, dim: jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True))

    def _on_layer(self, var: Var, x: Any, collective: Callable[[Any, Any, int], Any]) -> Any:
        stored, others = self._batch_dims(var)[1:], (self._other_dims(var) or [])[1:]
        if not any(stored):
            return x
        # A dim that is split over both kinds of axes cannot be gathered piece by piece: the partitioner has to do it.
        mixed = any(a and b for a, b in zip(stored, others, strict=True))
        axes = () if mixed else tuple(a for axes in others if axes for a in axes)
        spec = PartitionSpec(*others)
        return self.manual(lambda x: _each(stored, x, collective), axes, spec, spec)(x)

    def _is_stacked(self, var: Var) -> bool:
        return bool(self.batch_axes) and var in self.dims

    def staged(self, var: Var, x: Any, stages: Stages) -> Any:
        """[layers, ...] → [stages, layers of a stage, ...]."""
        return self.on_stages(var, stages.arrange(x))

    def unstaged(self, var: Var, x: Any, stages: Stages) -> Any:
        """The inverse of staged."""
        return self.pinned(var, stages.restore(self.on_stages(var, x)))

    def on_stages(self, var: Var, x: Any) -> Any:
        """A staged value with its sharding."""
        dims = self._other_dims(var)
        rest = [FREE] * (x.ndim - 2) if dims is None else [*dims[1:], *[None] * x.ndim][: x.ndim - 2]
        return self._constrained(x, PartitionSpec(self.axis, None, *rest))

    def on_every_stage(self, fn: Callable[..., Any], staged: Any, common: Any, out: Sequence[bool]) -> Any:
        """fn(staged, common) on every stage: `staged` has a leading stage dim, which fn does not see.

        out: for each result of fn whether it has a stage dim, or is the same on all stages.
        """

        def local(staged: Any, common: Any) -> Any:
            found = fn(jax.tree.map(lambda x: x.reshape(x.shape[1:]), staged), common)
            return tuple(jax.tree.map(lambda x: x[None], f) if o else f for f, o in zip(found, out, strict=True))

        specs = tuple(PartitionSpec(self.axis) if o else PartitionSpec() for o in out)
        outer = self.outer_axes
        ones = [axis for axis, size in dict(self.mesh.shape).items() if size == 1 and axis not in (self.axis, *outer)]
        return self.manual(local, (self.axis, *ones), (PartitionSpec(self.axis), PartitionSpec()), specs)(staged, common)

    def shard_index(self) -> Any:
        """Which part of the batch this is."""
        return jax.lax.axis_index(self.batch_axes) if self.batch_axes else jnp.int32(0)

    def _named(self, var: Var) -> AbstractContextManager[None]:
        return scopes.signals(self.signals.get(var, ()))

    def _batch_dims(self, var: Var) -> list[tuple[str, ...]]:
        return [tuple(a for a in axes if a in self.batch_axes) for axes in self.dims.get(var, ())]

    def _other_dims(self, var: Var) -> list[Any] | None:
        if var not in self.dims:
            return None
        sizes = dict(self.mesh.shape)
        return [tuple(a for a in axes if a not in self.batch_axes and sizes[a] > 1) or None for axes in self.dims[var]]

    def _constrained(self, x: Any, spec: PartitionSpec) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(jx.mesh_around() or self.mesh, spec))


def _each(dims: Sequence[tuple[str, ...]], x: Any, collective: Callable[[Any, Any, int], Any]) -> Any:
    """A collective along every dim that has axes."""
    for dim, axes in enumerate(dims):
        if axes:
            x = collective(x, axes, dim)
    return x
