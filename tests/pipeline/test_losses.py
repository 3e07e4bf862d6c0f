"""Sums, means, weights, penalties and metrics: every sum of a loss over the batch is the same as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import (
    assert_exact,
    assert_trained,
    assert_values,
    case,
    compiled,
    decoded,
    decoder_loss,
    embed,
    logits_of,
    make_batch,
    make_params,
    mesh_of,
    mlp,
    nats,
    run_layers,
    weighted,
)

from jgt.signal import context

MESH = {"stage": 2, "data": 2}


# -- what is summed up --------------------------------------------------------------------------------------------


def mean(params, batch):
    return jnp.mean(nats(decoded(params, batch), batch))


def mean_of_row_means(params, batch):
    return jnp.mean(jnp.mean(nats(decoded(params, batch), batch), axis=-1))


def total(params, batch):
    return jnp.sum(nats(decoded(params, batch), batch))


def sum_over_size(params, batch):
    losses = nats(decoded(params, batch), batch)
    return jnp.sum(losses) / losses.size


def from_optax(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(decoded(params, batch), batch["targets"]).mean()


def from_optax_where(params, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(decoded(params, batch), batch["targets"])
    return jnp.mean(losses, where=batch["weights"] > 0)


def squared_error(params, batch):
    predicted = decoded(params, batch)
    return jnp.mean((predicted - jax.nn.one_hot(batch["targets"], predicted.shape[-1])) ** 2)


def under_checkpoint(params, batch):
    return jax.checkpoint(mean)(params, batch)


def no_loss_for_padding_guarded(params, batch):
    """The number of tokens is guarded against 0, as in most trainers."""
    losses = nats(decoded(params, batch), batch)
    return jnp.sum(losses * batch["weights"]) / jnp.maximum(jnp.sum(batch["weights"]), 1)


LOSSES = [
    mean,
    mean_of_row_means,
    total,
    sum_over_size,
    from_optax,
    from_optax_where,
    squared_error,
    under_checkpoint,
    no_loss_for_padding_guarded,
    jax.jit(decoder_loss),
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_reductions(loss):
    one = case(loss)
    assert_values(compiled(one.pipelined(mesh_of(**MESH)))(one.params, *one.inputs), one.expected[0])
    if loss in (from_optax, under_checkpoint, no_loss_for_padding_guarded):
        assert_trained(one, mesh_of(**MESH))


@pytest.mark.parametrize("loss", [decoder_loss, from_optax], ids=lambda loss: loss.__name__)
def test_one_row_for_each_microbatch_and_shard(loss):
    assert_exact(case(loss), mesh_of(**MESH), microbatches=8)


# -- what is added to the loss ------------------------------------------------------------------------------------


def with_penalty(params, batch):
    return decoder_loss(params, batch) + 0.01 * sum(jnp.sum(x**2) for x in jax.tree.leaves(params))


def with_scaled_penalty(params, batch):
    """The factor 2 must not be taken for a function of the loss."""
    return 2 * decoder_loss(params, batch) + optax.tree.norm(params["layers"])


def layers_with_ys(params, batch, measure):
    """The logits, and a measure of every layer's output, stacked."""

    def layer(x, weights):
        x = mlp(x, weights)
        return x, measure(x)

    x = embed(params, batch)
    with context("layers"):
        x, measured = jax.lax.scan(layer, x, params["layers"])
    return logits_of(params, x), measured


def mean_of_each_layer(params, batch):
    logits, measured = layers_with_ys(params, batch, lambda x: jnp.mean(x**2))
    return weighted(nats(logits, batch), batch) + 0.1 * jnp.sum(measured)


def sum_of_each_layer(params, batch):
    logits, measured = layers_with_ys(params, batch, lambda x: jnp.sum(x**2))
    return weighted(nats(logits, batch), batch) + 0.1 * jnp.mean(measured) / batch["tokens"].size


def rows_of_each_layer(params, batch):
    logits, measured = layers_with_ys(params, batch, lambda x: jnp.mean(jnp.abs(x), axis=-1))
    return weighted(nats(logits, batch) + 0.1 * jnp.sum(measured, axis=0), batch)


def last_layers_only(params, batch):
    """The loss does not use the values of all layers in the same way."""
    logits, measured = layers_with_ys(params, batch, lambda x: jnp.mean(x**2))
    return weighted(nats(logits, batch), batch) + 0.1 * measured[-1] - 0.2 * measured[1]


def two_values_of_each_layer(params, batch):
    logits, (large, features) = layers_with_ys(params, batch, lambda x: (jnp.sum(x > 0), jnp.mean(x, axis=(0, 1))))
    return weighted(nats(logits, batch), batch) + jnp.sum(features), {"positive": jnp.sum(large)}


