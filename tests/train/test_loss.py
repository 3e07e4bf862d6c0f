"""Cross entropy against the definition."""

import jax
import jax.numpy as jnp
import numpy as np

from train.loss import cross_entropy, make_loss

LOGITS = np.random.default_rng(0).normal(size=(2, 3, 7)).astype(np.float32) * 5
TARGETS = np.array([[0, 6, 3], [2, 2, 5]])


def slow_nats():
    probabilities = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
    return np.array([[-np.log(probabilities[b, s, TARGETS[b, s]]) for s in range(3)] for b in range(2)])


def test_nats_of_each_target():
    np.testing.assert_allclose(cross_entropy(LOGITS, TARGETS), slow_nats(), rtol=1e-5)


def test_large_logits_do_not_overflow():
    assert cross_entropy(jnp.array([[[1e4, 0.0]]]), jnp.array([[1]])) == 1e4


def test_the_loss_is_the_weighted_sum():
    weights = np.array([[1, 0, 2], [0.5, 0, 0]], np.float32)
    loss = make_loss(lambda params, inputs: params)
    value = loss(LOGITS, {"inputs": TARGETS, "targets": TARGETS, "weights": weights})
    np.testing.assert_allclose(value, (weights * slow_nats()).sum(), rtol=1e-5)


def test_the_gradient_is_probability_minus_target():
    gradient = jax.grad(lambda x: jnp.sum(cross_entropy(x, TARGETS)))(LOGITS)
    np.testing.assert_allclose(gradient, jax.nn.softmax(LOGITS) - np.eye(7)[TARGETS], rtol=0, atol=1e-6)
