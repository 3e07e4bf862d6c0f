"""Programs that have the experts of one device, where the axis that holds the experts is manual already.

A pipeline makes the axes of the batch manual, and brings weights in whole over them. The axis of the experts is such an axis, but its
devices have different experts, which are not to be brought together. So the program of a layer has to be one for the experts of a device:

    weights [experts, d, f] → cast → call of experts        as traced
    weights [experts / n, d, f] → cast → call of experts    on a device

Between a weight and the call there may be casts and names only, also within programs inside (`jax.checkpoint`). Weights that reach the call
in any other way, or that something else reads, stay whole, and the call runs all experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from jgt.program import jaxpr as jx
from jgt.program.equations import is_scan, map_subprograms, outer_operands, subprograms, with_params
from jgt.program.jaxpr import Atom, Equation, Program, Var
from jgt.program.places import Place, place_of
from jgt.replacements.experts.call import ExpertCall
from jgt.replacements.experts.experts import call_of
from jgt.rules import Rules, match_experts

_CASTS = ("convert_element_type", "name", "copy", "reduce_precision", "sharding_constraint")


def with_local_experts(
    program: Program, around: Place, rules: Rules, sizes: Mapping[str, int], axes: Sequence[str]
) -> tuple[Program, Mapping[int, str]]:
    """The program with the experts of one device, in calls whose rule names one of these manual axes; the program itself if it has none.

    With it, by the number of each argument that has experts of one device, the axis that holds them.
    """
    search = _Search(rules, sizes, axes)
    wanted = search.wanted(program, around, {})
    invars = jx.body(program).invars
    held = {index: wanted[var] for index, var in enumerate(invars) if var in wanted}
    if search.is_lost or not held:
        return program, {}
    return search.local(program, around, wanted), held


class _Search:
    """A walk backward from the calls to their weights, and one forward that makes them local."""

    def __init__(self, rules: Rules, sizes: Mapping[str, int], axes: Sequence[str]):
        self._rules, self._sizes, self._axes = rules, sizes, axes
        self.is_lost = False

    def wanted(self, program: Program, around: Place, results: Mapping[int, str]) -> dict[Var, str]:
        """The variables that have experts of one device, and their axis, if these results have."""
        body = jx.body(program)
        wanted = {var: axis for n, axis in results.items() if jx.is_var(var := body.outvars[n])}
        readers: dict[Atom, int] = {}
        for equation in reversed(body.eqns):
            for operand, axis in self._operands(equation, place_of(equation, around), wanted):
                wanted[operand] = axis
                readers[operand] = readers.get(operand, 0) + 1
        read = [a for e in body.eqns for a in e.invars if jx.is_var(a)] + [v for n, v in enumerate(body.outvars) if n not in results]
        # Something else that reads them would see a part.
        self.is_lost |= any(read.count(var) != readers.get(var, 0) for var in wanted) or any(var in wanted for var in body.constvars)
        return wanted

    def _operands(self, equation: Equation, place: Place, wanted: Mapping[Var, str]) -> Iterator[tuple[Var, str]]:
        if (call := call_of(equation)) is not None:
            axis = self._axis(place)
            yield from ((v, axis) for v in equation.invars[:-3] if axis is not None and jx.is_var(v)) if not call.held_by else ()
            return
        made = {n: wanted[v] for n, v in enumerate(equation.outvars) if v in wanted}
        inner = list(subprograms(equation))
        for program in inner if len(inner) == 1 and len(jx.body(inner[0]).outvars) == len(equation.outvars) else ():
            inside = self.wanted(program, place, made)
            outer = dict(zip(jx.body(program).invars, outer_operands(equation, program), strict=True))
            for var, axis in inside.items():
                if var in outer:
                    operand = outer[var]
                    self.is_lost |= operand is None or not jx.is_var(operand) or is_scan(equation)
                    if operand is not None and jx.is_var(operand):
                        yield operand, axis
            return
        if made:
            self.is_lost |= equation.primitive.name not in _CASTS
            yield from ((v, made[0]) for v in equation.invars[:1] if jx.is_var(v) and 0 in made)

    def _axis(self, place: Place) -> str | None:
        rule = match_experts(self._rules, place.path).rule
        return rule.axis if rule is not None and rule.axis in self._axes and self._sizes[rule.axis] > 1 else None

    def local(self, program: Program, around: Place, wanted: Mapping[Var, str]) -> Program:
        """The program whose variables in `wanted` have the experts of one device."""
        new, inner = {var: self._smaller(var, axis) for var, axis in wanted.items()}, jx.body(program)
        eqns = [self._local_equation(equation, place_of(equation, around), new, wanted) for equation in inner.eqns]
        outvars = [new.get(v, v) if jx.is_var(v) else v for v in inner.outvars]
        return jx.with_parts(program, invars=[new.get(v, v) for v in inner.invars], eqns=eqns, outvars=outvars)

    def _local_equation(self, equation: Equation, place: Place, new: Mapping[Var, Var], wanted: Mapping[Var, str]) -> Equation:
        touched = [wanted[v] for v in (*equation.invars, *equation.outvars) if jx.is_var(v) and v in wanted]
        if not touched:
            return equation
        invars = [new.get(v, v) if jx.is_var(v) else v for v in equation.invars]
        outvars = [new.get(v, v) for v in equation.outvars]
        new_equation = equation.replace(invars=invars, outvars=outvars)
        if isinstance(call := call_of(equation), ExpertCall):
            return with_params(new_equation, plan=replace(call, held_by=touched[0]))
        results = {n: wanted[v] for n, v in enumerate(equation.outvars) if v in wanted}
        return map_subprograms(new_equation, lambda inner: self.local(inner, place, self.wanted(inner, place, results)))

    def _smaller(self, var: Var, axis: str) -> Var:
        first, *rest = jx.shape_of(var)
        return jx.new_var_of(var, (math.ceil(first / self._sizes[axis]), *rest))
