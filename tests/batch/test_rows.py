"""Losses in which rows of the batch interact. A microbatch lacks some of the rows, so the loss is refused unless it is right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import assert_exact, case, embed, logits_of, make_batch, mesh_of, mlp, nats, run_layers

import jgt
from jgt.signal import context, per_microbatch

SIZES = {"stage": 2, "data": 2}


def rows_of(params, batch, layer=mlp):
    """The loss of each row [b]."""
    return jnp.mean(nats(logits_of(params, run_layers(params, embed(params, batch), layer)), batch), axis=-1)


def length_of(batch):
    return jnp.sum(batch["weights"], axis=-1)


# -- rows meet ----------------------------------------------------------------------------------------------------


def preferred_in_the_first_half(params, batch):
    """DPO (arXiv 2305.18290) as usually written: chosen rows, then rejected ones."""
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
    """Expert choice (arXiv 2202.09368): an expert takes the best tokens of the whole batch."""

    def layer(x, weights):
        tokens = x.reshape(-1, x.shape[-1])
        scores, chosen = jax.lax.top_k(tokens[:, 0], tokens.shape[0] // 2)
        return tokens.at[chosen].add(mlp(tokens[chosen][None], weights)[0] * scores[:, None]).reshape(x.shape)

    return jnp.mean(rows_of(params, batch, layer))


def load_balance(x):
    """Switch (arXiv 2101.03961), section 2.2: a product of two means over the batch."""
    gates = jax.nn.softmax(x)
    chosen = jax.nn.one_hot(jnp.argmax(gates, axis=-1), gates.shape[-1])
    return jnp.sum(jnp.mean(gates, axis=(0, 1)) * jnp.mean(chosen, axis=(0, 1)))


def with_a_loss_of_each_layer(layer, params, batch):
    """The loss, plus the mean of the second result of each layer."""
    x = embed(params, batch)
    with context("layers"):
        x, balance = jax.lax.scan(layer, x, params["layers"])
    return jnp.mean(nats(logits_of(params, x), batch)) + jnp.mean(balance)


def balanced_experts(params, batch):
    def layer(x, weights):
        x = mlp(x, weights)
        return x, load_balance(x)

    return with_a_loss_of_each_layer(layer, params, batch)


def max_pool(params, batch):
    return jnp.mean(jax.lax.reduce_window(rows_of(params, batch), -jnp.inf, jax.lax.max, (2,), (1,), "SAME"))


def sorted_elsewhere(params, batch):
    rows = rows_of(params, batch)
    return jnp.mean(jax.pure_callback(lambda x: np.sort(np.asarray(x)), rows, rows) * length_of(batch))


def rows_of_a_table(params, batch):
    rows = rows_of(params, batch)
    return jnp.mean(rows * params["embed"][: rows.shape[0], 0])


def row_of_a_table(params, batch):
    rows = rows_of(params, batch)
    return jnp.mean(rows * params["embed"][rows.shape[0] // 2, 0])


def rows_of_the_batch_as_a_table(params, batch):
    return jnp.mean(rows_of(params, batch) * length_of(batch)[batch["targets"][:, 0]])


def the_first_rows_of_flat_tokens(params, batch):
    tokens = nats(logits_of(params, run_layers(params, embed(params, batch))), batch).reshape(-1)
    return jnp.mean(tokens[jnp.arange(batch["tokens"].shape[0])])


def rows_into_places(params, batch):
    rows = rows_of(params, batch)
    return jnp.sum(jnp.zeros(32).at[: rows.shape[0]].add(rows) * jnp.arange(32))


def shuffled(params, batch):
    rows = rows_of(params, batch)
    return jnp.mean(rows * length_of(batch)[jax.random.permutation(jax.random.key(0), rows.shape[0])])


def a_row_for_each_place(params, batch):
    rows = rows_of(params, batch)
    return jnp.sum(rows * np.linspace(0, 1, rows.shape[0], dtype=np.float32))


def a_copy_next_to_its_row(params, batch):
    """The batch and its negated copy, in pairs of neighbours. With a single row, a pair would be the row and its own copy."""
    rows = rows_of(params, batch)
    return jnp.mean(jnp.max(jnp.concatenate([rows, -rows]).reshape(-1, 2), axis=1))


# -- the whole batch decides ---------------------------------------------------------------------------------------


def branch_by_model(params, batch):
    rows = rows_of(params, batch)
    return jnp.mean(jax.lax.cond(jnp.any(rows > 3), lambda x: x * 0.5, lambda x: x, rows))


def layers_branch(params, batch):
    return jnp.mean(rows_of(params, batch, lambda x, w: jax.lax.cond(jnp.max(x) > 1, lambda x: x * 0.5, lambda x: x, mlp(x, w))))


def loop_until_all_are_small(params, batch):
    def layer(x, weights):
        small = jax.lax.while_loop(lambda y: jnp.max(jnp.abs(y)) > 0.3, lambda y: y * 0.7, jax.lax.stop_gradient(x))
        return mlp(x, weights) + small

    return jnp.mean(rows_of(params, batch, layer))


def loop_until_what_it_carries_is_small(params, batch):
    """The condition reads a value that the body computes from rows, not one that enters the loop."""

    def layer(x, weights):
        start = (jax.lax.stop_gradient(x), jnp.inf)
        small, _ = jax.lax.while_loop(lambda carry: carry[1] > 0.3, lambda carry: (carry[0] * 0.7, jnp.max(jnp.abs(carry[0]))), start)
        return mlp(x, weights) + small

    return jnp.mean(rows_of(params, batch, layer))


@jax.custom_vjp
def centred(x):
    return x


centred.defvjp(lambda x: (x, None), lambda _, g: (g - jnp.mean(g, axis=0, keepdims=True),))


def derivative_mixes_rows(params, batch):
    return jnp.mean(rows_of(params, batch, lambda x, weights: centred(mlp(x, weights))))


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))


def derivative_of_weights_is_clipped(params, batch):
    return jnp.mean(rows_of(params, batch, lambda x, weights: mlp(x, jax.tree.map(clipped, weights))))


def penalty_inside_of_a_region(params, batch):
    """A sum over the batch, and a sum that is not over the batch. Python's sum starts at 0, which must not hide this."""

    @jax.checkpoint
    def head(params, x):
        return jnp.sum(nats(logits_of(params, x), batch)) + sum([jnp.sum(params["unembed"] ** 2)])

    return head(params, run_layers(params, embed(params, batch)))


