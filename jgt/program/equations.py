# pyright: basic
"""Equations, above all those with programs inside: scan, while, cond, jit, checkpoint, shard_map, custom derivatives.

No primitive is taken apart. A program is found in an equation's params by its type and is replaced in place by one with the same
signature, so that no kind of nesting needs its own code. Where a kind must be recognised (is it a scan?), the names of its params decide,
because they change less often than the primitive's name. The params of a hijax primitive are inside an object, which `params_of` and
`with_params` hide.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax.extend.core as jex
import jax.extend.linear_util as lu
from jax._src.interpreters import partial_eval

from jgt.program.jaxpr import Atom, Equation, Program, Var, body, shape_of


def params_of(equation: Equation) -> dict[str, Any]:
    """The params of an equation. A hijax primitive is an object with params of its own, and the only param of its equation."""
    return getattr(equation.params.get("_prim"), "params", equation.params)


def with_params(equation: Equation, **params: Any) -> Equation:
    """The same equation with these of its `params_of` changed."""
    params = {**params_of(equation), **params}
    if (primitive := equation.params.get("_prim")) is None:
        return equation.replace(params=params)
    new = copy.copy(primitive)
    ins, outs = ([atom.aval for atom in atoms] for atoms in (equation.invars, equation.outvars))
    types = {"in_avals_flat": ins, "out_avals_flat": outs, "in_avals": new.in_tree.unflatten(ins), "out_aval": new.out_tree.unflatten(outs)}
    new.__dict__.update(params, params=params, **types)
    return equation.replace(params={**equation.params, "_prim": new})


def param_items(equation: Equation) -> Iterator[object]:
    """Every param of an equation, and in place of a list or tuple its elements."""
    for value in params_of(equation).values():
        # One level is enough: cond, for example, has its branches in a tuple.
        yield from value if isinstance(value, tuple | list) else (value,)


def subprograms(equation: Equation) -> Iterator[Program]:
    """Every program in an equation's params."""
    return (item for item in param_items(equation) if isinstance(item, jex.Jaxpr | jex.ClosedJaxpr))


Around = Callable[[], contextlib.AbstractContextManager[object]]
"""Makes a context for the trace of a rule that is traced when it is needed."""


def map_subprograms(equation: Equation, change: Callable[[Program], Program], around: Around = contextlib.nullcontext) -> Equation:
    """An equation with `change` applied to every program in it; the same object if it returned each program unchanged."""
    old = params_of(equation)
    params = {key: _mapped(value, lambda x: change(x) if isinstance(x, jex.Jaxpr | jex.ClosedJaxpr) else x) for key, value in old.items()}
    if all(params[key] is value for key, value in old.items()):
        return equation
    _map_derivative_rules(params, change, around)
    return with_params(equation, **params)


def map_params(equation: Equation, change: Callable[[Any], Any]) -> Equation:
    """An equation with `change` applied to each of its params, and to each element of one that is a list or tuple."""
    return with_params(equation, **{key: _mapped(value, change) for key, value in params_of(equation).items()})


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if not isinstance(value, tuple | list):
        return change(value)
    new = [_mapped(item, change) for item in value]
    # The same object if nothing changed, which callers rely on; some params are tuples with a constructor of their own.
    return type(value)(new) if any(a is not b for a, b in zip(new, value, strict=True)) else value


def _map_derivative_rules(params: dict[str, Any], change: Callable[[Program], Program], around: Around) -> None:
    # custom_jvp and custom_vjp don't store their derivative as a program: they store a function that returns
    # (jaxpr, consts, ...) when the equation is differentiated. The change has to wait until then.
    for key in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk"):
        if key in params:
            params[key] = lu.wrap_init(_changed_rule(params[key], change, around), debug_info=params[key].debug_info)


def _changed_rule(rule: Any, change: Callable[[Program], Program], around: Around) -> Callable[..., Any]:
    def changed(*zeros: Any) -> Any:
        with around():
            program, *rest = rule.call_wrapped(*zeros)
        return (change(program), *rest)

    return changed


