"""Sums of which devices hold parts, followed through a program until something needs the whole.

A matmul that contracts a sharded dim leaves a partial sum on each device. XLA does not add it up at once. It adds two partial sums over the
same axes first, a cast or a reshape leaves them partial, and a constraint that splits the result makes the sum a reduce-scatter.

Invariant: partial sums are followed within one program only, because XLA reduces them before they leave a loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from jgt.program import jaxpr as jx
from jgt.program.dims import sharding_dims
from jgt.program.jaxpr import Equation, Var

_KEEPS_PARTIAL = ("convert_element_type", "transpose", "reshape", "squeeze", "sharding_constraint", "name", "copy")
"""A partial sum stays one through these; anything else needs the whole sum."""


@dataclass
class PartialSum:
    """Sums that devices along `axes` hold in parts, `num_bytes` on each device in a step.

    is_again: computed in the recompute. is_split: a constraint splits the sum over its own axes, as sequence parallelism does.
    """

    signal: str
    axes: tuple[str, ...]
    num_bytes: Fraction
    is_again: bool = False
    is_split: bool = False


@dataclass
class PartialSums:
    """The partial sums of one program, equation by equation.

    found: those of the whole walk, over all programs. adds_first: XLA adds partial sums to each other and reduces the result.
    """

    found: list[PartialSum]
    adds_first: bool
    _pending: dict[Var, PartialSum] = field(default_factory=dict[Var, PartialSum])
    # Sums of a partial one with other values.
    _added: dict[Var, PartialSum] = field(default_factory=dict[Var, PartialSum])

    def start(self, out: Var, partial: PartialSum) -> None:
        """An array that holds parts of a sum."""
        self._pending[out] = partial
        self.found.append(partial)

    def carry(self, equation: Equation) -> bool:
        """Whether an equation takes partial sums and leaves them partial: additions of two of them, and changes of shape or type."""
        kind, operands = equation.primitive.name, [a for a in equation.invars if jx.is_var(a)]
        if kind in ("add", "add_any") and len(operands) == 2 and all(a in self._pending for a in operands):
            first, second = (self._pending[a] for a in operands)
            if first.axes == second.axes:
                # Equal sums count the same, so it does not matter which of them is taken off the list.
                if self.adds_first and second is not first and second in self.found:
                    self.found.remove(second)
                self._pending[equation.outvars[0]] = first
            return True
        if kind in _KEEPS_PARTIAL and operands and operands[0] in self._pending:
            self._pending[equation.outvars[0]] = self._pending[operands[0]]
            return True
        return False

    def split(self, equation: Equation) -> None:
        """Marks the partial sum that a constraint splits, if nothing but additions come before."""
        kind = equation.primitive.name
        sums = [self._pending.get(a, self._added.get(a)) for a in equation.invars if jx.is_var(a)]
        partial = next((one for one in sums if one is not None), None)
        if partial is not None and kind == "sharding_constraint":
            dims = sharding_dims(equation.params["sharding"], len(jx.shape_of(equation.outvars[0])))
            partial.is_split |= any(axis in partial.axes for axes in dims for axis in axes)
        elif partial is not None and kind in ("add", "add_any", *_KEEPS_PARTIAL):
            self._added[equation.outvars[0]] = partial
