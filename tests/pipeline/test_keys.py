"""Random keys in every form that models pass them in, and values of each layer that leave the layer scan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import (
    LAYERS,
    ROWS,
    assert_close,
    assert_exact,
    assert_values,
    case,
    compiled,
    embed,
    loss_of,
    make_batch,
    mesh_of,
    mlp,
    pipeline_of,
)

import jgt
from jgt.signal import context

SIZES = {"stage": 2, "data": 2}


def dropped(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0)


def by_layer(params, batch, keys):
    """A key for each layer, which the scan goes over."""
    x = embed(params, batch)
    with context("layers"):
        x, _ = jax.lax.scan(lambda x, s: (dropped(mlp(x, s[0]), s[1]), None), x, (params["layers"], keys))
    return loss_of(params, x, batch)


def by_row(params, batch, keys):
    """A key for each row of the batch."""
    x = embed(params, batch)
    with context("layers"):
        x, _ = jax.lax.scan(lambda x, weights: (jax.vmap(dropped)(mlp(x, weights), keys), None), x, params["layers"])
    return loss_of(params, x, batch)


def keys_of_parts(keys, num_parts):
    """The keys that the parts of the batch derive from keys by layer: [parts, layers]."""
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (None, 0))
    return fold(keys, jnp.arange(num_parts))


def by_parts(params, batch, keys):
    """The loss of 8 parts (4 microbatches on 2 shards), each with its own keys; weighted by its tokens."""
    split = lambda x: jnp.swapaxes(x.reshape(2, 4, -1, *x.shape[1:]), 0, 1).reshape(8, -1, *x.shape[1:])  # noqa: E731
    parts = jax.tree.map(split, batch)
    losses = jax.vmap(by_layer, (None, 0, 0))(params, parts, keys_of_parts(keys, 8))
    return jnp.sum(jnp.where(parts["weights"].sum((1, 2)) > 0, losses * parts["weights"].sum((1, 2)), 0)) / jnp.sum(batch["weights"])


def full_batch():
    return make_batch() | {"weights": np.ones_like(make_batch()["weights"])}


@pytest.mark.parametrize("key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "legacy"])
def test_keys_stacked_by_layer(key):
    dropout = case(by_layer, None, full_batch(), jax.random.split(key(3), LAYERS))
    value, gradients = dropout.derivatives(dropout.pipelined(mesh_of(**SIZES)))
    expected, expected_gradients = dropout.derivatives(by_parts)
    assert_values(value, expected)
    assert_close(gradients, expected_gradients, 1e-5)


@pytest.mark.parametrize("key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "legacy"])
def test_a_key_for_each_row_goes_with_its_row(key):
    dropout = case(by_row, None, make_batch(), jax.random.split(key(3), ROWS))
    value, gradients = dropout.derivatives(dropout.pipelined(mesh_of(**SIZES)))
    assert_values(value, dropout.expected[0])
    assert_close(gradients, dropout.expected[1], 1e-5)


def test_as_many_layers_as_rows():
    """Both inputs have 4 keys: the scan goes over one of them."""
    batch = {name: x[:4] for name, x in full_batch().items()}

    def both(params, batch, layers, rows):
        x = embed(params, batch)
        with context("layers"):
            x, _ = jax.lax.scan(lambda x, s: (jax.vmap(dropped)(mlp(x, s[0]), rows), None), x, (params["layers"], layers))
        return loss_of(params, x, batch)

    keys = jax.random.split(jax.random.key(3), 4)
    dropout = case(both, None, batch, keys, keys)
    assert_values(dropout.derivatives(dropout.pipelined(mesh_of(stage=2), microbatches=2))[0], dropout.expected[0])


# -- values of each layer ------------------------------------------------------------------------------------------


def next_keys(params, batch, keys, counts):
    """What a scan of nnx over layers with dropout returns: the next key and the count of each layer, and the carried key of the last."""

    @jax.checkpoint
    def layer(carry, s):
        (x, key), (weights, own, count) = carry, s
        key, noise = jax.random.split(key)
        # Of mean 0 and tiny, so that the loss shows its use and not its values.
        x = mlp(x, weights) + 1e-9 * jax.random.normal(jax.random.fold_in(own, count), x.shape) + 1e-9 * jax.random.normal(noise, x.shape)
        return (x, key), (jax.random.fold_in(own, 1), count + 1)

    x = embed(params, batch)
    with context("layers"):
        (x, key), new = jax.lax.scan(layer, (x, keys[0]), (params["layers"], keys, counts))
    return loss_of(params, x, batch), (key, new)


def bits(tree):
    return jax.tree.map(lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree)


@pytest.mark.parametrize(
    ("key", "options"),
    [(jax.random.key, {}), (jax.random.PRNGKey, {"schedule": "zb", "remat": "stage"}), (jax.random.key, {"schedule": "interleaved"})],
    ids=["typed", "legacy", "chunks"],
)
def test_keys_and_counts_of_each_layer_leave_the_scan(key, options):
    args = jax.random.split(key(3), LAYERS), jnp.arange(LAYERS, dtype=jnp.uint32)
    stack = case(next_keys, None, make_batch(), *args, has_aux=True)
    run = lambda fn: compiled(jax.value_and_grad(fn, has_aux=True))(stack.params, *stack.inputs)  # noqa: E731
    sharded = jgt.shard(next_keys, stack.rules, mesh_of(**SIZES), pipeline=pipeline_of(**options), state="counts")
    (value, state), gradients = run(sharded)
    (expected, expected_state), expected_gradients = run(next_keys)
    assert_values(value, expected)
    assert_close(gradients, expected_gradients, 1e-5)
    jax.tree.map(np.testing.assert_array_equal, bits(state), bits(expected_state))


def test_a_checkpointed_layer_may_return_what_it_was_given():
    """The scan that computes the keys and counts beside the pipeline forwards them, so it has no equation for them."""

    def unchanged(params, batch, keys, counts):
        def layer(x, s):
            weights, key, count = s
            return mlp(x, weights), (key, count, count)

        x = embed(params, batch)
        with context("layers"):
            x, (keys, counts, again) = jax.lax.scan(jax.checkpoint(layer), x, (params["layers"], keys, counts))
        return loss_of(params, x, batch), (bits(keys), counts, again)

    args = jax.random.split(jax.random.key(3), LAYERS), jnp.arange(LAYERS, dtype=jnp.uint32)
    stack = case(unchanged, None, make_batch(), *args, has_aux=True)
    run = lambda fn: compiled(jax.value_and_grad(fn, has_aux=True))(stack.params, *stack.inputs)  # noqa: E731
    (value, kept), gradients = run(jgt.shard(unchanged, stack.rules, mesh_of(**SIZES), pipeline=pipeline_of(), state="counts"))
    (expected, expected_kept), expected_gradients = run(unchanged)
    assert_values(value, expected)
    assert_close(gradients, expected_gradients, 1e-5)
    jax.tree.map(np.testing.assert_array_equal, kept, expected_kept)


def test_keys_of_layers_may_be_read_behind_them():
    """The head draws from a key that the last layer made: it is the microbatch's own."""

    def loss(params, batch, keys):
        x = embed(params, batch)
        with context("layers"):
            x, keys = jax.lax.scan(lambda x, s: (mlp(x, s[0]), jax.random.fold_in(s[1], 7)), x, (params["layers"], keys))
        x = x + 1e-9 * jax.random.normal(keys[-1], x.shape)
        return loss_of(params, x, batch)

    stack = case(loss, None, make_batch(), jax.random.split(jax.random.key(3), LAYERS))
    value, gradients = stack.derivatives(stack.pipelined(mesh_of(**SIZES)))
    assert_values(value, stack.expected[0])
    assert_close(gradients, stack.expected[1], 1e-5)


@pytest.mark.slow
def test_layers_taken_several_at_a_time():
    def loss(params, batch):
        pairs = jax.tree.map(lambda w: w.reshape(2, 2, *w.shape[1:]), params["layers"])
        x = embed(params, batch)
        with context("layers"):
            x, _ = jax.lax.scan(
                lambda x, w: (mlp(mlp(x, jax.tree.map(lambda w: w[0], w)), jax.tree.map(lambda w: w[1], w)), None), x, pairs
            )
        return loss_of(params, x, batch)

    assert_exact(case(loss), mesh_of(**SIZES))
