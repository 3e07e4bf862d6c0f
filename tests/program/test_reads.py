"""The type in which a program reads an argument, and whether once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgt.program.reads import Read, narrow_reads
from jgt.program.tracing import trace

BF16 = jnp.dtype(jnp.bfloat16)
ONCE, MORE = Read(dtype=BF16, once=True), Read(dtype=BF16, once=False)


def low(x):
    return x.astype(jnp.bfloat16)


def scanned(w):
    return jax.lax.scan(lambda x, one: (jnp.tanh(x @ low(one)), None), jnp.ones((2, 3), jnp.bfloat16), w)[0]


CASES = {
    "a cast": (lambda w: low(w[0]) @ low(jnp.ones((3, 3))), ONCE),
    "a cast of a part, turned": (lambda w: low(w[1:].reshape(3, 3).T) * 2, ONCE),
    "in a call": (lambda w: jax.jit(lambda w: low(w) * 2)(w), ONCE),
    "in a region that is recomputed": (lambda w: jax.checkpoint(lambda w: low(w) * 2)(w), ONCE),
    "by layers": (scanned, ONCE),
    "by layers that are recomputed": (
        lambda w: jax.lax.scan(jax.checkpoint(lambda x, one: (x @ low(one), None)), jnp.ones((2, 3), jnp.bfloat16), w)[0],
        ONCE,
    ),
    "twice": (lambda w: low(w) * low(w), MORE),
    "in each pass of a loop": (lambda w: jax.lax.fori_loop(0, 3, lambda _, x: x + low(w[0]), jnp.zeros((3, 3), jnp.bfloat16)), MORE),
    "as it is": (lambda w: w * 2, None),
    "as it is, too": (lambda w: (low(w), jnp.sum(w)), None),
    "in two types": (lambda w: (low(w), w.astype(jnp.float16)), None),
    "returned": (lambda w: w, None),
    "never": (lambda w: jnp.ones(3), None),
    "cast to integers": (lambda w: w.astype(jnp.int8), None),
    "as what a loop carries": (lambda w: jax.lax.fori_loop(0, 3, lambda _, w: w * 2, w).astype(jnp.bfloat16), None),
    "in a custom derivative": (lambda w: jax.nn.relu(w), None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_type_that_an_argument_is_read_in(name):
    fn, expected = CASES[name]
    program, _ = trace(fn, np.ones((2, 3, 3), np.float32))
    assert narrow_reads(program) == [expected]
