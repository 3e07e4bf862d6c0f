"""The matmul of the layers, compared with JAX's own in values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.models.linear import full_dot


@pytest.mark.parametrize("size_out", [3, 8], ids=["narrower", "wider"])
def test_a_matmul_and_its_gradients_are_those_of_jax(size_out):
    x, kernel = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(2, 5, 6), (6, size_out)]))
    cotangent = jax.random.normal(jax.random.key(2), (2, 5, size_out))
    dims = (((2,), (0,)), ((), ()))
    found, pull = jax.vjp(lambda x, kernel: full_dot(x, kernel, dims), x, kernel)
    expected, pull_expected = jax.vjp(lambda x, kernel: jax.lax.dot_general(x, kernel, dims), x, kernel)
    for a, b in zip((found, *pull(cotangent)), (expected, *pull_expected(cotangent)), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_the_type_is_that_of_the_input():
    x, kernel = jnp.ones((2, 4), jnp.bfloat16), jnp.ones((4, 3), jnp.bfloat16)
    found, pull = jax.vjp(lambda x, kernel: full_dot(x, kernel, (((1,), (0,)), ((), ()))), x, kernel)
    assert {a.dtype for a in (found, *pull(found))} == {jnp.dtype(jnp.bfloat16)}
