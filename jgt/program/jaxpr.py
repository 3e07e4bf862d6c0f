# pyright: basic
"""Traced programs, as JAX's own classes, and the values in them.

JAX offers no public way to replace a program inside an equation. This file, equations.py, tracing.py and places.py rely on its internals,
and may break with a new version; tests/program has a test for each fact. jax 0.10 has two classes, Jaxpr and ClosedJaxpr, where jax 0.12
has one; `body` and `with_body` hide the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.extend.core as jex
from jax.core import Tracer
from jax.typing import ArrayLike

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Program = jex.Jaxpr | jex.ClosedJaxpr
"""A traced program; jax 0.12 has one class for both."""

Equation = jex.JaxprEqn
Var = jex.Var
Atom = jex.Var | jex.Literal
"""An operand of an equation, or an output of a program."""


def body(program: Program) -> jex.Jaxpr:
    """The part of a program that has eqns, invars and outvars."""
    inner = program.jaxpr if isinstance(program, jex.ClosedJaxpr) and hasattr(program, "jaxpr") else program
    return cast(jex.Jaxpr, inner)


def with_body(program: Program, *, eqns: Sequence[Equation], outvars: Sequence[Atom]) -> Program:
    """The same program with other equations and outputs; the new outputs must have the avals of the old ones."""
    return with_parts(program, eqns=list(eqns), outvars=list(outvars))


def with_parts(program: Program, **parts: Any) -> Program:
    """The same program with these constvars, invars, eqns or outvars in the place of its own."""
    inner = _marked(body(program).replace(**parts))
    return inner if body(program) is program else program.replace(jaxpr=inner)


def _marked(inner: jex.Jaxpr) -> jex.Jaxpr:
    # JAX expands hijax primitives only in programs that say that they have some.
    is_high = inner.is_high or any(e.primitive.is_high(*[a.aval for a in e.invars], **e.params) for e in inner.eqns)
    return inner if is_high == inner.is_high else inner.replace(is_high=is_high)


def constants(program: Program) -> dict[Var, ArrayLike]:
    """The arrays that a program closes over, by variable."""
    return dict(zip(body(program).constvars, getattr(program, "consts", ()), strict=True))


def closes_over_tracers(program: Program) -> bool:
    """Whether a program contains values of a trace around it, which mean nothing after that trace."""
    return any(isinstance(value, Tracer) for value in constants(program).values())


def program_of(like: Program, invars: Sequence[Var], eqns: Sequence[Equation], outvars: Sequence[Atom]) -> Program:
    """A new program made of equations of `like`. It closes over nothing: `invars` must include the constants it reads."""
    inner = body(like)
    # The debug info of `like` names arguments and results that the new program does not have.
    info = inner.debug_info.with_unknown_names()
    inner = _marked(inner.replace(constvars=[], invars=list(invars), eqns=list(eqns), outvars=list(outvars), debug_info=info))
    return inner if body(like) is like else jex.ClosedJaxpr(inner, [])


def with_results(program: Program, which: Sequence[int]) -> Program:
    """The same program with only these of its outputs, by number."""
    inner = body(program)
    return with_parts(program, outvars=[inner.outvars[n] for n in which], debug_info=inner.debug_info.with_unknown_names())


def new_var_like(var: Var) -> Var:
    """A new variable with the aval of another one."""
    return type(var)(var.aval)


def new_var_of(var: Var, shape: Sequence[int]) -> Var:
    """A new variable with the aval of another one, but for its shape."""
    return type(var)(var.aval.update(shape=tuple(shape)))


def shape_of(atom: Atom) -> tuple[int, ...]:
    """The shape of a value; () for one that is not an array."""
    return tuple(getattr(atom.aval, "shape", ()))


def dtype_of(atom: Atom) -> Any:
    """The dtype of an array, which may be the dtype of random keys."""
    return getattr(atom.aval, "dtype", None)


def struct_of(atom: Atom) -> jax.ShapeDtypeStruct:
    """Shape and dtype of an array."""
    return jax.ShapeDtypeStruct(shape_of(atom), dtype_of(atom))


def is_var(atom: Atom) -> TypeIs[Var]:
    """Whether an operand is a variable rather than a literal."""
    return not isinstance(atom, jex.Literal)


def is_dropped(var: Var) -> bool:
    """Whether an equation's result is never used."""
    return isinstance(var, jex.DropVar)


def is_real(atom: Atom) -> bool:
    """Whether a value has floating-point numbers, and so a derivative."""
    return jax.numpy.issubdtype(dtype_of(atom), jax.numpy.floating)


def is_inexact(atom: Atom) -> bool:
    """Whether a value has floating-point or complex numbers."""
    return jax.numpy.issubdtype(dtype_of(atom), jax.numpy.inexact)


def is_integer(atom: Atom) -> bool:
    """Whether a value has integers."""
    return jax.numpy.issubdtype(dtype_of(atom), jax.numpy.integer)


def key_impl(aval: jax.Array | jax.ShapeDtypeStruct) -> str:
    """The generator of a typed random key, as jax.random.wrap_key_data takes it."""
    return getattr(aval.dtype, "_impl").name  # noqa: B009
