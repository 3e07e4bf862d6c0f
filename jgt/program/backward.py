"""Backward rules of jax.custom_vjp, which JAX keeps as functions: a change of one waits until JAX traces it."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.extend.linear_util as lu

from jgt.program.jaxpr import Equation, Program
from jgt.program.tracing import evaluate


def map_backward(equation: Equation, change: Callable[[Program, list[int | None]], Program]) -> Equation:
    """A call of a jax.custom_vjp function with its backward rule changed; any other equation as it is.

    change(program, which): the program of the rule when it is traced, and for each operand of the call the number of its result, None for
    an operand without gradient.
    """
    rule = equation.params.get("bwd")
    if rule is None:
        return equation

    def changed(*args: jax.Array) -> object:
        results: list[object] = []
        rest: list[object] = []

        def arrays(*args: jax.Array) -> list[jax.Array]:
            made = rule.call_wrapped(*args)
            # jax 0.12 returns the list of results and something more.
            has_more = len(made) == 2 and isinstance(made[0], list)
            results[:], rest[:] = (made[0], made[1:]) if has_more else (made, ())
            return [x for x in results if isinstance(x, jax.Array)]

        program = jax.make_jaxpr(arrays)(*args)
        numbers = iter(range(len(results)))
        which = [next(numbers) if isinstance(x, jax.Array) else None for x in results]
        # The first operands are constants, of which the rule knows nothing.
        which = [None] * (len(equation.invars) - len(which)) + which
        new = iter(evaluate(change(program, which), args))
        found = [next(new) if isinstance(x, jax.Array) else x for x in results]
        return (found, *rest) if rest else found

    return equation.replace(params={**equation.params, "bwd": lu.wrap_init(changed, debug_info=rule.debug_info)})