def carried(params, batch, measure):
    """The logits, and the sum of a measure of every layer's output."""

    def layer(carry, weights):
        x, found = carry
        x = mlp(x, weights)
        return (x, found + measure(x)), None

    x = embed(params, batch)
    with context("layers"):
        start = jnp.zeros(jax.eval_shape(measure, x).shape)
        (x, found), _ = jax.lax.scan(layer, (x, start), params["layers"])
    return logits_of(params, x), found


def carried_mean(params, batch):
    logits, found = carried(params, batch, lambda x: jnp.mean(x**2))
    return weighted(nats(logits, batch), batch) + 0.1 * found


def carried_sum(params, batch):
    logits, found = carried(params, batch, lambda x: jnp.sum(x**2))
    return weighted(nats(logits, batch), batch) + 0.1 * found / batch["tokens"].size


def carried_rows(params, batch):
    logits, found = carried(params, batch, lambda x: jnp.mean(x**2, axis=-1))
    return weighted(nats(logits, batch) + 0.1 * found, batch)


def of_the_embedding(params, batch):
    x = embed(params, batch)
    logits = logits_of(params, run_layers(params, x))
    return weighted(nats(logits, batch), batch) + 0.1 * jnp.mean(x**2)


def of_the_embedding_weighted(params, batch):
    x = embed(params, batch)
    logits = logits_of(params, run_layers(params, x))
    return weighted(nats(logits, batch) + 0.1 * jnp.sum(x**2, axis=-1), batch)


AUXILIARY = [
    with_penalty,
    with_scaled_penalty,
    mean_of_each_layer,
    sum_of_each_layer,
    rows_of_each_layer,
    last_layers_only,
    carried_mean,
    carried_sum,
    carried_rows,
    of_the_embedding,
    of_the_embedding_weighted,
]


@pytest.mark.parametrize("loss", AUXILIARY, ids=lambda loss: loss.__name__)
def test_auxiliary_losses(loss):
    assert_trained(case(loss), mesh_of(**MESH))


@pytest.mark.parametrize(
    ("loss", "options"),
    [(last_layers_only, {"schedule": "zb_interleaved", "remat": "stage"}), (rows_of_each_layer, {"schedule": "zigzag", "remat": "layer"})],
    ids=["last layers only", "rows of each layer"],
)
def test_auxiliary_losses_of_padded_layers(loss, options):
    assert_exact(case(loss, make_params(5)), mesh_of(stage=2, data=2), **options)


# -- what is returned beside it -----------------------------------------------------------------------------------


def with_metrics(params, batch):
    logits = decoded(params, batch)
    losses, correct = nats(logits, batch), jnp.argmax(logits, axis=-1) == batch["targets"]
    return weighted(losses, batch), {
        "sum": jnp.sum(losses * batch["weights"]),
        "correct": jnp.sum(correct),
        "correct rows": jnp.sum(correct, axis=0),
        "tokens": jnp.sum(batch["weights"] > 0),
        "rows": len(batch["tokens"]),
        "accuracy": weighted(correct, batch),
        "perplexity": jnp.exp(weighted(losses, batch)),
        "mean logit": jnp.mean(logits, axis=(0, 1)),
        "norm": optax.tree.norm(params),
    }


def test_metrics_beside_the_loss():
    measured = case(with_metrics, has_aux=True)
    values = measured.expected[0][1]
    assert 0 < values["correct"] < values["tokens"]
    assert_exact(measured, mesh_of(**MESH))
    assert_exact(measured, mesh_of(stage=2, data=2), schedule="interleaved", microbatches=8)


@pytest.mark.slow
def test_metrics_of_each_layer():
    assert_exact(case(two_values_of_each_layer, has_aux=True), mesh_of(**MESH))


def test_a_loss_may_be_scaled_after_it():
    measured = case(decoder_loss)
    pipelined = measured.pipelined(mesh_of(**MESH))
    gradients = jax.jit(jax.grad(lambda *args: jnp.log(pipelined(*args)) * 3))(measured.params, *measured.inputs)
    expected = jax.jit(jax.grad(lambda *args: jnp.log(decoder_loss(*args)) * 3))(measured.params, *measured.inputs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max()), gradients, expected)


def test_padding_is_uneven_over_the_parts():
    """This makes a mean of means differ from the mean."""
    weights = make_batch()["weights"].reshape(2, 4, -1).sum(-1)
    assert (weights == 0).any()
    assert len(np.unique(weights)) > 3
