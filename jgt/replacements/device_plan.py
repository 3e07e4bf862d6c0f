# pyright: basic
"""A device plan: a piece of a program that means one thing and runs as another.

XLA's partitioner splits a program operation by operation. Where that is not good enough, each device has to run a program that was
written for it: a matmul that runs beside the sends that it needs, say. A plan has both. Its *meaning* is an ordinary program on whole
arrays, and `on_device` is a function of the parts of a device, with the collectives in it. `run_on_devices` puts the plan into a traced
program as one equation. Everything that looks at the program (shapes, FLOPs, policies of jax.checkpoint, vmap) sees the meaning. Only the
lowering, which is the last step before XLA, takes `on_device`, as a shard_map over the mesh axes that the plan names. One kind of vmap
keeps the plan: with `spmd_axis_name`, each device has one entry (`OfReplicas`).

So nothing differentiates through the shard_map, no axis is manual while a program is traced or cut into stages, and the same equation
lowers inside the shard_map of a pipeline, over the axes that are left. A derivative is not part of a plan: a jax.custom_vjp around
`run_on_devices` brings it, and its backward pass may contain other plans.

Invariant: `on_device` computes the meaning. tests/replacements compares the two, values and gradients.

This file depends on internals of JAX, whose facts are in tests/replacements/test_device_plan.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

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
from jgt.program.places import exclude_lines
from jgt.program.tracing import evaluate

# The line of what a plan replaces is the model's.
exclude_lines(Path(__file__).parent)

SentBytes = tuple[tuple[str, ...], Fraction] | None
"""The mesh axes of collectives, and their bytes; None if nothing is sent."""


class DevicePlan(ABC):
    """A meaning and the program of a device. Subclasses are frozen dataclasses, because plans are part of the keys of JAX's caches."""

    @abstractmethod
    def meaning(self, *arrays: jax.Array) -> list[jax.Array]:
        """The results from whole arrays."""

    @abstractmethod
    def layout(self, num_operands: int) -> tuple[list[Dims], list[Dims]]:
        """The axes of each dim of the operands and of the results, whose parts `on_device` takes and returns."""

    def on_device(self, *parts: jax.Array) -> list[jax.Array]:
        """The parts of the results from one device's parts of the arrays, where `axes` are manual."""
        return self.meaning(*parts)

    def axes(self) -> frozenset[str]:
        """The mesh axes that some array is split over."""
        return frozenset()

    def sent(self, equation: jx.Equation, sizes: Mapping[str, int], bytes_of: Callable[[jx.Atom], int]) -> SentBytes:
        """The bytes that a device sends in this equation, on a mesh of these sizes. bytes_of: the bytes of an array as it travels."""
        return None

    def pruned(self, used: Sequence[bool], num_operands: int) -> tuple[DevicePlan | None, list[int]]:
        """A plan that makes only the used results, with the numbers of the operands that it needs; None if no result is used.

        A plan that returns itself makes all results, and XLA leaves out what nothing reads.
        """
        return (self, list(range(num_operands))) if any(used) else (None, [])


@dataclass(frozen=True, kw_only=True)
class OfReplicas(DevicePlan):
    """The plan of every replica: what `jax.vmap` with `spmd_axis_name` makes of a plan.

    Such a vmap gives each array a dim of replicas, split over axes of the mesh, so a device has one replica's part of it. There the plan
    runs as for that replica alone: the dim is dropped before and added after. axes_of_replicas: the mesh axes between replicas. mapped:
    whether each operand has their dim. All results have it.
    """

    plan: DevicePlan
    axes_of_replicas: tuple[str, ...]
    mapped: tuple[bool, ...]

    def meaning(self, *arrays: jax.Array) -> list[jax.Array]:
        return jax.vmap(self.plan.meaning, [0 if is_mapped else None for is_mapped in self.mapped])(*arrays)

    def on_device(self, *parts: jax.Array) -> list[jax.Array]:
        own = [x.reshape(x.shape[1:]) if is_mapped else x for x, is_mapped in zip(parts, self.mapped, strict=True)]
        return [x[None] for x in self.plan.on_device(*own)]

    def axes(self) -> frozenset[str]:
        return self.plan.axes().union(self.axes_of_replicas)

    def layout(self, num_operands: int) -> tuple[list[Dims], list[Dims]]:
        ins, outs = self.plan.layout(num_operands)
        lead: Dims = (self.axes_of_replicas,)
        by_operand = zip(ins, self.mapped, strict=True)
        return [(*lead, *dims) if is_mapped else dims for dims, is_mapped in by_operand], [(*lead, *dims) for dims in outs]

    def sent(self, equation: jx.Equation, sizes: Mapping[str, int], bytes_of: Callable[[jx.Atom], int]) -> SentBytes:
        return self.plan.sent(self.of_one(equation), sizes, bytes_of)

    def pruned(self, used: Sequence[bool], num_operands: int) -> tuple[DevicePlan | None, list[int]]:
        plan, needed = self.plan.pruned(used, num_operands)
        mapped = tuple(self.mapped[n] for n in needed)
        return None if plan is None else replace(self, plan=plan, mapped=mapped), needed

    def of_one(self, equation: jx.Equation) -> jx.Equation:
        """The equation of one replica, from an equation of this plan. Its variables are new."""

        def one(var: jx.Atom) -> jx.Atom:
            return jx.new_var_of(var, jx.shape_of(var)[1:]) if jx.is_var(var) else var

        invars = [one(var) if is_mapped else var for var, is_mapped in zip(equation.invars, self.mapped, strict=True)]
        outvars = [cast(jx.Var, one(var)) for var in equation.outvars]
        return equation.replace(invars=invars, outvars=outvars, params={**equation.params, "plan": self.plan})


