"""Additions to a program: sharding constraints on values and their cotangents, and checkpoints around a program.

A constraint in JAX pins a value, and by transposition its cotangent, to one sharding. Rules may ask for different shardings
forward and backward, for which JAX has no primitive; a custom_vjp of the identity provides it. Both exist in two forms:
`constrain` for a value that is being traced, `constraint_equations` for a variable of a program that is being rewritten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from typing import cast

import jax
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from jgt.document import InputError
from jgt.program import jaxpr as jx
from jgt.program.dims import Dims, sharding_dims
from jgt.program.equations import has_custom_derivative, is_call, is_recomputed, is_remat, params_of, policy_of, subprograms, with_params
from jgt.program.jaxpr import Equation, Program, Var
from jgt.program.places import manual_mesh, placed_like, trace_context
from jgt.program.scopes import RULE, rule
from jgt.program.tracing import evaluate


def constrain(x: jax.Array, forward: NamedSharding | None, backward: NamedSharding) -> jax.Array:
    """A value with the sharding `forward` (None: left to the partitioner), whose cotangent gets the sharding `backward`."""
    if forward == backward:
        return _constrained(x, backward)

    def constrained_forward(x: jax.Array) -> jax.Array:
        return x if forward is None else _constrained(x, forward)

    def with_residuals(x: jax.Array) -> tuple[jax.Array, None]:
        return constrained_forward(x), None

    def constrained_backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
        return (_constrained(cotangent, backward),)

    # The identity has two rules here, so jax.jvp through it is an error: a documented limit of `backward:`.
    identity = cast("jax.custom_vjp[jax.Array]", jax.custom_vjp(constrained_forward))
    identity.defvjp(with_residuals, constrained_backward)
    return identity(x)


def _constrained(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    with rule():
        return jax.lax.with_sharding_constraint(x, sharding)


def constraint_equations(
    var: Var, forward: NamedSharding | None, backward: NamedSharding, like: Equation | None
) -> tuple[list[Equation], Var]:
    """Equations that constrain a variable and its cotangent as `constrain` does, and the constrained variable.

    like: an equation whose place the new ones share: the same signals and, inside a shard_map, the same mesh context.
    """
    if forward != backward:
        # The result of a custom_vjp is used as it is traced, so its trace needs the exact aval.
        return traced_equations(lambda x: constrain(x, forward, backward), var, like)
    # The traced result has lost the weak type and the varying axes of `var`, and a scan around would not accept it as a
    # carry any more. So only the equation is used, with a result that has the aval of `var`.
    new = jx.new_var_like(var)
    with _context_of(like):
        plain = _traced_equation(jx.shape_of(var), jx.dtype_of(var), backward, trace_context())
    return [_placed_like(plain.replace(invars=[var], outvars=[new]), like)], new


def traced_equations(fn: Callable[[jax.Array], jax.Array], var: Var, like: Equation | None) -> tuple[list[Equation], Var]:
    """The equations of a function of a variable, and the variable of its result. like: as above."""
    with _context_of(like):
        inner = jx.body(jax.make_jaxpr(fn)(var.aval))
    (invar,), (out,) = inner.invars, inner.outvars
    assert jx.is_var(out)
    eqns = [e.replace(invars=[var if a is invar else a for a in e.invars]) for e in inner.eqns]
    return [_placed_like(e, like) for e in eqns], out


def _context_of(like: Equation | None) -> contextlib.AbstractContextManager[object]:
    # JAX records the mesh context in each equation while it traces. A constraint inside a shard_map needs the context of its
    # neighbours, in which the manual axes are manual.
    return contextlib.nullcontext() if like is None or manual_mesh(like) is None else like.ctx.manager


# Unrolled layers repeat few shapes many times, and a trace for each of their constraints would take as long as the model's own.
@lru_cache(maxsize=4096)
def _traced_equation(shape: tuple[int, ...], dtype: DTypeLike, sharding: NamedSharding, around: Hashable) -> Equation:
    return jx.body(jax.make_jaxpr(partial(_constrained, sharding=sharding))(jax.ShapeDtypeStruct(shape, dtype))).eqns[0]


def _placed_like(equation: Equation, like: Equation | None) -> Equation:
    # The name stack is part of the source info. It gives the constraint the signal of its value, so that a plan attributes the
    # collectives that it causes.
    return equation if like is None else placed_like(equation, like, RULE)


def pinned_dims(program: Program, result: int) -> Dims | None:
    """The axes of each dim of a program's result, if the equation that makes it is a constraint, perhaps inside a call or a checkpoint."""
    inner = jx.body(program)
    atom = inner.outvars[result]
    equation = next((e for e in inner.eqns if any(v is atom for v in e.outvars)), None)
    if equation is None or not jx.is_var(atom):
        return None
    if isinstance(sharding := equation.params.get("sharding"), NamedSharding):
        return sharding_dims(sharding, len(jx.shape_of(atom)))
    if not (is_call(equation) or is_remat(equation) or has_custom_derivative(equation)):
        return None
    position = list(equation.outvars).index(atom)
    parts = [part for part in subprograms(equation) if len(jx.body(part).outvars) == len(equation.outvars)]
    return pinned_dims(parts[0], position) if parts else None


def wrap_in_checkpoint(program: Program, policy: Callable[..., bool] | None, *, in_scan: bool) -> Program:
    """The same program inside jax.checkpoint with this policy; None: everything is computed again.

    in_scan: whether it is the body of a scan, where XLA cannot merge the recomputation with the forward pass anyway and
    JAX advises prevent_cse=False.
    """

    def run(*args: jax.Array) -> list[jax.Array]:
        return evaluate(program, args)

    remat = jax.checkpoint(run, policy=policy, prevent_cse=not in_scan)  # pyright: ignore[reportUnknownVariableType]
    inside = jax.make_jaxpr(remat)(*[v.aval for v in jx.body(program).invars])
    _check(jx.body(inside).eqns[0])
    return inside


def with_policy(equation: Equation, policy: Callable[..., object]) -> Equation:
    """A region with another policy. Raises InputError if this JAX would ignore it."""
    new = with_params(equation, policy=policy)
    _check(new)
    return new


def _check(equation: Equation) -> None:
    if ignores_policy(equation):
        problem = f"jax_remat3 of jax {jax.__version__} computes everything again, also what a rule or a setting keeps"
        raise InputError([f"environment: {problem}. Set JAX_REMAT3=0, or use a newer jax"])


def ignores_policy(equation: Equation) -> bool:
    """Whether JAX does not ask the policy of a jax.checkpoint region about something that the policy would keep."""

    def keeps(program: Program) -> bool:
        return any(not is_recomputed(policy, e) or any(map(keeps, subprograms(e))) for e in jx.body(program).eqns)

    # jax 0.10 knows some classes of policies with jax_remat3, and no other function.
    policy, params = policy_of(equation), params_of(equation)
    return policy is not None and "prevent_cse" not in params and keeps(params["jaxpr"])
