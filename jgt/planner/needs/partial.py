"""Partial sums: what a matmul over a sharded dim leaves on each device, until something needs the whole.

XLA adds two partial sums over the same axes first, a cast or a reshape leaves them partial, and a constraint that splits the result makes
the sum a reduce-scatter. They are followed within one program only, because XLA reduces them before they leave a loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from jgt.planner.needs.equations import Backend, MeshAxes
from jgt.program import jaxpr as jx
from jgt.program.dims import num_parts, sharding_dims
from jgt.program.jaxpr import Equation, Var

_ADDS = ("add", "add_any")
_KEEPS_PARTIAL = ("convert_element_type", "transpose", "reshape", "squeeze", "sharding_constraint", "name", "copy")
"""A partial sum stays one through these; anything else needs the whole sum."""


@dataclass
class PartialSum:
    """Sums that devices along `axes` hold in parts, `num_bytes` on each device in a step.

    is_again: whether it is computed in the recompute. is_split: whether a constraint splits the sum over its own axes, as sequence
    parallelism does.
    """

    signal: str
    axes: MeshAxes
    num_bytes: Fraction
    is_again: bool = False
    is_split: bool = False


Sums = dict[Var, tuple[PartialSum, bool]]
"""The partial sum in a variable, and whether nothing else was added to it."""


def carry(equation: Equation, sums: Sums, partial_sums: list[PartialSum], *, adds_first: bool) -> None:
    """Follows a partial sum through an equation that leaves it partial, and marks one that a constraint splits.

    partial_sums: all of the program. adds_first: whether XLA adds two partial sums before it reduces them.
    """
    kind, operands = equation.primitive.name, [sums[a] for a in equation.invars if jx.is_var(a) and a in sums]
    if not operands or kind not in (*_ADDS, *_KEEPS_PARTIAL):
        return
    (first, is_alone), out = operands[0], equation.outvars[0]
    if kind in _ADDS:
        is_alone = len(operands) == 2 and all(alone and partial.axes == first.axes for partial, alone in operands)
        second = operands[-1][0]
        # Equal sums count the same, so it does not matter which of them is taken off the list.
        if is_alone and adds_first and second is not first and second in partial_sums:
            partial_sums.remove(second)
    elif kind == "sharding_constraint":
        dims = sharding_dims(equation.params["sharding"], len(jx.shape_of(out)))
        first.is_split |= any(axis in first.axes for axes in dims for axis in axes)
        if not is_alone:
            return
    sums[out] = first, is_alone


def partial_bytes(partial: PartialSum, mesh: Mapping[str, int], backend: Backend) -> Fraction:
    """Tensor parallelism: an all-reduce is a reduce-scatter and an all-gather. A sum that stays split is gathered later, by its reader."""
    n, passes = num_parts(partial.axes, mesh), 2
    if partial.is_split:
        # On a CPU the whole all-reduce runs. The recompute's gathers are counted one by one.
        passes = (1 if backend.is_gpu else 2) + (not partial.is_again)
    return partial.num_bytes * Fraction(passes * (n - 1), n)
