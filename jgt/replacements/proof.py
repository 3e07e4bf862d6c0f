"""Proves that an equation of a program is a matmul, rows [..., k] times weights [k, m], and nothing but that.

It may be a dot_general, or a function with a custom derivative. That derivative has to be the usual one, because a ring replaces it: its
trace has one matmul going forward and two going backward, and between them nothing but transpositions. The gradient of the weights may be
summed in a wider type than theirs, which a ring then does too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
from jax.typing import DTypeLike

from jgt.program import jaxpr as jx
from jgt.program.equations import has_custom_derivative, is_call, subprograms
from jgt.program.jaxpr import Atom, Equation, Var
from jgt.program.parts import flatten, inlined
from jgt.program.places import mesh_context
from jgt.program.tracing import evaluate


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """An equation that is rows · weights, and the dot_general in it. sums: the type in which the gradient of the weights is summed."""

    equation: Equation
    rows: Var
    weights: Var
    dot: Equation
    sums: DTypeLike

    @property
    def result(self) -> Var:
        """Its result."""
        return self.equation.outvars[0]


def matmul_of(equation: Equation) -> Matmul | None:
    """The matmul rows [..., k] · weights [k, m] that an equation is; None for any other."""
    proven = _dot_of(equation)
    if proven is None or not all(jx.is_var(a) for a in equation.invars):
        return None
    rows, weights = equation.invars
    assert jx.is_var(rows) and jx.is_var(weights)
    dot, sums = proven
    return Matmul(equation=equation, rows=rows, weights=weights, dot=dot, sums=sums)


def _dot_of(equation: Equation) -> tuple[Equation, DTypeLike] | None:
    """The dot_general that an equation is, and the type in which its derivative sums the gradient of the weights."""
    if len(equation.invars) != 2 or len(equation.outvars) != 1:
        return None
    if equation.primitive.name == "dot_general":
        rank = len(jx.shape_of(equation.invars[0]))
        (left, right), batch = equation.params["dimension_numbers"]
        is_matmul = (tuple(left), tuple(right), *map(tuple, batch)) == ((rank - 1,), (0,), (), ())
        is_matmul &= rank > 1 and len(jx.shape_of(equation.invars[1])) == 2
        return (equation, jx.dtype_of(equation.invars[1])) if is_matmul else None
    if not (is_call(equation) or has_custom_derivative(equation)):
        return None
    inner = jx.body(next(iter(subprograms(equation))))
    if len(inner.eqns) != 1 or list(inner.eqns[0].invars) != list(inner.invars) or list(inner.eqns[0].outvars) != list(inner.outvars):
        return None
    proven = _dot_of(inner.eqns[0])
    if proven is None or is_call(equation):
        return proven
    sums = _sums_of_derivative(equation)
    return None if sums is None else (proven[0], sums)


def _sums_of_derivative(equation: Equation) -> DTypeLike | None:
    """The type in which the derivative that a function brings along sums the gradient of the weights.

    None if that derivative is not made of matmuls alone: one forward, and one for each operand.
    """
    operands = [a for a in equation.invars if jx.is_var(a)]
    run = jx.program_of(next(iter(subprograms(equation))), operands, [equation], equation.outvars)

    def both(rows: jax.Array, weights: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        result, pull = cast(Any, jax.vjp(lambda *x: evaluate(run, x)[0], rows, weights))
        return result, pull(cotangent)

    try:
        with mesh_context(equation):
            traced = jax.make_jaxpr(both)(*[v.aval for v in (*equation.invars, *equation.outvars)])
    except Exception:
        # It is the user's code. A derivative that fails is not the usual one.
        return None
    flat = flatten(traced)
    kinds = [e.primitive.name for e in flat.eqns]
    made: dict[Atom, Equation] = {e.outvars[0]: e for e in flat.eqns}
    casts, last = 0, made.get(flat.outvars[2])
    while last is not None and last.primitive.name != "dot_general":
        casts += last.primitive.name == "convert_element_type"
        last = made.get(last.invars[0])
    is_usual = kinds.count("dot_general") == 3 and set(kinds) <= {"dot_general", "transpose", "convert_element_type"}
    # A cast anywhere else would round something that a ring does not.
    if last is None or not is_usual or casts != kinds.count("convert_element_type"):
        return None
    return jx.dtype_of(last.outvars[0])


def equations_for(run: Callable[..., object], equation: Equation, operands: Sequence[Atom], results: Sequence[Var]) -> list[Equation]:
    """The equations of run(*operands), which make these results in the place of an equation, with its signals and its line of the model."""
    with mesh_context(equation):
        traced = jax.make_jaxpr(run)(*[cast(Any, v.aval) for v in operands])
    return [new.replace(source_info=equation.source_info) for new in inlined(traced, equation, operands, results)]
