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


def with_a_column(q, k, v, sinks, is_seen):
    """Attention with the scores of sinks in a column of their own, as papers write it."""
    k, v = (jnp.repeat(x, N // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.where(is_seen, jnp.einsum("bqnh,bsnh->bnqs", q, k) / np.sqrt(H), -1e30)
    column = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("bnqs,bsnh->bqnh", weights, v)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize(("documents", "window"), [("join", None), ("mask", None), ("join", 5)])
def test_a_sink_is_one_more_score(documents, window, heads):
    (q, k, v, weights), mask = inputs(jnp.float32, heads), masks(documents)
    # Above all scores, among them, far below, and equal to none at all.
    sinks = jnp.array([30.0, 0.5, -2.0, -200.0])
    order = jnp.arange(S)[:, None] - jnp.arange(S)[None, :]
    is_seen = ((order >= 0) & (order < (window or S)))[None, None]
    is_seen = is_seen if mask is None else is_seen & mask
    options = {} if window is None else {"window": window}
    found, wanted = (
        jax.value_and_grad(lambda *x, run=run: jnp.sum(run(*x) * weights), argnums=(0, 1, 2, 3))(q, k, v, sinks)
        for run in (
            lambda q, k, v, sinks: XLA.attend(q, k, v, mask=mask, sinks=sinks, **options),
            lambda q, k, v, sinks: with_a_column(q, k, v, sinks, is_seen),
        )
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=3e-6 * np.abs(b).max()), found, wanted)
    assert np.all(np.abs(found[1][3][:3]) > 0)


def test_gradients_of_sinks_in_bf16_are_near_those_in_f32():
    q, k, v, weights = inputs(jnp.bfloat16)

    def summed(sinks, *x):
        return jnp.sum(XLA.attend(*x, sinks=sinks).astype(jnp.float32) * weights.astype(jnp.float32))

    # A share of e^-9 is lost in 1 less the sum of rounded probabilities.
    sinks = jnp.array([4.0, 0.0, -3.0, -9.0])
    exact = jax.grad(summed)(sinks, *(x.astype(jnp.float32) for x in (q, k, v)))
    np.testing.assert_allclose(jax.grad(summed)(sinks, q, k, v), exact, rtol=0.03)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("documents", ["join", "mask"])
def test_one_array_of_scores_is_kept(documents, dtype):
    q, k, v, weights = inputs(dtype)
    kept = [x for x, _ in saved_residuals(summed(XLA.attend, weights, masks(documents)), q, k, v) if x.shape.count(S) >= 2]
    assert [(x.size, x.dtype) for x in kept] == [(B * N * S * S, dtype)]
    sunk = partial(XLA.attend, sinks=jnp.ones(N))
    kept = [x for x, _ in saved_residuals(summed(sunk, weights, masks(documents)), q, k, v) if x.shape.count(S) >= 2]
    assert [(x.size, x.dtype) for x in kept] == [(B * N * S * S, dtype)]
