"""Losses in which each row is used by itself, or values are meant of one microbatch: they are taken, and are right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import assert_exact, case, decoded, embed, logits_of, make_batch, mesh_of, mlp, nats, run_layers
from rows import SIZES, length_of, load_balance, rows_of, shapes, with_a_loss_of_each_layer

import jgt
from jgt.signal import context, per_microbatch

# -- meant of one microbatch --------------------------------------------------------------------------------------


def balance_in_a_signal(params, batch):
    def layer(x, weights):
        x = mlp(x, weights)
        with context("balance"):
            return x, load_balance(x)

    return with_a_loss_of_each_layer(layer, params, batch)


def capacity_in_a_signal(params, batch):
    """Switch (arXiv 2101.03961): the first tokens that choose an expert get it, counted over the whole batch."""

    def layer(x, weights):
        x = mlp(x, weights)
        with context("balance"):
            tokens = x.reshape(-1, x.shape[-1])
            chosen = jax.nn.one_hot(jnp.argmax(tokens, axis=-1), tokens.shape[-1])
            place = jnp.sum(jnp.cumsum(chosen, axis=0) * chosen, axis=-1)
            kept = place <= tokens.shape[0] // 4
            return jnp.where(kept[:, None], tokens, 0).reshape(x.shape)

    return jnp.mean(rows_of(params, batch, layer))


def capacity_as_the_model_says(params, batch):
    with per_microbatch():
        return capacity_in_a_signal(params, batch)


def test_a_model_may_say_itself_what_is_meant_of_one_microbatch():
    assert shapes(case(capacity_as_the_model_says)).shape == ()


@pytest.mark.parametrize("loss", [balance_in_a_signal, capacity_in_a_signal], ids=lambda loss: loss.__name__)
def test_what_is_meant_of_one_microbatch_is_named(loss):
    with pytest.raises(jgt.InputError, match=r"name its signal under pipeline\.per_microbatch"):
        shapes(case(loss))
    shapes(case(loss), per_microbatch=("layers/balance",))


def test_a_signal_of_its_own_does_not_excuse_what_was_mixed_before_it():
    def loss(params, batch):
        rows = rows_of(params, batch)[::-1]
        with context("balance"):
            return jnp.mean(rows * length_of(batch))

    with pytest.raises(jgt.InputError, match="rev works along the rows"):
        shapes(case(loss), per_microbatch=("balance",))


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


def branch_by_inputs(params, batch):
    rows = rows_of(params, batch)
    return jnp.mean(jax.lax.cond(jnp.sum(batch["weights"]) > 10, lambda x: x * 0.5, lambda x: x, rows))


def statistic_in_a_region(params, batch):
    total = jnp.sum(length_of(batch))
    return jax.checkpoint(lambda rows, total: jnp.sum(rows * length_of(batch) / total))(rows_of(params, batch), total)


def last_tokens(params, batch):
    x = run_layers(params, embed(params, batch))
    last = x[jnp.arange(x.shape[0]), jnp.maximum(length_of(batch).astype(jnp.int32) - 1, 0)]
    return jnp.mean(logits_of(params, last[:, None]) ** 2)


def flat_targets(params, batch):
    logits = decoded(params, batch)
    flat, targets = jax.nn.log_softmax(logits).reshape(-1, logits.shape[-1]), batch["targets"].reshape(-1)
    return -jnp.mean(flat[jnp.arange(targets.shape[0]), targets])


def preferred_in_two_halves(params, batch):
    """DPO as trainers write it: chosen and rejected rows pass through the model in one batch."""
    both = {key: jnp.concatenate([value, (value + 1) % 16]) for key, value in batch.items()}
    chosen, rejected = jnp.split(rows_of(params, both), 2)
    return jnp.mean(jax.nn.softplus(chosen - rejected))


def arrays_of_the_batch_size(params, batch):
    rows = rows_of(params, batch)
    return jnp.sum(rows / np.array([rows.shape[0]], np.float32)) + jnp.sum(rows * np.full(rows.shape, 1 / rows.shape[0], np.float32))


def a_token_for_each_row(params, batch):
    """A class token, as ViTs repeat it, and positions that are tiled along both dims."""
    x = embed(params, batch)
    token = jnp.tile(params["embed"][:1][None], (x.shape[0], 1, 1))
    x = jnp.concatenate([token, x], axis=1) + jnp.tile(jnp.array([0.0, 0.5]), (x.shape[0], 3))[:, 1:, None]
    return jnp.mean(logits_of(params, run_layers(params, x))[:, 0] ** 2)


def entries_for_each_row(params, batch):
    x = run_layers(params, embed(params, batch))
    heads = jnp.tile(params["embed"][:2], (x.shape[0], 1)).reshape(-1, 2, x.shape[-1])
    return jnp.mean(jnp.sin(jnp.einsum("bhd,bsd->bhs", heads, x))) + jnp.mean(logits_of(params, x) ** 2)


def behind_barriers(params, batch):
    """Weights and activations that wait for each other, in layers and around them."""
    x, table, scale = jax.lax.optimization_barrier((embed(params, batch), params["unembed"], jnp.float32(2)))

    def layer(x, weights):
        x, weights = jax.lax.optimization_barrier((x, weights))
        return mlp(x, weights)

    losses = nats(logits_of({"unembed": table * scale}, run_layers(params, x, layer)), batch)
    total, count, penalty = jax.lax.optimization_barrier((jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"]), jnp.sum(table**2)))
    return total / count + 0.1 * penalty


def systems_of_each_row(params, batch):
    """A ridge regression over the tokens of each row, and the weights' own system with rows on its right-hand side."""

    def layer(x, weights):
        gram = jnp.eye(8)[None] + 0.1 * jnp.einsum("bsd,bse->bde", x, x)
        square = weights["up"][:, :8] + 4 * jnp.eye(8)
        fitted = jnp.linalg.solve(gram, x.swapaxes(1, 2)).swapaxes(1, 2)
        return mlp(fitted + jnp.linalg.solve(square, x.reshape(-1, 8).T).T.reshape(x.shape), weights)

    x = run_layers(params, embed(params, batch), layer)
    return jnp.mean(jnp.linalg.slogdet(jnp.eye(8)[None] + jnp.einsum("bsd,bse->bde", x, x))[1]) + jnp.mean(logits_of(params, x) ** 2)


