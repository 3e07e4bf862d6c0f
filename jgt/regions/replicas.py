"""A region of every replica: what `jax.vmap` with `spmd_axis_name` makes of a region.

Such a vmap gives each array a dim of replicas, split over axes of the mesh, so a device has one replica's part of it. There the plan runs
as it would run for that replica alone: the dim is dropped before, and added after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import jax

from jgt.program import jaxpr as jx
from jgt.program.dims import Dims

if TYPE_CHECKING:
    from jgt.regions.region import RegionPlan, SentBytes


@dataclass(frozen=True, kw_only=True)
class OfReplicas:
    """The plan of each replica. axes_of_replicas: the mesh axes between them. mapped: whether an operand has their dim.

    All results have it.
    """

    plan: RegionPlan
    axes_of_replicas: tuple[str, ...]
    mapped: tuple[bool, ...]

    def meaning(self, *arrays: jax.Array) -> list[jax.Array]:
        """See `RegionPlan`."""
        return jax.vmap(self.plan.meaning, [0 if is_mapped else None for is_mapped in self.mapped])(*arrays)

    def on_device(self, *parts: jax.Array) -> list[jax.Array]:
        """See `RegionPlan`."""
        own = [x.reshape(x.shape[1:]) if is_mapped else x for x, is_mapped in zip(parts, self.mapped, strict=True)]
        return [x[None] for x in self.plan.on_device(*own)]

    def axes(self) -> frozenset[str]:
        """See `RegionPlan`."""
        return self.plan.axes().union(self.axes_of_replicas)

    def layout(self, num_operands: int) -> tuple[list[Dims], list[Dims]]:
        """See `RegionPlan`."""
        ins, outs = self.plan.layout(num_operands)
        lead: Dims = (self.axes_of_replicas,)
        return [(*lead, *dims) if is_mapped else dims for dims, is_mapped in zip(ins, self.mapped, strict=True)], [
            (*lead, *dims) for dims in outs
        ]

    def sent(self, equation: jx.Equation, sizes: Mapping[str, int], bytes_of: Callable[[jx.Atom], int]) -> SentBytes:
        """See `RegionPlan`."""
        return self.plan.sent(self.of_one(equation), sizes, bytes_of)

    def pruned(self, used: Sequence[bool], num_operands: int) -> tuple[OfReplicas | None, list[int]]:
        """See `RegionPlan`."""
        plan, needed = self.plan.pruned(used, num_operands)
        mapped = tuple(self.mapped[n] for n in needed)
        return None if plan is None else replace(self, plan=plan, mapped=mapped), needed

    def of_one(self, equation: jx.Equation) -> jx.Equation:
        """An equation of this plan as it is for one replica. Its variables are new."""
        invars = [_of_one(var) if is_mapped else var for var, is_mapped in zip(equation.invars, self.mapped, strict=True)]
        outvars = [cast(jx.Var, _of_one(var)) for var in equation.outvars]
        return equation.replace(invars=invars, outvars=outvars, params={**equation.params, "plan": self.plan})


def _of_one(var: jx.Atom) -> jx.Atom:
    return jx.new_var_of(var, jx.shape_of(var)[1:]) if jx.is_var(var) else var