_primitive = jex.Primitive(scopes.DEVICE_PLAN)
_primitive.multiple_results = True


def run_on_devices(plan: DevicePlan, mesh: Mesh | AbstractMesh | None, *arrays: jax.Array) -> list[jax.Array]:
    """The results of a plan, as part of a program that is being traced. Without a mesh, the meaning runs."""
    meaning = jax.make_jaxpr(plan.meaning)(*[jax.typeof(x) for x in arrays])
    return _primitive.bind(*arrays, plan=plan, mesh=mesh, meaning=meaning)


def plan_of(equation: jx.Equation) -> DevicePlan | None:
    """The plan that an equation runs; None for any other equation."""
    return equation.params["plan"] if equation.primitive is _primitive else None


@dataclass(frozen=True)
class MeaningPolicy:
    """A policy of jax.checkpoint that treats a plan as another policy treats the matmuls in the plan's meaning."""

    around: Callable[..., object]

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive is not _primitive:
            return self.around(primitive, *avals, **params)
        dots = (e for e in jx.body(params["meaning"]).eqns if e.primitive.name == "dot_general")
        return next((_answer(self.around, dot) for dot in dots), False)


def _answer(policy: Callable[..., object], equation: jx.Equation) -> object:
    return policy(equation.primitive, *[v.aval for v in equation.invars], **equation.params)


# -- what JAX asks about a primitive -----------------------------------------------------------------------------


def _evaluated(*arrays: jax.Array, meaning: jx.Program, **_: object) -> list[jax.Array]:
    return evaluate(meaning, arrays)


def _avals(*_: object, meaning: jx.Program, **__: object) -> list[object]:
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
        results = run_on_devices(OfReplicas(plan=plan, axes_of_replicas=names, mapped=mapped), mesh, *arrays)
    else:
        results = jax.vmap(lambda *x: evaluate(meaning, x), tuple(dims), 0)(*arrays)
    return results, (0,) * len(results)


def _without_unused(used: list[bool], *rest: Any) -> tuple[list[bool], jx.Equation | None]:
    # jax 0.12 also says which operands are alive.
    equation: jx.Equation = rest[-1]
    plan, needed = equation.params["plan"].pruned(used, len(equation.invars))
    if all(used) or plan is equation.params["plan"]:
        return [True] * len(equation.invars), equation
    if plan is None:
        return [False] * len(equation.invars), None
    invars = [equation.invars[n] for n in needed]
    meaning = jax.make_jaxpr(plan.meaning)(*[v.aval for v in invars])
    outvars = [v for v, is_used in zip(equation.outvars, used, strict=True) if is_used]
    pruned = equation.replace(invars=invars, outvars=outvars, params={**equation.params, "plan": plan, "meaning": meaning})
    return [n in needed for n in range(len(equation.invars))], pruned


def _lowered(ctx: Any, *operands: Any, plan: DevicePlan, mesh: Mesh | AbstractMesh | None, meaning: jx.Program) -> Any:
    if mesh is None:
        return _lower(ctx, operands, lambda *arrays: evaluate(meaning, arrays))
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
    plan: DevicePlan, num_operands: int, mesh: Mesh | AbstractMesh | None, named: Mesh | AbstractMesh, manual: frozenset[str]
) -> Callable[..., list[jax.Array]]:
    """The plan as a shard_map over its axes that are not manual already, and over axes of one device."""
    sizes = dict(named.shape)
    axes = {axis for axis, size in sizes.items() if axis not in manual and (axis in plan.axes() or size == 1)}

    def on_device(*parts: jax.Array) -> list[jax.Array]:
        # The axes of the shard_map around the plan are not known where it is lowered.
        with core.extend_axis_env_nd([(axis, sizes[axis]) for axis in manual if axis not in axes]), scopes.on_devices():
            return plan.on_device(*parts)

    def spec(dims: Dims) -> PartitionSpec:
        return partition_spec(tuple(tuple(axis for axis in split if axis in axes) for split in dims))

    if not axes:
        return on_device
    ins, outs = plan.layout(num_operands)
    return jax.shard_map(
        on_device, mesh=mesh, in_specs=tuple(map(spec, ins)), out_specs=list(map(spec, outs)), axis_names=axes, check_vma=False
    )


_primitive.def_impl(_evaluated)
_primitive.def_abstract_eval(_avals)
ad.primitive_jvps[_primitive] = _derivative
batching.fancy_primitive_batchers[_primitive] = _vmapped
partial_eval.dce_rules[_primitive] = _without_unused
# Not cached: what a lowering is depends on the axes that are manual around it.
mlir.register_lowering(_primitive, _lowered, cacheable=False)
