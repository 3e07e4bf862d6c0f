"""Causal attention in XLA's operations, against JAX's own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals

from train.models.kernels import XLA

PLAIN = partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")
B, S, N, H = 2, 24, 4, 8


def inputs(dtype, heads=2):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(B, S, N, H), (B, S, heads, H), (B, S, heads, H), (B, S, N, H)]
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


def summed(function, weights, mask):
    return lambda q, k, v: jnp.sum(function(q, k, v, mask=mask).astype(jnp.float32) * weights.astype(jnp.float32))


def masks(kind):
    starts = jnp.where(jnp.arange(S) < 7, 0, 7)[None].repeat(B, 0)
    return None if kind == "join" else starts[:, None, :, None] == starts[:, None, None, :]


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("documents", ["join", "mask"])
def test_values_and_gradients_are_those_of_jax(documents, heads):
    q, k, v, weights = inputs(jnp.float32, heads)
    found, wanted = (
        jax.value_and_grad(summed(function, weights, masks(documents)), argnums=(0, 1, 2))(q, k, v) for function in (XLA.attend, PLAIN)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * np.abs(b).max()), found, wanted)


def test_gradients_in_bf16_are_as_exact_as_those_of_jax():
    q, k, v, weights = inputs(jnp.bfloat16)
    exact = jax.grad(summed(PLAIN, weights, None), argnums=(0, 1, 2))(*(x.astype(jnp.float32) for x in (q, k, v)))
    for gradient, reference in zip(jax.grad(summed(XLA.attend, weights, None), argnums=(0, 1, 2))(q, k, v), exact, strict=True):
        assert np.abs(gradient.astype(jnp.float32) - reference).max() <= 0.01 * np.abs(reference).max()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("documents", ["join", "mask"])
def test_one_array_of_scores_is_kept(documents, dtype):
    q, k, v, weights = inputs(dtype)
    kept = [x for x, _ in saved_residuals(summed(XLA.attend, weights, masks(documents)), q, k, v) if x.shape.count(S) >= 2]
    assert [(x.size, x.dtype) for x in kept] == [(B * N * S * S, dtype)]
