"""Which results of a function of a batch can be joined from the results of its parts, as in an accumulated step.

A loss that compares the rows of its batch with each other, such as a contrastive one, is another loss on a part: it has fewer rows to
compare with.
"""

from __future__ import annotations

from collections.abc import Iterable

from jgt.pipeline.batch.extent import Extent
from jgt.pipeline.batch.growth import AlignmentError, Growth
from jgt.pipeline.batch.walk import growth_of
from jgt.program import jaxpr as jx
from jgt.program.equations import part_for, subprograms
from jgt.program.jaxpr import Atom, Program, Var
from jgt.program.parts import Flat, flatten
from jgt.program.places import source_of


def joined_results(program: Program, larger: Program, *, ratio: float, num_params: int) -> list[Extent]:
    """The extent of each result of a function of parameters and inputs, with a problem if the parts' results cannot be joined.

    larger: the same function, traced at `ratio` times the rows. A result of degree 0 is a mean over rows or does not depend on them; a
    result of degree 1 is a sum.
    """
    flat, twin = flatten(program), flatten(larger)
    try:
        growth = growth_of(flat, twin, ratio=ratio, num_params=num_params)
    except AlignmentError as error:
        return [Extent(problem=f"the program changes with the batch size: {error}")] * len(flat.outvars)
    return [_joined(flat, growth, atom) for atom in flat.outvars]


def _joined(flat: Flat, growth: Growth, atom: Atom) -> Extent:
    extent = growth.of(atom)
    needed = needed_variables(flat, [atom])
    feed = next((feed for feed in growth.feeds if any(var in needed for var in feed.equation.outvars)), None)
    if feed is not None:
        return Extent(problem=f"{feed.source}: a number that is computed from all rows is used for each of them again")
    if not extent.problem and (extent.rows or extent.degree not in (0, 1) or not extent.exact):
        made = next((e for e in flat.eqns if any(var is atom for var in e.outvars)), None)
        where = f"{source_of(made)}: " if made is not None and source_of(made) else ""
        return Extent(problem=f"{where}it is a quotient, a product or another function of sums over rows")
    return extent


def needed_variables(flat: Flat, outputs: Iterable[Atom]) -> set[Var]:
    """The variables that some outputs are computed from, including the ones inside of loops and branches."""
    needed = set(filter(jx.is_var, outputs))
    for equation in reversed(flat.eqns):
        if own := part_for(equation, needed):
            needed.update(filter(jx.is_var, own.invars), *map(_inside, subprograms(equation)))
    return needed


def _inside(program: Program) -> set[Var]:
    equations = jx.body(program).eqns
    inner = (var for equation in equations for part in subprograms(equation) for var in _inside(part))
    return {*(var for equation in equations for var in equation.outvars), *inner}
