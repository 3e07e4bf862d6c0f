# pyright: basic
"""A region: a piece of a program that means one thing and runs as another.

XLA's partitioner splits a program operation by operation. Where that is not good enough, the devices have to run a program that somebody
wrote for them: a matmul that runs beside the sends that it needs, say. A region holds both. Its *meaning* is an ordinary program on whole
arrays, and its *plan* is a function on the parts of a device, with the collectives in it. Everything that looks at a traced program
(shapes, FLOPs, policies of jax.checkpoint, vmap) sees the meaning. Only the lowering, which is the last step before XLA, takes the plan,
as a shard_map over the mesh axes that the plan names. One kind of vmap keeps the plan: with `spmd_axis_name`, each device has one entry
(`OfReplicas`).

So a region is one equation until then: nothing differentiates through the shard_map, no axis is manual while a program is traced or
cut into stages, and the same equation lowers inside the shard_map of a pipeline, over the axes that are left. A derivative is not part
of it: whoever makes a region wraps it in a jax.custom_vjp, whose backward pass may contain other regions.

Invariant: the plan computes the meaning. tests/regions compares the two, values and gradients.

This file depends on internals of JAX, whose facts are in tests/regions/test_region.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol, cast

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax._src import core
from jax._src.interpreters import partial_eval
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jgt.program import jaxpr as jx
from jgt.program import scopes
from jgt.program.dims import Dims, partition_spec
from jgt.regions.replicas import OfReplicas

SentBytes = tuple[tuple[str, ...], Fraction] | None
"""The mesh axes of collectives, and their bytes; None if nothing is sent."""


class RegionPlan(Hashable, Protocol):
    """What runs in place of a region. Plans are compared by value: they are part of a program, and so of the keys of JAX's caches."""

    def meaning(self, *arrays: jax.Array) -> list[jax.Array]:
        """The results from whole arrays."""
        ...

    def on_device(self, *parts: jax.Array) -> list[jax.Array]:
        """The parts of the results from one device's parts of the arrays, where `axes` are manual."""
        ...

    def axes(self) -> frozenset[str]:
        """The mesh axes that some array is split over."""
        ...

    def layout(self, num_operands: int) -> tuple[list[Dims], list[Dims]]:
        """The axes of each dim of the operands and of the results, whose parts `on_device` takes and returns."""
        ...

    def sent(self, equation: jx.Equation, sizes: Mapping[str, int], bytes_of: Callable[[jx.Atom], int]) -> SentBytes:
        """What a device sends when it runs this equation, on a mesh of these sizes. bytes_of: an array as it travels."""
        ...

    def pruned(self, used: Sequence[bool], num_operands: int) -> tuple[RegionPlan | None, list[int]]:
        """A plan that makes only the used ones of the results, None if there is none to make, and the operands that it needs."""
        ...


_region = jex.Primitive("region")
_region.multiple_results = True


def run_region(plan: RegionPlan, mesh: Mesh | AbstractMesh | None, *arrays: jax.Array) -> list[jax.Array]:
    """The results of a region, as part of a program that is being traced. Without a mesh, the region runs as its meaning."""
    meaning = jax.make_jaxpr(plan.meaning)(*[jax.typeof(x) for x in arrays])
    return _region.bind(*arrays, plan=plan, mesh=mesh, meaning=meaning)


@dataclass(frozen=True)
class RegionPolicy:
    """A policy of jax.checkpoint that treats a region as another policy treats the matmuls in the region's meaning."""

    around: Callable[..., Any]

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive is not _region:
            return self.around(primitive, *avals, **params)
        dots = (e for e in jx.body(params["meaning"]).eqns if e.primitive.name == "dot_general")
        return next((_asked(self.around, dot) for dot in dots), False)


def plan_of(equation: jx.Equation) -> RegionPlan | None:
    """The plan of a region; None for any other equation."""
    return equation.params["plan"] if equation.primitive is _region else None


def is_recomputed(policy: Callable[..., Any] | None, equation: jx.Equation) -> bool:
    """Whether a policy of jax.checkpoint drops the results of an equation."""
    return policy is None or partial_eval.ensure_enum(_asked(policy, equation)) is partial_eval.Recompute


def _asked(policy: Callable[..., Any], equation: jx.Equation) -> Any:
    return policy(equation.primitive, *[v.aval for v in equation.invars], **equation.params)


# -- what JAX asks about a primitive -----------------------------------------------------------------------------


def _evaluated(*arrays: jax.Array, meaning: jx.Program, **_: Any) -> list[jax.Array]:
    return jx.evaluate(meaning, arrays)


