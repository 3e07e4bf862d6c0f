"""Finds the type in which a program reads each of its arguments, which may be narrower than theirs: the one that it casts to everywhere.

Models keep parameters in f32 and cast them to bf16 for a matmul. Such a parameter may be cast before it travels: the program
computes the same from fewer bytes. That is so only if no equation reads the wide value, which the traced program shows. Its gradient
is another question: where a value is read twice, it is a sum, and in the narrow type the sum would be rounded.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from jgt.program import jaxpr as jx
from jgt.program.equations import is_call, is_remat, is_scan, scan_sizes, subprograms
from jgt.program.jaxpr import Equation, Program, Var

_LAYOUT = frozenset({"reshape", "squeeze", "transpose", "slice", "broadcast_in_dim", "copy"})
"""Primitives of one operand that change where values are, and not the values."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """The read of an argument by a program. dtype: the type that it casts to. once: whether it casts once, so that nothing is added up."""

    dtype: DTypeLike
    once: bool


_Casts = Counter[Any]
"""Counts the casts of a value to each type, and under None its other reads. A loop counts twice."""


def narrow_reads(program: Program) -> list[Read | None]:
    """The read of each argument that is read in one narrower type of float only; None for an argument that is read in another way."""
    inner = jx.body(program)
    return [_narrow(jx.dtype_of(var), casts) for var, casts in zip(inner.invars, _casts(program), strict=True)]


def _narrow(wide: DTypeLike, casts: _Casts) -> Read | None:
    if len(casts) != 1:
        return None
    ((dtype, count),) = casts.items()
    if dtype is None or not (jnp.issubdtype(wide, jnp.floating) and jnp.issubdtype(dtype, jnp.floating)):
        return None
    return Read(dtype=dtype, once=count == 1) if jnp.dtype(dtype).itemsize < jnp.dtype(wide).itemsize else None


def _casts(program: Program) -> list[_Casts]:
    inner = jx.body(program)
    casts = [_Casts() for _ in inner.invars]
    origin: dict[Var, int] = {var: index for index, var in enumerate(inner.invars)}
    for equation in inner.eqns:
        operands = [(place, origin[a]) for place, a in enumerate(equation.invars) if jx.is_var(a) and a in origin]
        if operands and equation.primitive.name in _LAYOUT:
            origin[equation.outvars[0]] = operands[0][1]
        elif operands:
            by_operand = _casts_of(equation)
            for place, index in operands:
                casts[index] += by_operand[place]
    for atom in inner.outvars:
        if jx.is_var(atom) and atom in origin:
            casts[origin[atom]][None] += 1
    return casts


def _casts_of(equation: Equation) -> list[_Casts]:
    """The casts of each operand of an equation."""
    if equation.primitive.name == "convert_element_type":
        return [_Casts([jx.dtype_of(equation.outvars[0])])]
    # A custom derivative has rules besides its program, and nothing shows how these read the operands.
    if not (is_call(equation) or is_remat(equation) or is_scan(equation)):
        return [_Casts([None]) for _ in equation.invars]
    (inner,) = subprograms(equation)
    casts = _casts(inner)
    if is_scan(equation):
        num_constants, num_carry = scan_sizes(equation)
        # Each pass of the loop reads a constant again. A carry is another value in each pass.
        casts[:num_constants] = [one + one for one in casts[:num_constants]]
        casts[num_constants : num_constants + num_carry] = [_Casts([None]) for _ in range(num_carry)]
    return casts
