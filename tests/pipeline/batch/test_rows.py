"""Losses in which rows of the batch interact. A microbatch lacks some of the rows, so the loss is refused unless it is right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import case, decoded, embed, logits_of, mlp, nats, run_layers
from rows import length_of, load_balance, rows_of, shapes, with_a_loss_of_each_layer

import jgt

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
    tokens = nats(decoded(params, batch), batch).reshape(-1)
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


def test_a_program_with_a_step_for_each_row_is_refused_where_it_differs():
    """jax.vmap calls a callback once for each row."""

    def loss(params, batch):
        rows = rows_of(params, batch)
        jax.vmap(lambda row: jax.debug.callback(lambda x: None, row))(rows)
        return jnp.mean(rows)

    line = loss.__code__.co_firstlineno + 2
    with pytest.raises(
        jgt.InputError, match=rf"test_rows\.py:{line}.* at one batch size is .* at another. Write it so that only its shapes"
    ):
        shapes(case(loss))


def layers_with_experts(params, batch):
    def scaled(rows, sizes, weights):
        # A kernel's grid is such a number: no power of the batch size.
        grid = rows.shape[0] + 5
        return (rows + grid) - grid

    def layer(x, weights):
        choice = jnp.zeros((*x.shape[:-1], 1), jnp.int32)
        return mlp(jgt.signal.experts(scaled, jnp.ones((2, 1)), x, choice, jnp.ones(choice.shape)), weights)

    return jnp.mean(rows_of(params, batch, layer))


def test_a_call_of_experts_may_look_at_its_number_of_rows():
    shapes(case(layers_with_experts), microbatches=8)
