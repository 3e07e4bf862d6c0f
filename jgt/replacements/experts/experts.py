"""Calls of `experts` in a traced program, replaced by what the devices of a mesh run: found, proven, replaced.

A call is found by its region. The rules say where its experts are:

    axes: {batch: [data, expert]}
    signals:
      layers/moe:
        params:  {"experts/*": [expert, fsdp, tensor]}
        experts: {axis: expert, exchange: all-to-all, capacity_factor: 1.25, over: rounds}

Its tokens are split as the inputs are. Without `experts:`, each device runs all experts on its own tokens, which is the same program for an
axis of one device: rows are never sorted across devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jgt.program import jaxpr as jx
from jgt.program.dims import Dims
from jgt.program.jaxpr import Equation, Program, Var
from jgt.program.places import Place, line_of, manual_mesh, mesh_around, place_of
from jgt.replacements.device_plan import plan_of
from jgt.replacements.experts.call import ExpertCall
from jgt.replacements.experts.exchange import Exchange, run_on
from jgt.replacements.experts.grouped import mosaic_obstacle
from jgt.replacements.experts.top_k import RowLayout, chosen_by_row
from jgt.replacements.experts.trial import is_row_wise
from jgt.replacements.proof import equations_for
from jgt.replacements.replacement import ParameterPlace, Replaced, Site
from jgt.rules import ExpertsRule, Match, Rules, match_experts, misfits


def call_of(equation: Equation) -> ExpertCall | None:
    """The call of `experts` that an equation is; None for any other equation."""
    plan = plan_of(equation)
    return plan if isinstance(plan, ExpertCall) else None


@dataclass(frozen=True)
class Experts:
    """The replacement of calls of experts. Without a rule for a call, each device runs all experts on its own tokens."""

    rules: Rules

    def apply(self, program: Program, around: Place, site: Site) -> Replaced:
        """The program whose calls of experts run on the devices that have these experts."""
        if not any(call_of(equation) for equation in jx.body(program).eqns):
            return Replaced(program=program)
        eqns: list[Equation] = []
        choices: dict[Var, RowLayout] = {}
        matches: list[Match[ExpertsRule]] = []
        # In a dict, because two calls may have the same problem.
        problems: dict[str, None] = {}
        for equation in jx.body(program).eqns:
            call, place = call_of(equation), place_of(equation, around)
            # Rows of a vmap have a dim that no spec names.
            if call is None or place.num_vmaps:
                eqns.append(equation)
                continue
            match = match_experts(self.rules, place.path)
            matches += [match] if match.decided else []
            here = manual_mesh(equation) or mesh_around() or site.mesh
            manual = () if isinstance(here, Mesh) else here.manual_axes
            rows, rule = site.free(_rows(self.rules, len(jx.shape_of(equation.invars[-3]))), manual), match.rule
            # Where the axis is manual, weights are one device's, or they are whole.
            is_held = rule is not None and rule.axis in manual
            problems_here = list(_problems(None if is_held else rule, call, equation, rows, here, tries=not site.is_part))
            problems |= dict.fromkeys([*problems_here, *_weight_problems(rule, equation, place.path, site.parameters)])
            # On one device there is nothing to exchange.
            if problems_here or site.mesh.size == 1:
                eqns.append(equation)
                continue
            exchange = _exchange(rule if call.held_by or not is_held else None, rows, dict(here.shape))
            eqns += _replaced(call, exchange, here, equation)
            if jx.is_var(choice := equation.invars[-2]):
                choices[choice] = exchange.rows, here
        new = jx.with_body(program, eqns=chosen_by_row(eqns, choices), outvars=jx.body(program).outvars)
        return Replaced(program=new, matches=tuple(matches), problems=tuple(problems))

    def exchange_at(self, signal: str, rank: int, sizes: Mapping[str, int]) -> Exchange | None:
        """The exchange of the rows of an x of this rank at a signal, outside of any pipeline, on a mesh of these sizes.

        None if there is none, and if the rules do not fit the mesh: `apply` finds what is wrong with them.
        """
        rows, rule = _rows(self.rules, rank), match_experts(self.rules, signal).rule
        if rule is None or any(axis not in sizes for axes in ((rule.axis,), *rows) for axis in axes):
            return None
        exchange = _exchange(rule, rows, dict(sizes))
        return exchange if exchange.axis in {axis for axes in exchange.rows for axis in axes} else None

    @staticmethod
    def matmuls(dtype: Any, device: Any) -> str:
        """How a device multiplies rows of this type by the matrices of their experts, in words. device: None if it is unknown."""
        obstacle = mosaic_obstacle(dtype, device)
        return f"blocks of rows ({obstacle})" if obstacle else "Mosaic's kernels"


def _rows(rules: Rules, rank: int) -> Dims:
    """The axes of each dim of an x of this rank, which are split like the inputs."""
    dims = (rule.dims(rank) for rule in rules.inputs if rule.rank < rank)
    return next((found for found in dims if any(found)), ((),) * rank)


def _exchange(rule: ExpertsRule | None, rows: Dims, sizes: dict[str, int]) -> Exchange:
    split = tuple(tuple(axis for axis in axes if sizes[axis] > 1) for axes in rows)
    known = {axis: sizes[axis] for axes in split for axis in axes}
    if rule is None or sizes.get(rule.axis, 1) == 1:
        return Exchange(rows=split, sizes=tuple(known.items()))
    known[rule.axis] = sizes[rule.axis]
    return Exchange(rows=split, sizes=tuple(known.items()), axis=rule.axis, capacity_factor=rule.capacity_factor, drops=rule.over == "drop")


def _problems(
    rule: ExpertsRule | None, call: ExpertCall, equation: Equation, rows: Dims, mesh: Mesh | AbstractMesh, *, tries: bool
) -> Iterator[str]:
    sizes = dict(mesh.shape)
    shape = jx.shape_of(equation.invars[-3])
    where = "experts" if rule is None else f"{rule.where}: experts"
    for misfit in misfits(rows, shape, sizes):
        axes = ", ".join(misfit.axes)
        yield f"{where}: dim {misfit.dim} of x {list(shape)} has size {misfit.size}, which {axes} ({misfit.parts}) does not divide"
    if rule is None or sizes.get(rule.axis, 1) == 1:
        return
    num_experts, size = jx.shape_of(equation.invars[0])[0], sizes[rule.axis]
    if num_experts % size:
        fits = ", ".join(str(n) for n in range(1, num_experts + 1) if num_experts % n == 0)
        yield f"{where}: {rule.axis}={size} does not divide {num_experts} experts. Sizes that do: {fits}"
    if not any(rule.axis in axes for axes in rows):
        yield (
            f"{where}: the tokens are not split over {rule.axis}, so each of its devices would route the same ones. "
            f"Add {rule.axis} to the axes of the batch: axes: {{batch: [..., {rule.axis}]}}"
        )
    if tries and not is_row_wise(call, equation):
        yield (
            f"{where}: the function of experts at {line_of(equation)} does not map each row on its own: beside other rows, or "
            "if its expert has another number, a row has another result. Take sums, means and maxima over rows out of it"
        )


def _weight_problems(rule: ExpertsRule | None, equation: Equation, signal: str, parameters: Sequence[ParameterPlace]) -> Iterator[str]:
    """The weights of experts that the axis of the experts splits along another dim."""
    num_experts = jx.shape_of(equation.invars[0])[0]
    for parameter in parameters if rule is not None else ():
        inner = [
            (size, axes)
            for dim, (size, axes) in enumerate(zip(parameter.shape, parameter.dims, strict=True))
            if dim not in parameter.sliced
        ]
        # By its shape: a router [d, experts] is not one of the weights.
        if signal not in parameter.signals or len(inner) < 2 or inner[0][0] != num_experts:
            continue
        if rule is not None and any(rule.axis in axes for _, axes in inner[1:]):
            shape = [size for size, _ in inner]
            yield (
                f"{rule.where}: experts: {rule.axis} holds the experts, so it can split dim 0 of {parameter.path} {shape} only. "
                f"Write {rule.axis} first in its spec, and take it out of the other dims"
            )


def _replaced(call: ExpertCall, exchange: Exchange, mesh: Mesh | AbstractMesh, equation: Equation) -> list[Equation]:
    def run(*operands: jax.Array) -> list[jax.Array]:
        return run_on(call, exchange, mesh, operands)

    return equations_for(run, equation, equation.invars, equation.outvars)
