# pyright: basic
"""Functions and their programs: a function is traced to a program, and a program is run as a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax._src.ad_checkpoint import CheckpointName, name_p
from jax._src.interpreters import remat
from jax.typing import ArrayLike

from jgt.program.equations import map_subprograms, params_of
from jgt.program.jaxpr import Equation, Program, body, with_body


def trace(fn: Callable[..., Any], *args: Any) -> tuple[Program, Any]:
    """Traces `fn` at arrays or ShapeDtypeStructs. Returns its program and the tree of its outputs."""
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    return _with_plain_names(program), jax.tree.structure(shapes)


def _with_plain_names(program: Program) -> Program:
    # With jax_remat3, a name is an object. Whatever reads programs knows the primitive of the same meaning.
    if not body(program).is_high:
        return program
    eqns = [map_subprograms(equation, _with_plain_names) for equation in body(program).eqns]
    plain = [e.replace(primitive=name_p, params=params_of(e)) if isinstance(e.params.get("_prim"), CheckpointName) else e for e in eqns]
    return with_body(program, eqns=plain, outvars=body(program).outvars)


def _named(around: Any, x: jax.Array, *, name: str) -> Any:
    return CheckpointName(name, jax.typeof(x)).remat(around, x)


# JAX has this rule for the object alone.
remat.rules[name_p] = _named


def tensor_name(equation: Equation) -> str | None:
    """The name that `signal.tensor` (or checkpoint_name) gave to the result; None for any other equation."""
    return equation.params["name"] if equation.primitive.name == "name" else None


def evaluate(program: Program, args: Sequence[ArrayLike]) -> list[jax.Array]:
    """Runs a program on arrays or tracers, under whatever transformation is active."""
    closed = program if hasattr(program, "consts") else jex.ClosedJaxpr(body(program), [])
    return jex.jaxpr_as_fun(closed)(*args)


def result_of(equation: Equation, *operands: jax.Array, **params: Any) -> jax.Array:
    """The result that an equation of one result has for these operands. params: those that change."""
    return equation.primitive.bind(*operands, **{**equation.params, **params})
