"""A program taken apart: flattened, marked by what its values depend on, and cut into parts that run on their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jgt import jaxpr as jx
from jgt.jaxpr import Equation, Program, Var


@dataclass(frozen=True, kw_only=True)
class Flat:
    """A program as one list of equations, without jits inside; `consts` are the arrays that it closes over."""

    program: Program
    invars: tuple[Var, ...]
    eqns: tuple[Equation, ...]
    outvars: tuple[Any, ...]
    consts: Mapping[Var, Any]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some equations of a program: values of `inputs` in, values of `outputs` out."""

    inputs: tuple[Var, ...]
    outputs: tuple[Any, ...]
    program: Program
    consts: tuple[Any, ...] = field(repr=False, default=())

    def changed(self, change: Callable[[Program], Program]) -> Part:
        """The same part with its program rewritten."""
        return Part(inputs=self.inputs, outputs=self.outputs, program=change(self.program), consts=self.consts)

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """The outputs for values of the inputs, in order."""
        return jx.evaluate(self.program, [*values, *self.consts])

    def run(self, known: Mapping[Var, Any]) -> dict[Var, Any]:
        """The outputs by variable, from known values by variable."""
        found = self([known[var] for var in self.inputs])
        return {var: value for var, value in zip(self.outputs, found, strict=True) if jx.is_var(var)}


def flatten(program: Program, dissolve: Callable[[Equation], bool] = jx.is_call) -> Flat:
    """The program with every call dissolved into the equations it stands for; names of signals stay."""
    inner = jx.body(program)
    consts = dict(jx.constants(program))
    rename: dict[Var, Any] = {}
    eqns = list(_dissolved(inner.eqns, rename, consts, dissolve))
    outvars = tuple(rename.get(a, a) if jx.is_var(a) else a for a in inner.outvars)
    return Flat(program=program, invars=tuple(inner.invars), eqns=tuple(eqns), outvars=outvars, consts=consts)


def _dissolved(
    eqns: Iterable[Equation], rename: dict[Var, Any], consts: dict[Var, Any], dissolve: Callable[[Equation], bool]
) -> Iterable[Equation]:
    for equation in eqns:
        invars = [rename.get(a, a) if jx.is_var(a) else a for a in equation.invars]
        outer = equation if invars == list(equation.invars) else equation.replace(invars=invars)
        if not dissolve(equation):
            yield outer
            continue
        (program,) = jx.subprograms(equation)
        inner = jx.body(program)
        # A program may be called twice: each call gets variables of its own.
        local: dict[Var, Any] = dict(zip(inner.invars, invars, strict=True))
        for var, value in jx.constants(program).items():
            local[var] = jx.fresh(var)
            consts[local[var]] = value
        yield from _dissolved((_moved(e, outer, local) for e in inner.eqns), rename, consts, dissolve)
        for out, atom in zip(equation.outvars, inner.outvars, strict=True):
            found = local.get(atom, atom) if jx.is_var(atom) else atom
            rename[out] = rename.get(found, found) if jx.is_var(found) else found


def _moved(equation: Equation, into: Equation, local: dict[Var, Any]) -> Equation:
    outvars = []
    for var in equation.outvars:
        new = var if jx.is_dropped(var) else jx.fresh(var)
        local[var] = new
        outvars.append(new)
    return jx.moved(equation, into, local, outvars)


def cut(flat: Flat, outputs: Sequence[Any], given: Collection[Var] = ()) -> Part:
    """The equations that compute `outputs` from the program's arguments and from `given`, wherever they come from.

    The part's inputs are those of them that are needed.
    """
    known = {*flat.invars, *given}
    needed = {a for a in outputs if jx.is_var(a)}
    kept: list[Equation] = []
    for equation in reversed(flat.eqns):
        made = [v for v in equation.outvars if v in needed and v not in known]
        if made:
            kept.append(equation)
            needed.update(a for a in equation.invars if jx.is_var(a))
    inputs = tuple(v for v in dict.fromkeys([*flat.invars, *given]) if v in needed)
    consts = [v for v in flat.consts if v in needed and v not in known]
    program = jx.program_of(flat.program, [*inputs, *consts], kept[::-1], outputs)
    return Part(inputs=inputs, outputs=tuple(outputs), program=program, consts=tuple(flat.consts[v] for v in consts))


def marks(flat: Flat, marked: Mapping[Var, int], also: Mapping[int, int] | None = None) -> dict[Var, int]:
    """What each variable depends on, as bits: those of the `marked` arguments, and of equations by index in `also`."""
    found = dict(marked)
    for index, equation in enumerate(flat.eqns):
        bits = (also or {}).get(index, 0)
        for atom in equation.invars:
            if jx.is_var(atom):
                bits |= found.get(atom, 0)
        for var in equation.outvars:
            found[var] = bits
    return found
