"""A program taken apart: flattened, marked by what its values depend on, and split into parts that run on their own.

A pipeline has to run some equations of a loss before its loop, some inside and some after. The jaxpr lists them in one
sequence, but wraps many of them in jits, so the equation that belongs to another part may be hidden inside. So a program is
flattened first: each jit is replaced by its equations, with new variables. Then `extract_part` collects, backward from the outputs, the
equations that are needed, and makes a program of them. A part is wired to the others by the variables of the flat program, which
are its keys: two parts fit together if one's outputs are the other's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jgt.program import jaxpr as jx
from jgt.program.equations import is_call, part_for, separate, subprograms
from jgt.program.jaxpr import Atom, Equation, Program, Var
from jgt.program.places import source_of
from jgt.program.tracing import evaluate, trace


@dataclass(frozen=True, kw_only=True)
class Flat:
    """A program as one list of equations, without jits inside; `consts` are the arrays that it closes over."""

    program: Program
    invars: tuple[Var, ...]
    eqns: tuple[Equation, ...]
    outvars: tuple[Atom, ...]
    consts: Mapping[Var, ArrayLike]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some equations of a flat program: a function from the values of `inputs` to the values of `outputs`."""

    inputs: tuple[Var, ...]
    outputs: tuple[Atom, ...]
    program: Program
    consts: tuple[ArrayLike, ...] = field(repr=False, default=())

    def changed(self, change: Callable[[Program], Program]) -> Part:
        """The same part with `change` applied to its program."""
        return replace(self, program=change(self.program))

    def __call__(self, values: Sequence[ArrayLike]) -> list[jax.Array]:
        """The outputs for values of the inputs, in order."""
        return evaluate(self.program, [*values, *self.consts])


def flatten(program: Program, dissolve: Callable[[Equation], bool] = is_call) -> Flat:
    """The program with every equation that `dissolve` selects replaced by the equations inside it. Signals are kept."""
    inner = jx.body(program)
    consts = dict(jx.constants(program))
    rename: dict[Var, Atom] = {}
    eqns = list(_dissolved(inner.eqns, rename, consts, dissolve))
    outvars = tuple(rename.get(a, a) if jx.is_var(a) else a for a in inner.outvars)
    return Flat(program=program, invars=tuple(inner.invars), eqns=tuple(eqns), outvars=outvars, consts=consts)


def _dissolved(
    eqns: Iterable[Equation], rename: dict[Var, Atom], consts: dict[Var, ArrayLike], dissolve: Callable[[Equation], bool]
) -> Iterator[Equation]:
    """The equations without calls. Adds to `rename` what the results of the calls are now, and to `consts` their constants."""
    for equation in eqns:
        invars = [rename.get(a, a) if jx.is_var(a) else a for a in equation.invars]
        outer = equation if invars == list(equation.invars) else equation.replace(invars=invars)
        if not dissolve(equation):
            yield outer
            continue
        (program,) = subprograms(equation)
        inner = jx.body(program)
        # JAX caches traces, so two calls may share one program: each call gets its own variables.
        local: dict[Var, Atom] = dict(zip(inner.invars, invars, strict=True))
        for var, value in jx.constants(program).items():
            new = local[var] = jx.new_var_like(var)
            consts[new] = value
        # The generator is consumed in order: an equation can only be renamed after the ones before it have put their results into
        # `local`.
        yield from _dissolved((_inlined(e, outer, local, {}) for e in inner.eqns), rename, consts, dissolve)
        for out, atom in zip(equation.outvars, inner.outvars, strict=True):
            result = local.get(atom, atom) if jx.is_var(atom) else atom
            # The result may in turn come from a call inside the call.
            rename[out] = rename.get(result, result) if jx.is_var(result) else result


def inlined(program: Program, call: Equation, operands: Sequence[Atom], results: Sequence[Var]) -> list[Equation]:
    """The equations of a program, to be placed beside `call`: they read these operands and make these results."""
    inner = jx.body(program)
    rename: dict[Var, Atom] = dict(zip(inner.invars, operands, strict=True))
    made: dict[Var, Var] = {}
    copied: list[tuple[Atom, Var]] = []
    for atom, result in zip(inner.outvars, results, strict=True):
        # No equation makes a result that is an argument or a literal, and one equation cannot make a value twice.
        if not jx.is_var(atom) or atom in rename or atom in made:
            copied.append((atom, result))
        else:
            made[atom] = result
    eqns = [_inlined(equation, call, rename, made) for equation in inner.eqns]
    return [*eqns, *(_copy(rename.get(a, a) if jx.is_var(a) else a, result, call) for a, result in copied)]


def _copy(atom: Atom, result: Var, call: Equation) -> Equation:
    program, _ = trace(jnp.copy, atom.aval)
    (equation,) = jx.body(program).eqns
    return equation.replace(invars=[atom], outvars=[result], source_info=call.source_info)


def _inlined(equation: Equation, call: Equation, rename: dict[Var, Atom], made: Mapping[Var, Var]) -> Equation:
    """An equation from inside the program of `call`, to be placed beside it, with the call's signals before its own.

    Its results are those in `made`, or else new variables, which are added to `rename`.
    """
    info = equation.source_info if source_of(equation) else call.source_info
    invars = [rename.get(a, a) if jx.is_var(a) else a for a in equation.invars]
    outvars = [var if jx.is_dropped(var) else made.get(var) or jx.new_var_like(var) for var in equation.outvars]
    rename.update(zip(equation.outvars, outvars, strict=True))
    stack = call.source_info.name_stack + equation.source_info.name_stack
    return equation.replace(invars=invars, outvars=outvars, source_info=info.replace(name_stack=stack))


def extract_part(flat: Flat, outputs: Sequence[Atom], known: Collection[Var] = ()) -> Part:
    """The equations that compute `outputs` from the program's arguments and from the variables `known`, however those are computed.

    The part's inputs are the arguments and known variables that it needs, and no others.
    """
    available = {*flat.invars, *known}
    needed = {a for a in outputs if jx.is_var(a)}
    eqns: list[Equation] = []
    for equation in reversed(flat.eqns):
        if own := part_for(equation, {v for v in equation.outvars if v in needed and v not in available}):
            eqns.append(own)
            needed.update(a for a in own.invars if jx.is_var(a))
    # In the order of the program, not of their use, so that equal parts have equal signatures.
    inputs = tuple(v for v in dict.fromkeys([*flat.invars, *known]) if v in needed)
    consts = [v for v in flat.consts if v in needed and v not in available]
    program = jx.program_of(flat.program, [*inputs, *consts], eqns[::-1], outputs)
    return Part(inputs=inputs, outputs=tuple(outputs), program=program, consts=tuple(flat.consts[v] for v in consts))


def dependency_bits(flat: Flat, sources: Mapping[Var, int], equations: Mapping[int, int] | None = None) -> dict[Var, int]:
    """The sources that each variable depends on, as a union of bits.

    sources: the bits of arguments. equations: additional bits of the results of equations, by the equation's index.
    """
    reached = dict(sources)
    for index, equation in enumerate(flat.eqns):
        for part in separate(equation):
            bits = (equations or {}).get(index, 0)
            for atom in part.invars:
                if jx.is_var(atom):
                    bits |= reached.get(atom, 0)
            reached.update(dict.fromkeys(part.outvars, bits))
    return reached
