"""Which results of a function of a batch can be joined from the results of its parts.

An accumulated step runs a loss on parts of the batch and adds up or averages what it returns. A mean over rows has the same mean over equal
parts, a sum the same sum. But a loss that compares the rows of its batch with each other, such as a contrastive one, is another loss on
a part: it has fewer rows to compare with.
"""

from __future__ import annotations

from dataclasses import dataclass

from jgt.batch.growth import AlignmentError, Growth
from jgt.batch.walk import growth_of
from jgt.program import jaxpr as jx
from jgt.program.jaxpr import Atom, Program, Var
from jgt.program.parts import Flat, flatten


@dataclass(frozen=True, kw_only=True)
class JoinedResult:
    """degree: 0 for a mean over rows (or what does not depend on them), 1 for a sum. problem: why it is neither; empty if it is one."""

    degree: int = 0
    problem: str = ""


def joined_results(program: Program, larger: Program, *, ratio: float, num_params: int) -> list[JoinedResult]:
    """How to join each result of a function of parameters and inputs. larger: the same function, traced at `ratio` times the rows."""
    flat, twin = flatten(program), flatten(larger)
    try:
        growth = growth_of(flat, twin, ratio=ratio, num_params=num_params)
    except AlignmentError as error:
        return [JoinedResult(problem=f"the program changes with the batch size: {error}")] * len(flat.outvars)
    return [_joined(flat, growth, atom) for atom in flat.outvars]


def _joined(flat: Flat, growth: Growth, atom: Atom) -> JoinedResult:
    extent = growth.of(atom)
    needed = _needed(flat, atom)
    feed = next((feed for feed in growth.feeds if any(var in needed for var in feed.equation.outvars)), None)
    if feed is not None:
        return JoinedResult(problem=f"{feed.source}: a number that is computed from all rows is used for each of them again")
    if extent.problem:
        return JoinedResult(problem=extent.problem)
    if extent.rows or extent.degree not in (0, 1) or not extent.exact:
        made = next((e for e in flat.eqns if any(var is atom for var in e.outvars)), None)
        where = f"{jx.source_of(made)}: " if made is not None and jx.source_of(made) else ""
        return JoinedResult(problem=f"{where}it is a quotient, a product or another function of sums over rows")
    return JoinedResult(degree=extent.degree)


def _needed(flat: Flat, output: Atom) -> set[Var]:
    """The variables that an output is computed from, also those inside of loops and branches."""
    needed = {output} if jx.is_var(output) else set[Var]()
    for equation in reversed(flat.eqns):
        if any(var in needed for var in equation.outvars):
            needed.update(filter(jx.is_var, equation.invars), *(_inside(program) for program in jx.subprograms(equation)))
    return needed


def _inside(program: Program) -> set[Var]:
    equations = jx.body(program).eqns
    inner = (var for equation in equations for part in jx.subprograms(equation) for var in _inside(part))
    return {*(var for equation in equations for var in equation.outvars), *inner}
