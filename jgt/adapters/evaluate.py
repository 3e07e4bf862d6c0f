"""Runs a traced program on matrices with low-rank updates, so that a model needs no line about adapters.

The equations run one after another, as JAX's own evaluation does, under their own signals and lines. An equation that reads no adapted
matrix runs as it is. Programs inside are entered: calls, scans, checkpoints, branches, and the function of experts. A matmul of an adapted
matrix adds the update. Everything else is refused with its line, because it would silently mean the matrix alone.

The result is a trace of an ordinary function of more parameters. Rules, pipelines and plans need not know how it came about. The matrix is
no longer differentiated if nothing asks for its gradient, so the backward pass leaves out the matmul of that gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax

from jgt.adapters.adapted import Adapted, UnsupportedError
from jgt.document import InputError
from jgt.program import jaxpr as jx
from jgt.program.equations import is_call, is_remat, is_scan, params_of, scan_sizes
from jgt.program.jaxpr import Equation, Program, Var
from jgt.program.places import in_place_of, line_here, results_of
from jgt.program.tracing import trace
from jgt.replacements.experts.call import ExpertCall, experts
from jgt.replacements.experts.experts import call_of

_Value = jax.Array | Adapted


def run_adapted(program: Program, args: Sequence[_Value]) -> list[Any]:
    """The results of a program, of whose arguments some are `Adapted`. Raises InputError for an equation that such a matrix cannot pass."""
    values: dict[Var, Any] = {**jx.constants(program), **dict(zip(jx.body(program).invars, args, strict=True))}

    def value(atom: jx.Atom) -> Any:
        return values[atom] if jx.is_var(atom) else atom.val

    for equation in jx.body(program).eqns:
        operands = [value(atom) for atom in equation.invars]
        if any(isinstance(x, Adapted) for x in operands):
            with in_place_of(equation):
                results = _adapted(equation, operands)
        else:
            results = results_of(equation, operands)
        values.update(zip(equation.outvars, results, strict=True))
    return [value(atom) for atom in jx.body(program).outvars]


def _adapted(equation: Equation, operands: Sequence[_Value]) -> Sequence[_Value]:
    """The results of an equation that reads adapted matrices."""
    entered = _entry(equation)
    if entered is not None:
        return entered(equation, operands)
    matrices = [x for x in operands if isinstance(x, Adapted)]
    name = equation.primitive.name
    try:
        if len(matrices) == 1 and name == "dot_general":
            return [matrices[0].multiplied(equation, operands)]
        if len(matrices) == 1 and name == "ragged_dot_general" and operands[1] is matrices[0]:
            return [matrices[0].multiplied_by_group(equation, operands)]
        if len(matrices) == 1 and operands[0] is matrices[0]:
            return matrices[0].passed(equation, operands[1:])
        raise UnsupportedError(f"is read by {name}")
    except UnsupportedError as error:
        plain = [_refused(x, str(error)) if isinstance(x, Adapted) else x for x in operands]
        return results_of(equation, plain)


def _refused(matrix: Adapted, why: str) -> jax.Array:
    """The matrix alone, where only the roles of its dims are asked for. Otherwise raises InputError."""
    line = line_here()
    problem = f"{why}{f' ({line})' if line else ''}"
    if matrix.roles is None:
        raise InputError([f"{matrix.path}: the parameter {problem}, but only matmuls can be adapted"])
    matrix.roles.problem = matrix.roles.problem or problem
    return matrix.matrix.array


def _entry(equation: Equation) -> Callable[[Equation, Sequence[_Value]], Sequence[_Value]] | None:
    """How the programs inside an equation are run; None for an equation that is not entered."""
    if is_call(equation):
        return lambda equation, operands: run_adapted(equation.params["jaxpr"], operands)
    if is_remat(equation):
        return _checkpoint
    if is_scan(equation):
        return _scan
    if "branches" in equation.params:
        return _branches
    return _experts if isinstance(call_of(equation), ExpertCall) else None


def _checkpoint(equation: Equation, operands: Sequence[_Value]) -> Sequence[_Value]:
    params = params_of(equation)

    def body(*operands: _Value) -> list[_Value]:
        return run_adapted(params["jaxpr"], operands)

    return jax.checkpoint(body, policy=params["policy"], prevent_cse=params.get("prevent_cse", True))(*operands)  # pyright: ignore


def _scan(equation: Equation, operands: Sequence[_Value]) -> Sequence[_Value]:
    num_consts, num_carry = scan_sizes(equation)
    first, program = num_consts + num_carry, equation.params["jaxpr"]
    carried = [_plain(x, "is carried by a scan") for x in operands[num_consts:first]]
    scanned = [_or_refused(x) for x in operands[first:]]

    def body(carry: Sequence[_Value], xs: Sequence[_Value]) -> tuple[list[jax.Array], list[jax.Array]]:
        xs = [x.in_turn() if isinstance(x, Adapted) else x for x in xs]
        results = [_plain(x, "is a result of a scan") for x in run_adapted(program, [*operands[:num_consts], *carry, *xs])]
        return results[:num_carry], results[num_carry:]

    params = {name: equation.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(body, carried, scanned, **params)
    return [*carry, *ys]


def _branches(equation: Equation, operands: Sequence[_Value]) -> Sequence[_Value]:
    def branch(program: Program) -> Callable[..., list[jax.Array]]:
        return lambda *operands: [_plain(x, "is a result of a branch") for x in run_adapted(program, operands)]

    index, *rest = operands
    return cast("list[jax.Array]", jax.lax.switch(index, [branch(program) for program in equation.params["branches"]], *rest))


def _experts(equation: Equation, operands: Sequence[Any]) -> Sequence[_Value]:
    call = call_of(equation)
    assert call is not None
    *leaves, x, choice, scale = operands

    def of_experts(rows: jax.Array, sizes: jax.Array, leaves: Sequence[Any]) -> jax.Array:
        like = [leaf.matrix.struct if isinstance(leaf, Adapted) else leaf for leaf in leaves]
        program, _ = trace(lambda *leaves: call.fn(rows, sizes, jax.tree.unflatten(call.tree, leaves)), *like)
        return run_adapted(program, leaves)[0]

    return [experts(of_experts, list(leaves), x, choice, scale)]


def _or_refused(x: Any) -> _Value:
    try:
        return x.scanned() if isinstance(x, Adapted) else x
    except UnsupportedError as error:
        return _refused(x, str(error))


def _plain(x: _Value, why: str) -> jax.Array:
    return _refused(x, why) if isinstance(x, Adapted) else x
