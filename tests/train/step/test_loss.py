"""Cross entropy and its gradient, whole and in chunks, compared with the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.step import loss as losses
from train.step.loss import cross_entropy, make_loss, num_chunks

RANDOM = np.random.default_rng(0)
LOGITS = RANDOM.normal(size=(2, 3, 7)).astype(np.float32) * 5
TARGETS = np.array([[0, 6, 3], [2, 2, 5]])
BATCH, SEQ, EMBED, VOCAB = 4, 6, 5, 7


def slow_nats():
    probabilities = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
    return np.array([[-np.log(probabilities[b, s, TARGETS[b, s]]) for s in range(3)] for b in range(2)])


def test_nats_of_each_target():
    np.testing.assert_allclose(cross_entropy(LOGITS, TARGETS), slow_nats(), rtol=1e-5)


def test_large_logits_do_not_overflow():
    assert cross_entropy(jnp.array([[[1e4, 0.0]]]), jnp.array([[1]])) == 1e4


def test_the_gradient_is_probability_minus_target():
    gradient = jax.grad(lambda x: jnp.sum(cross_entropy(x, TARGETS)))(LOGITS)
    np.testing.assert_allclose(gradient, jax.nn.softmax(LOGITS) - np.eye(7)[TARGETS], rtol=0, atol=1e-6)


# -- without whole logits ----------------------------------------------------------------------------------------

PARAMS = (RANDOM.normal(size=(BATCH, SEQ, EMBED)).astype(np.float32), RANDOM.normal(size=(VOCAB, EMBED)).astype(np.float32))
TOKENS = RANDOM.integers(0, VOCAB, (BATCH, SEQ))
WEIGHTS = RANDOM.random((BATCH, SEQ)).astype(np.float32)


def batch(weights=WEIGHTS):
    return {"inputs": TOKENS, "targets": TOKENS[:, ::-1], "weights": weights}


def chunked(chunks, groups=(), dtype=jnp.float32, parts=1):
    loss = make_loss(lambda params, _: jax.tree.map(lambda x: x.astype(dtype), params), chunks=chunks, groups=groups, parts=parts)
    return lambda params, weights: loss(params, batch(weights))


def plain(params, weights):
    return jnp.sum(weights * cross_entropy(jnp.einsum("bsd,vd->bsv", *params), batch()["targets"]))


@pytest.mark.parametrize(
    ("chunks", "groups"),
    [(1, ()), (1, (2, 2)), (2, ()), (3, (4,)), (6, (2,)), (6, (2, 2))],
    ids=["1-1", "1-2x2", "2-1", "3-4", "6-2", "6-2x2"],
)
def test_loss_and_gradients_are_those_of_whole_logits(chunks, groups):
    found = jax.value_and_grad(chunked(chunks, groups), (0, 1))(PARAMS, WEIGHTS)
    expected = jax.value_and_grad(plain, (0, 1))(PARAMS, WEIGHTS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)
    np.testing.assert_allclose(chunked(chunks, groups)(PARAMS, WEIGHTS), expected[0], rtol=1e-6)


@pytest.mark.parametrize(("chunks", "groups", "parts"), [(1, (), 2), (1, (2,), 3), (3, (), 2), (2, (2, 2), 3)])
def test_devices_that_split_the_sequence_add_up_the_same_gradients(chunks, groups, parts):
    found = jax.value_and_grad(chunked(chunks, groups, parts=parts), (0, 1))(PARAMS, WEIGHTS)
    expected = jax.value_and_grad(plain, (0, 1))(PARAMS, WEIGHTS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


@pytest.mark.parametrize("chunks", [1, 3])
def test_logits_with_a_limit(chunks):
    limited = make_loss(lambda params, _: params, chunks=chunks, softcap=1.5)

    def slow(params, weights):
        logits = 1.5 * jnp.tanh(jnp.einsum("bsd,vd->bsv", *params) / 1.5)
        return jnp.sum(weights * cross_entropy(logits, batch()["targets"]))

    found = jax.value_and_grad(lambda params, weights: limited(params, batch(weights)), (0, 1))(PARAMS, WEIGHTS)
    expected = jax.value_and_grad(slow, (0, 1))(PARAMS, WEIGHTS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


def test_a_scaled_loss_has_a_scaled_gradient():
    once, thrice = (jax.grad(lambda p, k=k: k * chunked(2)(p, WEIGHTS))(PARAMS) for k in (1.0, 3.0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(3 * a, b, rtol=1e-6), once, thrice)


def test_bf16_gradients_are_near_those_of_f32():
    found, expected = (jax.grad(chunked(3, (2,), dtype))(PARAMS, WEIGHTS) for dtype in (jnp.bfloat16, jnp.float32))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=0.02 * np.abs(b).max()), found, expected)


@pytest.mark.parametrize("chunks", [1, 4])
def test_no_array_holds_logits_of_more_than_a_chunk(chunks):
    vocab, seq = 1000, 64
    params = jax.ShapeDtypeStruct((2, seq, EMBED), jnp.float32), jax.ShapeDtypeStruct((vocab, EMBED), jnp.float32)
    tokens = jnp.zeros((2, seq), jnp.int32)
    loss = make_loss(lambda params, _: params, chunks=chunks)
    text = str(jax.make_jaxpr(jax.value_and_grad(loss))(params, {"inputs": tokens, "targets": tokens, "weights": jnp.ones((2, seq))}))
    assert f"f32[2,{seq // chunks},{vocab}]" in text
    assert (f"f32[2,{seq},{vocab}]" in text) == (chunks == 1)


@given(st.integers(1, 64), st.integers(1, 512), st.integers(1, 200_000), st.sampled_from([1, 2, 8, 64]))
@settings(max_examples=50, deadline=None)
def test_chunks_are_the_fewest_that_fit(rows, seq, vocab, devices):
    found = num_chunks(rows, seq, vocab, devices, local_seq=seq)
    assert seq % found == 0
    size = functools.partial(lambda chunks: rows * (seq // chunks) * vocab * 4 / devices)
    assert size(found) <= losses.LOGITS_BYTES or found == seq
    assert all(size(n) > losses.LOGITS_BYTES for n in range(1, found) if seq % n == 0)
