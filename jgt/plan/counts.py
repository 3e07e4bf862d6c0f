"""How often each computation of a compiled program runs in a step."""

from __future__ import annotations

from fractions import Fraction

from jgt.plan.hlo import Instruction, Module
from jgt.scopes import branch_share


def times(module: Module) -> dict[str, Fraction]:
    """Once where a computation is called, trips times in a loop, and of a branch the share of the visits that take it.

    A loop of unknown length counts as run once, and a branch of which nothing is known as always taken.
    """
    found: dict[str, Fraction] = {module.entry: Fraction(1)}

    def of(name: str) -> Fraction:
        if name not in found:
            found[name] = Fraction(0)
            found[name] = sum((of(at) * _repeats(module, caller, name) for at, caller in module.callers.get(name, ())), Fraction(0))
        return found[name]

    for name in module.computations:
        of(name)
    return found


def taken(module: Module, branch: str) -> Fraction:
    """The share of the visits that take a branch, as the names in it tell."""
    return branch_share(i.op_name for i in module.computations[branch].instructions.values())


def _repeats(module: Module, caller: Instruction, called: str) -> Fraction:
    if caller.op == "while":
        trips = 1 if caller.trips is None else caller.trips
        return Fraction(trips + (caller.attribute("condition") == called))
    return taken(module, called) if caller.op == "conditional" else Fraction(1)