def _avals(*_: Any, meaning: jx.Program, **__: Any) -> list[Any]:
    return [v.aval for v in jx.body(meaning).outvars]


def _derivative(primals: Sequence[jax.Array], tangents: Sequence[Any], **params: Any) -> Any:
    # Only second derivatives come here; they are taken of the meaning.
    known = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(lambda *x: _evaluated(*x, **params), tuple(primals), tuple(known))


def _vmapped(axis: Any, arrays: Sequence[jax.Array], dims: Sequence[int | None], *, plan: Any, mesh: Any, meaning: jx.Program) -> Any:
    names = axis.spmd_name if isinstance(axis.spmd_name, tuple) else (axis.spmd_name,)
    sizes = {} if mesh is None else dict(mesh.shape)
    if plan.axes().isdisjoint(names) and math.prod(sizes.get(name, 0) for name in names) == axis.size:
        arrays = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims, strict=True)]
        mapped = tuple(dim is not None for dim in dims)
        results = run_region(OfReplicas(plan=plan, axes_of_replicas=names, mapped=mapped), mesh, *arrays)
    else:
        results = jax.vmap(lambda *x: jx.evaluate(meaning, x), tuple(dims), 0)(*arrays)
    return results, (0,) * len(results)


def _without_unused(used: list[bool], *rest: Any) -> tuple[list[bool], jx.Equation | None]:
    # jax 0.12 also says which operands are alive.
    equation: jx.Equation = rest[-1]
    if all(used):
        return [True] * len(equation.invars), equation
    plan, needed = equation.params["plan"].pruned(used, len(equation.invars))
    if plan is None:
        return [False] * len(equation.invars), None
    invars = [equation.invars[n] for n in needed]
    meaning = jax.make_jaxpr(plan.meaning)(*[v.aval for v in invars])
    outvars = [v for v, is_used in zip(equation.outvars, used, strict=True) if is_used]
    pruned = equation.replace(invars=invars, outvars=outvars, params={**equation.params, "plan": plan, "meaning": meaning})
    return [n in needed for n in range(len(equation.invars))], pruned


def _lowered(ctx: Any, *operands: Any, plan: RegionPlan, mesh: Mesh | AbstractMesh | None, meaning: jx.Program) -> Any:
    if mesh is None:
        return _lower(ctx, operands, lambda *arrays: jx.evaluate(meaning, arrays))
    around = ctx.module_context.axis_context
    manual = frozenset[str](getattr(around, "manual_axes", ()))
    if manual:
        # The mesh of the trace is gone here, and a nested shard_map looks for it.
        outer = around.mesh
        abstract = getattr(outer, "abstract_mesh", outer).update_axis_types(dict.fromkeys(manual, AxisType.Manual))
        with jax.sharding.use_abstract_mesh(abstract):
            return _lower(ctx, operands, _on_devices(plan, len(operands), None, abstract, manual))
    return _lower(ctx, operands, _on_devices(plan, len(operands), mesh, mesh, manual))


def _lower(ctx: Any, operands: Sequence[Any], fn: Callable[..., Any]) -> Any:
    return cast("Callable[..., Any]", mlir.lower_fun(fn, multiple_results=True))(ctx, *operands)


def _on_devices(
    plan: RegionPlan, num_operands: int, mesh: Mesh | AbstractMesh | None, named: Mesh | AbstractMesh, manual: frozenset[str]
) -> Callable[..., Any]:
    """The plan as a shard_map over its axes that are not manual already, and over axes of one device."""
    sizes = dict(named.shape)
    axes = {axis for axis, size in sizes.items() if axis not in manual and (axis in plan.axes() or size == 1)}

    def on_device(*parts: jax.Array) -> list[jax.Array]:
        # The axes of the shard_map around the region are not known where it is lowered.
        with core.extend_axis_env_nd([(axis, sizes[axis]) for axis in manual if axis not in axes]), scopes.region():
            return plan.on_device(*parts)

    def spec(dims: Dims) -> PartitionSpec:
        return partition_spec(tuple(tuple(axis for axis in split if axis in axes) for split in dims))

    if not axes:
        return on_device
    ins, outs = plan.layout(num_operands)
    return jax.shard_map(
        on_device, mesh=mesh, in_specs=tuple(map(spec, ins)), out_specs=list(map(spec, outs)), axis_names=axes, check_vma=False
    )


_region.def_impl(_evaluated)
_region.def_abstract_eval(_avals)
ad.primitive_jvps[_region] = _derivative
batching.fancy_primitive_batchers[_region] = _vmapped
partial_eval.dce_rules[_region] = _without_unused
# Not cached: what a lowering is depends on the axes that are manual around it.
mlir.register_lowering(_region, _lowered, cacheable=False)
