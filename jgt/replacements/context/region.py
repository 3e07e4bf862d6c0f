"""The equations of a program between the named tensors q, k, v and heads, and the program with other equations in their place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from jgt.program import jaxpr as jx
from jgt.program.jaxpr import Equation, Program, Var
from jgt.replacements.context.proof import Attention


@dataclass(frozen=True, kw_only=True)
class Region:
    """The equations between four named tensors.

    replaced: the identities of those that depend on q, k or v. operands: q, k, v and what else the equations read. reader: an equation
    outside that reads a value of the replaced ones.
    """

    eqns: tuple[Equation, ...]
    replaced: frozenset[int]
    operands: tuple[Var, ...]
    result: Var
    reader: Equation | None

    @property
    def rows(self) -> tuple[Var, ...]:
        """q, k and v."""
        return self.operands[:3]


def region_between(program: Program, named: Sequence[Equation]) -> Region:
    """The equations that make the last of four named tensors from the first three, and those that only they need."""
    eqns = jx.body(program).eqns
    made = {var: equation for equation in eqns for var in equation.outvars}
    rows, result = [one.outvars[0] for one in named[:3]], named[3].invars[0]
    assert jx.is_var(result)
    needed: set[Var] = {result}
    inner: list[Equation] = []
    for equation in reversed(eqns):
        if any(var in needed and var not in rows for var in equation.outvars):
            inner.append(equation)
            needed.update(a for a in equation.invars if jx.is_var(a))
    inside = inner[::-1]
    # What depends on q, k or v is replaced; what doesn't may be read elsewhere, too.
    depends, replaced = set(rows), set[int]()
    for equation in inside:
        if _reads(equation, depends):
            depends.update(equation.outvars)
            replaced.add(id(equation))
    hidden = depends - {*rows, result}
    reader = next((e for e in eqns if id(e) not in replaced and _reads(e, hidden)), None)
    read = dict.fromkeys(a for e in inside for a in e.invars if jx.is_var(a))
    operands = [var for var in read if var not in made and var not in rows]
    return Region(eqns=tuple(inside), replaced=frozenset(replaced), operands=(*rows, *operands), result=result, reader=reader)


def _reads(equation: Equation, variables: Collection[Var]) -> bool:
    return any(jx.is_var(a) and a in variables for a in equation.invars)


def made_inside(program: Program, attention: Attention) -> list[Equation]:
    """The equations from inside of calls, such as jits, that make operands of the attention."""
    source, found = attention.pairs.source, dict[int, Equation]()
    outside = {var for equation in jx.body(program).eqns for var in equation.outvars}

    def add(var: Var) -> None:
        equation = source.made.get(var)
        if equation is None or var in outside or id(equation) in found:
            return
        for a in equation.invars:
            if jx.is_var(a):
                add(a)
        found[id(equation)] = equation

    for var in attention.operands:
        add(var)
    return list(found.values())


def replaced_by(program: Program, region: Region, new: Sequence[Equation]) -> Program:
    """The program with new equations where the last ones of the region stood."""
    eqns: list[Equation] = []
    for equation in jx.body(program).eqns:
        if equation is region.eqns[-1]:
            eqns += new
        elif id(equation) not in region.replaced:
            eqns.append(equation)
    return jx.with_body(program, eqns=eqns, outvars=jx.body(program).outvars)