ALONE = [
    a_token_for_each_row,
    entries_for_each_row,
    behind_barriers,
    systems_of_each_row,
    neighbours_are_pairs,
    every_row_twice,
    normalized_weights,
    softmax_of_weights,
    weights_over_the_largest,
    mapped_over_rows,
    nothing_without_weights,
    branch_by_inputs,
    statistic_in_a_region,
    last_tokens,
    flat_targets,
    preferred_in_two_halves,
    arrays_of_the_batch_size,
]


@pytest.mark.parametrize("loss", ALONE, ids=lambda loss: loss.__name__)
def test_rows_by_themselves_are_right(loss):
    assert_exact(case(loss), mesh_of(**SIZES))


# -- taken, and compared elsewhere --------------------------------------------------------------------------------


def attention(params, batch):
    """Attention with a segment mask, and with heads folded into the batch."""
    same = batch["targets"][:, :, None] == batch["targets"][:, None, :]

    def layer(x, weights):
        b, s, d = x.shape
        heads = x.reshape(b, s, 2, d // 2)
        x = x + jax.nn.dot_product_attention(heads, heads, heads, mask=same[:, None], is_causal=True).reshape(b, s, d)
        folded = heads.transpose(0, 2, 1, 3).reshape(b * 2, s, d // 2)
        scores = jax.nn.softmax(folded @ folded.swapaxes(1, 2), axis=-1) @ folded
        return mlp(x + scores.reshape(b, 2, s, d // 2).transpose(0, 2, 1, 3).reshape(b, s, d), weights)

    return jnp.mean(rows_of(params, batch, layer))


def online_softmax(params, batch):
    """A loop over the sequence, as in flash attention."""

    def layer(x, weights):
        def step(carry, key):
            largest, total, sum_ = carry
            score = jnp.einsum("bsd,bd->bs", x, key)
            new = jnp.maximum(largest, score)
            scale, weight = jnp.exp(largest - new), jnp.exp(score - new)
            return (new, total * scale + weight, sum_ * scale[..., None] + weight[..., None] * key[:, None]), None

        start = (jnp.full(x.shape[:2], -1e30), jnp.zeros(x.shape[:2]), jnp.zeros(x.shape))
        (_, total, sum_), _ = jax.lax.scan(jax.checkpoint(step), start, x.swapaxes(0, 1))
        return mlp(x + sum_ / total[..., None], weights)

    return jnp.mean(rows_of(params, batch, layer))


def experts_of_each_row(params, batch):
    """Each row has its own capacity. How often an expert is chosen is a sum over the batch."""

    def layer(carry, weights):
        x, counts = carry
        expert = jnp.argmax(x, axis=-1)
        chosen = jax.nn.one_hot(expert, x.shape[-1])
        kept = jnp.sum(jnp.cumsum(chosen, axis=1) * chosen, axis=-1) <= 2
        return (mlp(jnp.where(kept[..., None], x, 0), weights), counts + jnp.zeros(x.shape[-1]).at[expert.reshape(-1)].add(1.0)), None

    x = embed(params, batch)
    with context("layers"):
        (x, counts), _ = jax.lax.scan(layer, (x, jnp.zeros(x.shape[-1])), params["layers"])
    return jnp.mean(nats(logits_of(params, x), batch)) + jnp.sum(counts) / batch["tokens"].size


def chunks_of_the_sequence(params, batch):
    x = run_layers(params, embed(params, batch))
    chunks = (x.reshape(x.shape[0], 2, -1, x.shape[-1]).swapaxes(0, 1), batch["targets"].reshape(x.shape[0], 2, -1).swapaxes(0, 1))

    def step(total, chunk):
        return total + jnp.sum(nats(logits_of(params, chunk[0]), {"targets": chunk[1]})), None

    return jax.lax.scan(jax.checkpoint(step), 0.0, chunks)[0] / batch["tokens"].size


def until_each_row_is_small(params, batch):
    def small(x):
        return jax.lax.while_loop(lambda y: jnp.max(jnp.abs(y)) > 0.3, lambda y: y * 0.7, jax.lax.stop_gradient(x))

    return jnp.mean(rows_of(params, batch, lambda x, weights: mlp(x, weights) + jax.vmap(small)(x)))


@jax.custom_vjp
def scaled(x, weight):
    return x * weight[None, None]


scaled.defvjp(
    lambda x, weight: (x * weight[None, None], (x, weight)), lambda kept, g: (g * kept[1][None, None], jnp.sum(g * kept[0], axis=(0, 1)))
)


def derivatives_of_their_own(params, batch):
    return jnp.mean(rows_of(params, batch, lambda x, weights: scaled(jax.nn.relu(mlp(x, weights)), jnp.sum(weights["up"], axis=1))))


def dropped_at_random(params, batch, key):
    keys = jax.random.split(key, params["layers"]["up"].shape[0])

    def layer(x, weights_key):
        weights, key = weights_key
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), mlp(x, weights), 0), None

    x = embed(params, batch)
    with context("layers"):
        x, _ = jax.lax.scan(layer, x, (params["layers"], keys))
    return jnp.mean(nats(logits_of(params, x), batch))


def transforms_of_the_sequence(params, batch):
    def layer(x, weights):
        x = jnp.fft.ifft(jnp.fft.fft(x, axis=1) * 1j, axis=1).imag
        kernel = jnp.ones((3, x.shape[-1], x.shape[-1]))
        x = jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        return mlp(jax.lax.associative_scan(jnp.add, jnp.sort(x, axis=-1), axis=1), weights)

    return jnp.mean(rows_of(params, batch, layer))


TAKEN = [
    a_token_for_each_row,
    entries_for_each_row,
    behind_barriers,
    systems_of_each_row,
    attention,
    online_softmax,
    experts_of_each_row,
    chunks_of_the_sequence,
    until_each_row_is_small,
    derivatives_of_their_own,
    dropped_at_random,
    transforms_of_the_sequence,
]


@pytest.mark.parametrize("loss", TAKEN, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("microbatches", [4, 8])
def test_rows_by_themselves_are_taken(loss, microbatches):
    key = (jax.random.key(0),) if loss is dropped_at_random else ()
    taken = case(loss, None, make_batch(), *key)
    assert shapes(taken, microbatches=microbatches).shape == ()