def outer_operands(equation: Equation, program: Program) -> list[Atom | None]:
    """The operand of an equation that each argument of a program inside it receives.

    A program takes all operands (scan, jit, checkpoint, shard_map, custom derivatives) or the last of them (cond, whose
    first operand is the branch index); the params of a while loop and of a linear solve say which operands are whose. None where the ranks
    show that the guess is wrong: an argument has the rank of its operand, or one less if a scan goes over it.
    """
    invars = body(program).invars
    outer = list(equation.invars)
    if "cond_nconsts" in equation.params:
        # The operands of a while loop are the condition's constants, the body's constants, then the carry. Each of its two programs
        # takes its own constants and the carry.
        num_condition, num_body = equation.params["cond_nconsts"], equation.params["body_nconsts"]
        is_condition = program is equation.params["cond_jaxpr"]
        outer = outer[:num_condition] + outer[num_condition + num_body :] if is_condition else outer[num_condition:]
    if "const_lengths" in equation.params:
        # The operands of a linear solve are the constants of each of its programs, then the right-hand sides, which all of them take.
        lengths, programs = equation.params["const_lengths"], equation.params["jaxprs"]
        index = next(n for n, one in enumerate(programs) if one is program)
        outer = outer[sum(lengths[:index]) :][: lengths[index]] + outer[sum(lengths) :]
    outer = outer[-len(invars) :] if invars else []
    if len(outer) < len(invars):
        return [None] * len(invars)
    return [o if _rank(o) - _rank(i) in (0, 1) else None for o, i in zip(outer, invars, strict=True)]


def outer_results(equation: Equation, program: Program) -> list[Var | None]:
    """The result of an equation that each output of a program inside it becomes; None where they don't correspond."""
    outvars = body(program).outvars
    # The condition of a while loop that carries one value has as many outputs as the loop has results.
    if len(outvars) != len(equation.outvars) or program is equation.params.get("cond_jaxpr"):
        return [None] * len(outvars)
    return list(equation.outvars)


def scan_sizes(equation: Equation) -> tuple[int, int]:
    """The numbers of constants and of carried values among the operands of a scan; it goes over the rest."""
    # Ranks decide: jax 0.10 has the params num_consts and num_carry, later versions keep trees instead.
    inner = body(equation.params["jaxpr"])
    num_scanned = sum(_rank(o) > _rank(i) for o, i in zip(equation.invars, inner.invars, strict=True))
    num_carry = sum(_rank(o) == _rank(i) for o, i in zip(equation.outvars, inner.outvars, strict=True))
    return len(inner.invars) - num_scanned - num_carry, num_carry


def _rank(atom: Atom) -> int:
    return len(shape_of(atom))


def is_call(equation: Equation) -> bool:
    """Whether an equation is a jax.jit inside the program, which means the same as its content."""
    return {"jaxpr", "donated_invars", "inline"} <= equation.params.keys()


def is_scan(equation: Equation) -> bool:
    """Whether an equation is a loop of known length, which can be differentiated backward."""
    return {"jaxpr", "length", "reverse"} <= equation.params.keys()


def is_remat(equation: Equation) -> bool:
    """Whether an equation is a jax.checkpoint region."""
    return {"jaxpr", "policy"} <= params_of(equation).keys()


def policy_of(equation: Equation) -> Callable[..., Any] | None:
    """The policy of a jax.checkpoint region; None if it saves nothing, and for any other equation."""
    return params_of(equation)["policy"] if is_remat(equation) else None


def is_recomputed(policy: Callable[..., Any] | None, equation: Equation) -> bool:
    """Whether a policy of jax.checkpoint drops the results of an equation."""
    if policy is None:
        return True
    answer = policy(equation.primitive, *[a.aval for a in equation.invars], **equation.params)
    return partial_eval.ensure_enum(answer) is partial_eval.Recompute


def has_custom_derivative(equation: Equation) -> bool:
    """Whether an equation is a call of a jax.custom_jvp or jax.custom_vjp function."""
    return equation.primitive.name.startswith(("custom_jvp_call", "custom_vjp_call"))


def passes_on(equation: Equation) -> bool:
    """Whether each result of an equation is the operand in its place, unchanged."""
    return equation.primitive.name in ("device_put", "optimization_barrier")


def separate(equation: Equation) -> list[Equation]:
    """The equation as several that need nothing of each other: one for each value that it passes on, otherwise itself."""
    return [part for var in equation.outvars if (part := part_for(equation, {var}))] if passes_on(equation) else [equation]


def part_for(equation: Equation, results: Collection[Var]) -> Equation | None:
    """The equation with only the operands that these of its results depend on; None if it has none of these results."""
    which = [n for n, var in enumerate(equation.outvars) if var in results]
    if not which or not passes_on(equation):
        return equation if which else None
    # Its params have an element for each operand.
    params = {key: tuple(value[n] for n in which) for key, value in equation.params.items()}
    return equation.replace(invars=[equation.invars[n] for n in which], outvars=[equation.outvars[n] for n in which], params=params)