def rounded_in_a_region(params, batch):
    rows = rows_of(params, batch)
    return jnp.mean(rows) + jax.checkpoint(lambda x: (jnp.mean(x) * 10).astype(jnp.int32))(rows)


def chosen_by_a_mean(params, batch):
    @jax.checkpoint
    def head(x):
        mean = jnp.mean(x)
        return jnp.where(mean > 0.5, mean, 2.0)

    return head(rows_of(params, batch))


# -- the batch size decides ----------------------------------------------------------------------------------------


def power_of_batch_size(params, batch):
    rows = rows_of(params, batch)
    return jnp.mean(rows ** rows.shape[0])


def count_that_is_no_power(params, batch):
    rows = rows_of(params, batch)
    return jnp.sum(rows / max(rows.shape[0] - 1, 3))


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
    max_pool,
    sorted_elsewhere,
    rows_of_a_table,
    row_of_a_table,
    rows_of_the_batch_as_a_table,
    the_first_rows_of_flat_tokens,
    rows_into_places,
    shuffled,
    a_row_for_each_place,
    a_copy_next_to_its_row,
    branch_by_model,
    layers_branch,
    loop_until_all_are_small,
    loop_until_what_it_carries_is_small,
    derivative_mixes_rows,
    derivative_of_weights_is_clipped,
    penalty_inside_of_a_region,
    rounded_in_a_region,
    chosen_by_a_mean,
    power_of_batch_size,
    count_that_is_no_power,
]


def shapes(meeting, **options):
    """Traces a pipelined case, which raises the error."""
    return jax.eval_shape(meeting.pipelined(mesh_of(**SIZES), **options), meeting.params, *meeting.inputs)


@pytest.mark.parametrize("loss", MEETING, ids=lambda loss: loss.__name__)
def test_rows_that_meet_are_refused(loss):
    with pytest.raises(jgt.InputError, match=r"^pipeline: signal: .*(batch|row|sum)"):
        shapes(case(loss))


# -- one row for each microbatch ----------------------------------------------------------------------------------


def halved_unless_alone(params, batch):
    rows = rows_of(params, batch)
    return jnp.mean(rows * (1.0 if rows.shape[0] > 1 else 0.5))


def doubled_unless_alone(params, batch):
    rows = rows_of(params, batch)
    return jnp.mean(rows * 2 if rows.shape[0] > 1 else rows)


def layers_halve_unless_alone(params, batch):
    return jnp.mean(rows_of(params, batch, lambda x, weights: mlp(x, weights) * (0.5 if x.shape[0] > 1 else 1.0)))


def every_other_row(params, batch):
    return jnp.mean(rows_of(params, batch)[::2])


@pytest.mark.parametrize(
    "loss", [halved_unless_alone, doubled_unless_alone, layers_halve_unless_alone, every_other_row], ids=lambda loss: loss.__name__
)
def test_a_program_that_looks_at_its_batch_size_is_refused_at_one_row(loss):
    with pytest.raises(jgt.InputError, match="a batch of 16 and a microbatch of 1 run different programs"):
        shapes(case(loss), microbatches=8)


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
    shapes(case(capacity_as_the_model_says))


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
    logits = logits_of(params, run_layers(params, embed(params, batch)))
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


ALONE = [
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
    shapes(taken, microbatches=microbatches)
