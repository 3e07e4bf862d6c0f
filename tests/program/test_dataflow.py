"""In which type a program reads its arguments."""

import jax
import jax.numpy as jnp
import pytest

from jgt.program import jaxpr as jx
from jgt.program.dataflow import type_read

BF16, F32 = jnp.bfloat16, jnp.float32


@jax.custom_vjp
def own_rule(w):
    return w.astype(BF16)


own_rule.defvjp(lambda w: (w.astype(BF16), w), lambda w, g: (w * g.astype(F32),))


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        (lambda w: w.astype(BF16) @ w.astype(BF16), BF16),
        (lambda w: jax.jit(lambda w: w.astype(BF16))(w) * 2, BF16),
        (lambda w: jax.checkpoint(lambda w: jnp.sin(w.astype(BF16)))(w), BF16),
        (lambda w: w.astype(BF16) * jnp.sum(w), None),
        (lambda w: w.astype(BF16) + w.astype(jnp.float16), None),
        (lambda w: w.astype(jnp.int32), None),
        (lambda w: (w.astype(BF16), w), None),
        (lambda w: jnp.ones(3), None),
        # Its derivative reads all bits.
        (own_rule, None),
    ],
    ids=["cast", "jit", "checkpoint", "also read whole", "two types", "integers", "returned", "unread", "custom derivative"],
)
def test_the_narrower_type_that_an_argument_is_read_in(reads, expected):
    assert type_read(jx.trace(reads, jax.ShapeDtypeStruct((4, 4), F32))[0], 0) == expected


def test_a_wider_type_is_not_a_narrower_one():
    assert type_read(jx.trace(lambda w: w.astype(F32), jax.ShapeDtypeStruct((4,), BF16))[0], 0) is None
