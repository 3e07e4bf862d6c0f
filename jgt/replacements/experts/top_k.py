"""The choice of experts, on the rows of each device.

Many routers choose by `jax.lax.top_k`, which takes each row on its own. XLA's partitioner does not always see that: for CPUs, and for GPUs
if some mesh axis (tensor, say) does not split the rows, it gathers the scores of all devices before it. So a top_k whose indices are the
choice of a call of experts becomes a region, which each device runs on its own rows.

b rows, E experts, k choices of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jgt.program import jaxpr as jx
from jgt.program.dims import Dims
from jgt.program.jaxpr import Equation, Var
from jgt.replacements.device_plan import DevicePlan, run_on_devices
from jgt.replacements.proof import equations_for

_CASTS = ("convert_element_type", "name", "copy", "sharding_constraint", "stop_gradient")


RowLayout = tuple[Dims, Mesh | AbstractMesh]
"""The axes of each dim of a call's rows, and their mesh."""


@dataclass(frozen=True, kw_only=True)
class _TopK(DevicePlan):
    """Scores [b, E] → the k largest of each row [b, k], and their places [b, k]."""

    k: int
    rows: Dims

    def meaning(self, *arrays: jax.Array) -> list[jax.Array]:
        return list(jax.lax.top_k(arrays[0], self.k))

    def axes(self) -> frozenset[str]:
        return frozenset(axis for axes in self.rows for axis in axes)

    def layout(self, num_operands: int) -> tuple[list[Dims], list[Dims]]:
        return [self.rows], [self.rows, self.rows]


def chosen_by_row(eqns: Sequence[Equation], choices: Mapping[Var, RowLayout]) -> list[Equation]:
    """The equations, with regions in place of every top_k that makes one of these choices. Between the two there may be casts and names."""
    made = {var: equation for equation in eqns for var in equation.outvars}
    layouts: dict[Var, RowLayout] = {}
    for choice, layout in choices.items():
        top = made.get(choice)
        while top is not None and top.primitive.name in _CASTS and jx.is_var(top.invars[0]):
            top = made.get(top.invars[0])
        if top is not None and _is_top_k(top) and any(layout[0]):
            layouts[top.outvars[1]] = layout
    return [new for e in eqns for new in (_by_row(e, layouts[e.outvars[1]]) if e.outvars[1:2] and e.outvars[1] in layouts else [e])]


def _is_top_k(equation: Equation) -> bool:
    """Whether an equation is a top_k along the last dim. Its derivative here is of real numbers."""
    if equation.primitive.name != "top_k" or not jx.is_real(equation.invars[0]):
        return False
    return equation.params.get("axis", -1) in (-1, len(jx.shape_of(equation.invars[0])) - 1)


def _by_row(equation: Equation, layout: RowLayout) -> list[Equation]:
    scores, (rows, mesh) = equation.invars[0], layout
    plan, num_experts = _TopK(k=equation.params["k"], rows=rows), jx.shape_of(scores)[-1]

    @jax.custom_vjp
    def top_k(scores: jax.Array) -> list[jax.Array]:
        return run_on_devices(plan, mesh, scores)

    def forward(scores: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        values, places = run_on_devices(plan, mesh, scores)
        return [values, places], places

    def backward(places: jax.Array, cotangents: Sequence[jax.Array]) -> tuple[jax.Array]:
        # The derivative of top_k is a scatter, which the partitioner would not split either.
        is_there = places[..., None] == jax.lax.broadcasted_iota(places.dtype, (*places.shape, num_experts), places.ndim)
        return (jnp.sum(jnp.where(is_there, cotangents[0][..., None], 0), axis=-2, dtype=cotangents[0].dtype),)

    top_k.defvjp(forward, backward)
    return equations_for(cast(Any, top_k), equation, [scores], equation.outvars)
