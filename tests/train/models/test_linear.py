"""The matmul of the layers, compared with JAX's own in values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.models.linear import Dot


@pytest.mark.parametrize("size_out", [3, 8], ids=["narrower", "wider"])
def test_a_matmul_and_its_gradients_are_those_of_jax(size_out):
    x, kernel = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(2, 5, 6), (6, size_out)]))
    cotangent = jax.random.normal(jax.random.key(2), (2, 5, size_out))
    dims = (((2,), (0,)), ((), ()))
    found, pull = jax.vjp(lambda x, kernel: Dot()(x, kernel, dims), x, kernel)
    expected, pull_expected = jax.vjp(lambda x, kernel: jax.lax.dot_general(x, kernel, dims), x, kernel)
    for a, b in zip((found, *pull(cotangent)), (expected, *pull_expected(cotangent)), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_the_type_is_that_of_the_input():
    x, kernel = jnp.ones((2, 4), jnp.bfloat16), jnp.ones((4, 3), jnp.bfloat16)
    found, pull = jax.vjp(lambda x, kernel: Dot()(x, kernel, (((1,), (0,)), ((), ()))), x, kernel)
    assert {a.dtype for a in (found, *pull(found))} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_wide_gradient_is_the_same_on_one_device(dtype):
    x, kernel, cotangent = (jax.random.normal(jax.random.key(n), shape, dtype) for n, shape in enumerate([(2, 5, 6), (6, 3), (2, 5, 3)]))
    dims = (((2,), (0,)), ((), ()))

    def gradients(dot):
        return jax.vjp(lambda x, kernel: dot(x, kernel, dims), x, kernel)[1](cotangent)

    found, expected = gradients(Dot(has_wide_gradients=True)), gradients(Dot())
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=1e-2 if dtype == jnp.bfloat16 else 1e-6)
