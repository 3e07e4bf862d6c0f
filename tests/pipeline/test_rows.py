"""Rows of the batch that meet each other: a microbatch does not have them all, so that is refused, or else right."""

import jax
import jax.numpy as jnp
import pytest
from models import assert_exact, case, embed, logits_of, mesh_of, mlp, nats, run_layers

import jgt
from jgt.signal import context

SIZES = {"stage": 2, "data": 2}


def rows_of(params, batch, layer=mlp):
    """The loss of each row [b]."""
    return jnp.mean(nats(logits_of(params, run_layers(params, embed(params, batch), layer)), batch), axis=-1)


def length_of(batch):
    return jnp.sum(batch["weights"], axis=-1)


# -- rows meet ----------------------------------------------------------------------------------------------------


def preferred_in_the_first_half(params, batch):
    """As DPO (arXiv 2305.18290) is written: chosen rows, then rejected ones."""
    rows = rows_of(params, batch)
    num_pairs = rows.shape[0] // 2
    return jnp.mean(jax.nn.softplus(rows[:num_pairs] - rows[num_pairs:]))


def pairs_by_reshape(params, batch):
    first, second = rows_of(params, batch).reshape(2, -1)
    return jnp.mean(jax.nn.softplus(first - second))


def backwards(params, batch):
    rows = rows_of(params, batch)
    return jnp.mean(rows * rows[::-1])


def running_sum(params, batch):
    return jnp.mean(jnp.cumsum(rows_of(params, batch)) ** 2)


def all_but_the_first(params, batch):
    return jnp.mean(rows_of(params, batch)[1:])


def half_of_them(params, batch):
    rows = rows_of(params, batch)
    return jnp.mean(rows[: rows.shape[0] // 2])


def every_pair(params, batch):
    rows = rows_of(params, batch)
    return jnp.mean(jnp.maximum(rows[:, None] - rows[None, :], 0))


def weighted_by_position(params, batch):
    rows = rows_of(params, batch)
    return jnp.mean(rows * jnp.arange(rows.shape[0]))


def weighted_by_rank(params, batch):
    return jnp.mean(rows_of(params, batch) * jnp.argsort(length_of(batch)))


def weighted_by_neighbour(params, batch):
    return jnp.mean(rows_of(params, batch) * jnp.roll(length_of(batch), 1))


def other_targets(params, batch):
    return jnp.mean(rows_of(params, batch | {"targets": batch["targets"][::-1]}))


def columns_for_rows(params, batch):
    num_columns = batch["tokens"].shape[1]
    return jnp.mean(rows_of(params, batch | {"tokens": batch["tokens"].reshape(num_columns, -1).T}))


def layers_read_other_rows(params, batch):
    return jnp.mean(rows_of(params, batch, lambda x, weights: mlp(x, weights) + 0.1 * x[::-1]))


def layers_attend_over_rows(params, batch):
    def layer(x, weights):
        mean = jnp.mean(x, axis=1)
        return mlp(x, weights) + jnp.einsum("bc,csd->bsd", mean @ mean.T / 100, x)

    return jnp.mean(rows_of(params, batch, layer))


def experts_choose_tokens(params, batch):
    """Expert choice (arXiv 2202.09368): the best tokens of the whole batch."""

    def layer(x, weights):
        tokens = x.reshape(-1, x.shape[-1])
        scores, chosen = jax.lax.top_k(tokens[:, 0], tokens.shape[0] // 2)
        return tokens.at[chosen].add(mlp(tokens[chosen][None], weights)[0] * scores[:, None]).reshape(x.shape)

    return jnp.mean(rows_of(params, batch, layer))


def balanced_experts(params, batch):
    """Switch (arXiv 2101.03961), section 2.2: a product of two means over the batch, in each layer."""

    def layer(x, weights):
        x = mlp(x, weights)
        gates = jax.nn.softmax(x)
        chosen = jax.nn.one_hot(jnp.argmax(gates, axis=-1), gates.shape[-1])
        return x, jnp.sum(jnp.mean(gates, axis=(0, 1)) * jnp.mean(chosen, axis=(0, 1)))

    x = embed(params, batch)
    with context("layers"):
        x, balance = jax.lax.scan(layer, x, params["layers"])
    return jnp.mean(nats(logits_of(params, x), batch)) + jnp.mean(balance)


MEETING = [
    preferred_in_the_first_half,
    pairs_by_reshape,
    backwards,
    running_sum,
    all_but_the_first,
    half_of_them,
    every_pair,
    weighted_by_position,
    weighted_by_rank,
    weighted_by_neighbour,
    other_targets,
    columns_for_rows,
    layers_read_other_rows,
    layers_attend_over_rows,
    experts_choose_tokens,
    balanced_experts,
]


@pytest.mark.parametrize("loss", MEETING, ids=lambda loss: loss.__name__)
def test_rows_that_meet_are_refused_or_right(loss):
    meeting = case(loss)
    pipelined = meeting.pipelined(mesh_of(**SIZES))
    try:
        jax.eval_shape(pipelined, meeting.params, *meeting.inputs)
    except jgt.InputError:
        return
    assert_exact(meeting, mesh_of(**SIZES))


# -- rows by themselves -------------------------------------------------------------------------------------------


def neighbours_are_pairs(params, batch):
    first, second = rows_of(params, batch).reshape(-1, 2).T
    return jnp.mean(jax.nn.softplus(first - second))


def every_row_twice(params, batch):
    return jnp.mean(rows_of(params, jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), batch)))


def normalized_weights(params, batch):
    return jnp.sum(rows_of(params, batch) * (length_of(batch) / jnp.sum(length_of(batch))))


def softmax_of_weights(params, batch):
    return jnp.sum(rows_of(params, batch) * jax.nn.softmax(length_of(batch)))


def weights_over_the_largest(params, batch):
    return jnp.mean(rows_of(params, batch) * (length_of(batch) / jnp.max(length_of(batch))))


def mapped_over_rows(params, batch):
    return jnp.mean(jax.vmap(lambda row: rows_of(params, jax.tree.map(lambda x: x[None], row))[0])(batch))


def nothing_without_weights(params, batch):
    return jnp.where(jnp.any(batch["weights"] > 0), jnp.mean(rows_of(params, batch)), 0.0)


ALONE = [
    neighbours_are_pairs,
    every_row_twice,
    normalized_weights,
    softmax_of_weights,
    weights_over_the_largest,
    mapped_over_rows,
    nothing_without_weights,
]


@pytest.mark.parametrize("loss", ALONE, ids=lambda loss: loss.__name__)
def test_rows_by_themselves_are_right(loss):
    assert_exact(case(loss), mesh_of(**SIZES))
