"""Which equations are attention, whoever wrote them, and what they let a query see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from jgt.replacements.context.pairs import UnreadableError
from jgt.replacements.context.proof import attention_in
from train.models.kernels import XLA

S, N, G, H = 96, 4, 2, 8


def found(fn, *more, dtype=jnp.float32, heads=G, seq=S):
    q, k = (jax.ShapeDtypeStruct((2, seq, n, H), dtype) for n in (N, heads))
    return attention_in(jax.make_jaxpr(fn)(q, k, k, *more))


def by_hand(q, k, v, *, bias=None, softmax=jax.nn.softmax):
    s = q.shape[1]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(H)
    bias = jnp.where(jnp.arange(s)[:, None] >= jnp.arange(s)[None], 0.0, -1e9) if bias is None else bias
    return jnp.einsum("bhqk,bkhd->bqhd", softmax(scores + bias[None, None], -1), v)


def of_documents(q, k, v, documents):
    return XLA.attend(q, k, v, mask=documents[:, None, :, None] == documents[:, None, None, :])


def of_documents_in_a_window(q, k, v, documents):
    return XLA.attend(q, k, v, mask=documents[:, None, :, None] == documents[:, None, None, :], window=24)


def by_mask(mask):
    """Causal attention whose mask also depends on integers [b, s] or [b]."""

    def attend(q, k, v, numbers):
        queries, keys = jnp.arange(S)[:, None], jnp.arange(S)[None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask((queries, keys), numbers))

    return attend


def images(places, tokens):
    """Tokens of images, which one number marks, are seen by all."""
    return (places[0] >= places[1])[None, None] | (tokens == 7)[:, None, None, :]


def prefixes(places, lengths):
    return (places[0] >= places[1])[None, None] | (places[1][None, None] < lengths[:, None, None, None])


def global_tokens(places, tokens):
    near = (places[0] - places[1] < 24)[None, None] | (tokens == 9)[:, None, None, :]
    return (places[0] >= places[1])[None, None] & near


def padded(places, tokens):
    """Two biases that are added, as libraries write it."""
    causal, padding = jnp.where((places[0] >= places[1])[None, None], 0.0, -1e9), jnp.where(tokens >= 0, 0.0, -1e9)[:, None, None, :]
    return causal + padding


def padded_by_ones(places, tokens):
    ones = ((places[0] >= places[1])[None, None] & (tokens >= 0)[:, None, None, :]).astype(jnp.float32)
    return (1.0 - ones) * -1e9


def by_bias(bias):
    """Attention with numbers that are added to its scores."""

    def attend(q, k, v, numbers):
        s = q.shape[1]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(H)
        added = bias((jnp.arange(s)[:, None], jnp.arange(s)[None]), numbers)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores + added, -1), v)

    return attend


def with_a_flag(q, k, v, is_full):
    return XLA.attend(q, k, v, window=jnp.where(is_full, S, 24))


def of_flax(q, k, v):
    return linen.dot_product_attention(q, k, v, mask=linen.make_causal_mask(jnp.ones(q.shape[:2])))


def repeated(q, k, v):
    return by_hand(q, jnp.repeat(k, N // G, 2), jnp.repeat(v, N // G, 2))


def causal_of_jax(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


SINKS = jax.ShapeDtypeStruct((N,), jnp.float32)
INT, FLAG = jax.ShapeDtypeStruct((2, S), jnp.int32), jax.ShapeDtypeStruct((), bool)
LENGTHS = jax.ShapeDtypeStruct((2,), jnp.int32)


@pytest.mark.parametrize(
    ("fn", "more", "heads", "expected"),
    [
        (XLA.attend, (), G, (True, True, None)),
        (causal_of_jax, (), G, (True, True, None)),
        (jax.nn.dot_product_attention, (), G, (False, True, None)),
        (of_flax, (), N, (True, True, None)),
        (by_hand, (), N, (True, True, None)),
        (repeated, (), G, (True, True, None)),
        (lambda q, k, v: XLA.attend(q, k, v, window=24), (), G, (True, False, 24)),
        (with_a_flag, (FLAG,), G, (True, False, None)),
        (of_documents, (INT,), G, (True, False, None)),
        (of_documents_in_a_window, (INT,), G, (True, False, 24)),
        # What integers allow, whatever they are: no draw of them shows it.
        (by_mask(images), (INT,), G, (False, False, None)),
        (by_mask(prefixes), (LENGTHS,), G, (False, False, None)),
        (by_mask(global_tokens), (INT,), G, (True, False, None)),
        (by_bias(padded), (INT,), N, (True, False, None)),
        (by_bias(padded_by_ones), (INT,), N, (True, False, None)),
    ],
    ids=[
        "own",
        "jax",
        "full",
        "flax",
        "by hand",
        "repeated heads",
        "window",
        "flag",
        "documents",
        "both",
        "images",
        "prefixes",
        "global",
        "biases",
        "ones",
    ],
)
def test_attention_is_found_whoever_wrote_it(fn, more, heads, expected):
    attention = found(fn, *more, heads=heads)
    assert (attention.is_causal, attention.is_plain, attention.window) == expected
    assert attention.scale == pytest.approx(H**-0.5, rel=1e-6)


def test_numbers_in_bf16_do_not_blur_the_scale():
    assert found(lambda q, k, v: XLA.attend(q, k, v, scale=0.3), dtype=jnp.bfloat16).scale == pytest.approx(0.3, rel=1e-6)


def alibi(q, k, v):
    distance = jnp.arange(S)[:, None] - jnp.arange(S)[None]
    return by_hand(q, k, v, bias=jnp.where(distance >= 0, -0.1 * distance, -1e9))


def of_sinks(q, k, v, sinks, keeps=slice(None, -1), first=0):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    column = jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
    both = [scores, column]
    weights = jax.nn.softmax(jnp.concatenate([both[first], both[1 - first]], -1), -1)[..., keeps]
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def test_a_sink_is_one_more_score_of_each_head():
    attention = found(of_sinks, SINKS, heads=N)
    assert attention.sink is not None and attention.sink.aval.shape == (N,)
    # Also one that is compared with the largest score, and added to the sum.
    attention = found(lambda q, k, v, sinks: XLA.attend(q, k, v, sinks=sinks, window=24), SINKS)
    assert attention.sink is not None and (attention.is_causal, attention.window) == (True, 24)
    assert found(causal_of_jax).sink is None


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda q, k, v: XLA.attend(q, k, v, softcap=30.0), r"not softmax\(scale · q · k\) · v: results differ"),
        (alibi, "results differ"),
        (lambda q, k, v: by_hand(q, k, v, softmax=lambda x, axis: jax.nn.sigmoid(x)), "do not grow|results differ|follows from no number"),
        (lambda q, k, v: of_sinks(q, k, v, jnp.ones(N)), "its sink is not one number for each head"),
        (lambda q, k, v: XLA.attend(q, k, v, sinks=jnp.ones(N)), "its sink is not one number for each head"),
        (lambda q, k, v: of_sinks(q, k, v, jnp.ones(N), first=1), "concatenate .* is not an operation of attention that jgt knows"),
        (lambda q, k, v: jnp.cumsum(q, 1) + k + v, "cumsum"),
    ],
    ids=["softcap", "bias", "sigmoid", "a constant sink", "a constant sink of ours", "a sink in front", "sums"],
)
def test_anything_else_is_refused(fn, why):
    with pytest.raises(UnreadableError, match=why):
        found(fn, heads=N)


def test_a_key_dropped_in_the_place_of_a_sink():
    with pytest.raises(UnreadableError, match=r"the slice at .*test_attention_proof.py:\d+ is not that of a sink"):
        found(lambda q, k, v, sinks: of_sinks(q, k, v, sinks, slice(1, None)), SINKS, heads=N)


def test_each_query_and_key_is_seen_as_in_the_whole_mask():
    attention = found(of_documents, INT)
    documents = np.sort(np.random.default_rng(0).integers(0, 4, (2, S)), -1).astype(np.int32)
    some, others = np.array([0, 17, 40, S - 1]), np.array([0, 3, 39, 40, 90])
    whole = (documents[:, :, None] == documents[:, None]) & np.tril(np.ones((S, S), bool))
    operands = [jnp.asarray(documents[:, others if one.is_of_keys else some]) for one in attention.pairs.operands]
    np.testing.assert_array_equal(attention.pairs.seen(jnp.asarray(some), jnp.asarray(others), operands), whole[:, some][:, :, others])


def test_no_array_of_a_long_sequence_is_made():
    # The scores alone would have 64 GB.
    assert found(XLA.attend, seq=2**16).is_plain


def test_programs_that_differ_in_the_numbers_of_an_array_are_told_apart():
    masks = [np.tril(np.ones((S, S), bool)), np.ones((S, S), bool)]
    assert [
        found(jax.jit(lambda q, k, v, m=mask: jax.nn.dot_product_attention(q, k, v, mask=m[None, None]))).is_causal for mask in masks
    ] == [
        True,
        False,
    ]
