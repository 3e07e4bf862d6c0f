"""Which arguments of a program come out of it unchanged."""

import jax
import jax.numpy as jnp
import pytest
from nesting import X

from jgt.program.dataflow import unchanged_arguments
from jgt.program.tracing import trace

# Each: a function that returns its argument, and something else.
KEEPING = {
    "at once": lambda x: (x, x * 2),
    "jit": jax.jit(lambda x: (x, x * 2)),
    "remat": jax.checkpoint(lambda x: (x, jnp.sin(x))),
    "jit in remat": jax.checkpoint(jax.jit(lambda x: (x, jnp.sin(x)))),
    "scan": lambda x: jax.lax.scan(lambda c, _: ((c[0], jnp.sin(c[1])), None), (x, x), None, length=2)[0],
    "cond": lambda x: jax.lax.cond(x > 0, lambda x: (x, x * 2), lambda x: (x, x), x),
    "while": lambda x: jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0], c[1] + 1), (x, x)),
}


@pytest.mark.parametrize("kind", KEEPING)
def test_an_argument_that_comes_out_unchanged_is_known(kind):
    program, _ = trace(lambda a, b: (b, *KEEPING[kind](a), 1.0), X, X)
    assert unchanged_arguments(program) == [1, 0, None, None]
