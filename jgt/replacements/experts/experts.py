"""Calls of `experts` in a traced program, replaced by what the devices of a mesh run: found, proven, replaced.

A call is found by its region. The rules say where its experts are:

    axes: {batch: [data, expert]}
    signals:
      layers/moe:
        params:  {"experts/*": [expert, fsdp, tensor]}
        experts: {axis: expert, exchange: all-to-all, room: 1.25, over: rounds}

Its tokens are split as the inputs are. Without `experts:`, each device runs all experts on its own tokens, which is the same program for an
axis of one device: rows are never sorted across devices.

A function that takes a maximum over rows, say, would give a device other numbers than the whole batch, because a device has other rows. No
type shows that. So the function runs once on a few rows of two experts, and again with the rows of each expert in another order and with
other noise behind the last group: the results have to be the same, in that order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jgt.program import jaxpr as jx
from jgt.program.dims import Dims
from jgt.program.jaxpr import Equation, Program, Var
from jgt.program.places import Place, manual_mesh, mesh_around, place_of
from jgt.replacements.device_plan import plan_of
from jgt.replacements.experts.call import ExpertCall
from jgt.replacements.experts.exchange import Exchange, run_on
from jgt.replacements.experts.grouped import mosaic_obstacle
from jgt.replacements.experts.top_k import RowLayout, chosen_by_row
from jgt.replacements.proof import equations_for
from jgt.replacements.replacement import ParameterPlace, Replaced, Site
from jgt.rules import ExpertsRule, Match, Rules, match_experts, misfits

_SIZES = (5, 3)
"""The rows of each expert in the trial; some more belong to none."""
_NUM_ROWS = 12


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
    return Exchange(rows=split, sizes=tuple(known.items()), axis=rule.axis, capacity_factor=rule.room, drops=rule.over == "drop")


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
    if tries and not _is_row_wise(call, equation):
        yield (
            f"{where}: the function of experts at {jx.line_of(equation)} does not map each row on its own: in another order, rows have "
            "other results. Take sums and maxima over rows out of it"
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


def _is_row_wise(call: ExpertCall, equation: Equation) -> bool:
    """Whether the function of a call, whose equation this is, gives each row the same result whatever rows there are beside it."""
    # A new thread has no trace around it, so operations there run.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_try, call, equation).result()


def _try(call: ExpertCall, equation: Equation) -> bool:
    leaves, x = [jx.struct_of(atom) for atom in equation.invars[:-3]], jx.struct_of(equation.invars[-3])
    count = min(len(_SIZES), leaves[0].shape[0])
    sizes, num = jnp.array(_SIZES[:count], jnp.int32), sum(_SIZES[:count])
    order = np.arange(_NUM_ROWS)
    order[: _SIZES[0]] = np.roll(order[: _SIZES[0]], 2)
    order[_SIZES[0] : num] = order[_SIZES[0] : num][::-1]

    def run(rows: jax.Array) -> np.ndarray[Any, Any]:
        return np.asarray(call.run(weights, rows, sizes), np.float32)[:num]

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        weights = [_noise((count, *leaf.shape[1:]), leaf.dtype) for leaf in leaves]
        rows = _noise((_NUM_ROWS, x.shape[-1]), x.dtype)
        once, again = run(rows), run(rows[order].at[num:].multiply(7))
    tolerance = 1e-5 if x.dtype == jnp.float32 else 2e-2
    return np.allclose(once[order[:num]], again, rtol=tolerance, atol=tolerance * float(np.max(np.abs(once))))


def _noise(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    # Weights may be large, and random numbers for all of them would take seconds. A prime length makes rows differ.
    numbers = np.random.default_rng(math.prod(shape)).standard_normal(4099, np.float32) / math.sqrt(shape[-1])
    # Rounded before it is repeated: a copy costs less than a conversion.
    return jnp.asarray(np.resize(numbers.astype(dtype), shape))
