"""Layers may read more than their weights and the activation: inputs, the number of the layer, other parameters, random keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import (
    EMBED,
    LAYERS,
    RULES,
    SEQ,
    assert_close,
    assert_exact,
    assert_trained,
    assert_values,
    case,
    compiled,
    embed,
    logits_of,
    loss_of,
    make_batch,
    make_params,
    mesh_of,
    mlp,
    nats,
    run_layers,
    weighted,
)

import jgt
from jgt.schedule.schedules import SCHEDULES
from jgt.signal import context

SIZES = {"stage": 2, "tensor": 2, "data": 2}


def attend(x, query, memory, mask):
    """x [b, s, d] attends to memory [b, t, d] where the mask [b, s, t] is true."""
    with context("attn"):
        scores = jnp.where(mask, jnp.einsum("bsd,btd->bst", x @ query, memory), -1e9)
        return x + jnp.einsum("bst,btd->bsd", jax.nn.softmax(scores), memory)


# -- of the inputs ------------------------------------------------------------------------------------------------


def packed_batch():
    """A batch with two sequences in each row: their segments and positions [b, s], and a prefix [b, 3]."""
    batch = make_batch()
    starts = np.random.default_rng(2).integers(1, SEQ, (len(batch["tokens"]), 1))
    segments = (np.arange(SEQ) >= starts).astype(np.int32)
    prefix = np.random.default_rng(3).integers(0, SEQ, (len(starts), 3), np.int32)
    return batch | {
        "segments": segments,
        "positions": np.arange(SEQ, dtype=np.int32) - segments * starts.astype(np.int32),
        "prefix": prefix,
    }


def attention_params(num_layers):
    params = make_params(num_layers, positions=(SEQ, EMBED))
    query = np.random.default_rng(4).normal(0, EMBED**-0.5, (num_layers, EMBED, EMBED)).astype(np.float32)
    return params | {"layers": params["layers"] | {"query": query}}


def packed(params, batch):
    """Layers read positions, a segment mask, their own number, and whether tokens see the whole segment or only neighbours."""
    num_layers = len(params["layers"]["query"])
    same = batch["segments"][:, :, None] == batch["segments"][:, None, :]
    causal = same & jnp.tril(jnp.ones((SEQ, SEQ), bool))[None]
    near = causal & (jnp.abs(jnp.arange(SEQ)[:, None] - jnp.arange(SEQ)[None]) < 2)[None]
    turn = jnp.cos(batch["positions"].astype(jnp.float32))[..., None]

    def layer(x, scanned):
        weights, number, is_near = scanned
        x = attend(x * (1 + 0.1 * turn), weights["query"], x, jnp.where(is_near, near, causal))
        return mlp(x, weights) * (1 - 0.1 * number), None

    x = embed(params, batch) + params["positions"][batch["positions"]]
    with context("layers"):
        x, _ = jax.lax.scan(layer, x, (params["layers"], jnp.arange(num_layers), jnp.arange(num_layers) % 2 == 0))
    return loss_of(params, x, batch)


def prefixed(params, batch):
    """Every layer reads a prefix that is encoded with parameters."""
    with context("encoder"):
        memory = jnp.tanh(params["positions"][batch["prefix"]])
    everywhere = jnp.ones((1, 1, 1), bool)

    def layer(x, weights):
        return mlp(attend(x, weights["query"], memory, everywhere), weights), jnp.mean(memory * x[:, :3])

    x = embed(params, batch)
    with context("layers"):
        x, overlap = jax.lax.scan(layer, x, params["layers"])
    return loss_of(params, x, batch) + 0.1 * jnp.sum(overlap)


@pytest.mark.parametrize(
    ("loss", "options"),
    [(packed, {"schedule": "zb", "remat": "stage"}), (prefixed, {"schedule": "zigzag"}), (prefixed, {"schedule": "zb", "remat": "layer"})],
    ids=["packed", "prefixed", "prefixed recomputed"],
)
def test_layers_read_more_than_the_activation(loss, options):
    """The number of chunks does not divide the number of layers, so that some chunks contain padding layers."""
    assert_exact(case(loss, attention_params(3 if loss is packed else 5), packed_batch()), mesh_of(**SIZES), **options)


# -- of parameters ------------------------------------------------------------------------------------------------


def tied(params, batch):
    """One table embeds and unembeds. All layers share a matrix and a scale, and the head uses the matrix again."""

    def layer(x, weights):
        x = mlp(x, weights)
        return x + jnp.tanh(x @ params["shared"]) * params["scale"][None]

    x = run_layers({"layers": params["layers"]}, embed(params, batch), layer)
    with context("head"):
        x = x @ params["shared"]
    return loss_of(params, x, batch, "embed")


TIED_RULES = {
    **RULES,
    "params": {"embed": [["stage", "tensor", "fsdp"], None]},
    "signals": {
        "layers/mlp": RULES["signals"]["layers/mlp"],
        "head": {"tensors": RULES["signals"]["head"]["tensors"]},
    },
}


@pytest.mark.parametrize(
    ("sizes", "num_layers", "options"),
    [(SIZES, LAYERS, {}), ({"stage": 2, "fsdp": 2}, 5, {"schedule": "zb", "remat": "layer", "gather": "layer"})],
    ids=["1f1b", "zb"],
)
def test_parameters_that_are_read_in_several_places(sizes, num_layers, options):
    params = make_params(num_layers, shared=(EMBED, EMBED), scale=(1, EMBED))
    del params["unembed"]
    assert_trained(case(tied, params, make_batch(), rules=TIED_RULES), mesh_of(**sizes), **options)


# -- in bf16 ------------------------------------------------------------------------------------------------------


def in_bf16(params, batch):
    """Parameters are f32 and cast as a whole, outside of the layers; activations are bf16."""
    small = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    return weighted(nats(logits_of(small, run_layers(small, embed(small, batch))).astype(jnp.float32), batch), batch)


@pytest.fixture(scope="module")
def rounded():
    """The model in bf16."""
    return case(in_bf16)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bf16_on_every_schedule(rounded, schedule):
    """bf16 has 8 bits: sums in another order differ by about 2^-8 per term, and a gradient has a few terms that partly cancel."""
    value, gradients = rounded.derivatives(rounded.pipelined(mesh_of(**SIZES), schedule=schedule))
    np.testing.assert_allclose(value, rounded.expected[0], rtol=0, atol=2**-8 * rounded.expected[0])
    assert_close(gradients, rounded.expected[1], 2**-5)


# -- of random keys -----------------------------------------------------------------------------------------------


def dropped(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0)


def mean_loss(params, x, batch):
    return jnp.mean(nats(logits_of(params, x), batch))


def scanned_keys(params, batch, key):
    keys = jax.random.split(key, LAYERS)
    x = embed(params, batch)
    with context("layers"):
        x, _ = jax.lax.scan(lambda x, s: (dropped(mlp(x, s[0]), s[1]), None), x, (params["layers"], keys))
    return mean_loss(params, x, batch)


def folded_keys(params, batch, key):
    x = embed(params, batch)
    with context("layers"):
        x, _ = jax.lax.scan(
            lambda x, s: (dropped(mlp(x, s[0]), jax.random.fold_in(key, s[1])), None), x, (params["layers"], jnp.arange(LAYERS))
        )
    return mean_loss(params, x, batch)


def carried_keys(params, batch, key):
    def layer(carry, weights):
        x, key = carry
        key, own = jax.random.split(key)
        return (dropped(mlp(x, weights), own), key), None

    x = embed(params, batch)
    with context("layers"):
        (x, _), _ = jax.lax.scan(layer, (x, key), params["layers"])
    return mean_loss(params, x, batch)


def keys_everywhere(params, batch, key):
    """Dropout before the layers, in them and after them."""
    first, inside, last = jax.random.split(key, 3)
    x = dropped(embed(params, batch), first)
    x = run_layers(params, x, lambda x, weights: dropped(mlp(x, weights), inside))
    return mean_loss(params, dropped(x, last), batch)


def by_parts(loss, num_parts, num_shards):
    """The mean of the loss over the parts into which a pipeline splits the batch, each with its own key."""

    def mean(params, batch, key):
        def split(x):
            return jnp.swapaxes(x.reshape(num_shards, num_parts, -1, *x.shape[1:]), 0, 1).reshape(num_shards * num_parts, -1, *x.shape[1:])

        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(num_parts * num_shards))
        return jnp.mean(jax.vmap(loss, (None, 0, 0))(params, jax.tree.map(split, batch), keys))

    return mean


@pytest.mark.parametrize(
    ("loss", "key", "options"),
    [
        (scanned_keys, jax.random.key, {}),
        (folded_keys, jax.random.PRNGKey, {"schedule": "zb", "remat": "stage"}),
        (carried_keys, jax.random.PRNGKey, {"schedule": "interleaved"}),
        (keys_everywhere, jax.random.key, {"schedule": "zigzag", "remat": "layer"}),
        pytest.param(keys_everywhere, jax.random.PRNGKey, {}, marks=pytest.mark.slow),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_every_part_draws_from_a_key_of_its_own(loss, key, options):
    dropout = case(loss, None, make_batch(), key(3))
    value, gradients = dropout.derivatives(dropout.pipelined(mesh_of(**SIZES), **options))
    expected, expected_gradients = dropout.derivatives(by_parts(loss, 4, 2))
    assert_values(value, expected)
    assert_close(gradients, expected_gradients, 1e-5)


@pytest.mark.parametrize(
    ("loss", "key"),
    [(scanned_keys, jax.random.key), (carried_keys, jax.random.PRNGKey), (keys_everywhere, jax.random.key)],
    ids=lambda x: x.__name__,
)
def test_a_key_that_is_no_argument_is_refused(loss, key):
    closed = case(lambda params, batch: loss(params, batch, key(3)))
    with pytest.raises(jgt.InputError, match="a key that is not an argument of the function"):
        jax.eval_shape(closed.pipelined(mesh_of(**SIZES)), closed.params, *closed.inputs)


def test_evaluation_draws_as_training_does():
    dropout = case(scanned_keys, None, make_batch(), jax.random.key(3))
    pipelined = dropout.pipelined(mesh_of(stage=2, data=2))
    assert_values(
        compiled(pipelined)(dropout.params, *dropout.inputs), compiled(by_parts(scanned_keys, 4, 2))(dropout.params, *dropout.inputs)
    )


@pytest.mark.parametrize("lookup", [lambda table, tokens: table[tokens], lambda table, tokens: jnp.take(table, tokens, axis=0)])
def test_an_axis_that_splits_the_sequence_and_the_table(lookup):
    # XLA's partitioner aborted the process here.
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"table": jax.random.normal(keys[0], (16, 8)), "layers": jax.random.normal(keys[1], (4, 8, 8))}
    batch = {"tokens": jax.random.randint(keys[2], (8, 32), 0, 16)}

    def loss(params, batch):
        with context("embed"):
            x = lookup(params["table"], batch["tokens"])
        with context("layers"):
            x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["layers"])
        return jnp.mean(x**2)

    signals = {"embed": {"out": ["data", "seq", None]}}
    rules = {"inputs": ["data", "seq", "..."], "params": {"table": ["seq", None]}, "signals": signals, "default": "replicate"}
    mesh = jgt.make_mesh({"data": 2, "stage": 2, "seq": 2})
    pipelined = jgt.shard(loss, rules, mesh, pipeline=jgt.Pipeline(signal="layers", microbatches=2))
    got, want = (jax.jit(jax.value_and_grad(fn))(params, batch) for fn in (pipelined, loss))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_complex_numbers():
    keys = jax.random.split(jax.random.key(0), 5)
    weights = [jax.random.normal(key, (4, 16, 16)) / 4 for key in keys[:2]]
    params = {"first": jnp.eye(16), "layers": weights[0] + 1j * weights[1], "last": jax.random.normal(keys[2], (16, 4)) / 4}
    batch = jax.random.normal(keys[3], (8, 16))

    def loss(params, batch):
        z = batch.astype(jnp.complex64) @ params["first"].astype(jnp.complex64)
        with context("layers"):
            z, _ = jax.lax.scan(lambda z, w: (z + jnp.tanh((z @ w).real) * (0.3 + 1j), None), z, params["layers"])
        return jnp.mean((jnp.abs(z) @ params["last"]) ** 2)

    pipeline = jgt.Pipeline(signal="layers", microbatches=2)
    rules = jgt.make_rules({"axes": {"batch": ["data"]}, "default": "replicate"})
    split = jgt.shard(loss, rules, jgt.make_mesh({"data": 2, "stage": 2, "tensor": 2}), pipeline=pipeline)
    for ours, theirs in zip(*(jax.tree.leaves(jax.jit(jax.value_and_grad(fn))(params, batch)) for fn in (split, loss)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)
