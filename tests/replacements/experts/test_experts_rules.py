"""What is refused of rules for experts, each with its line and with what would fit."""

import jax
import jax.numpy as jnp
import pytest
from expert_mixture import loss_of, make, mixed, route, rules_of

import jgt
from jgt import signal

MESH = {"data": 2, "expert": 4}


def refused(change=None, mesh=MESH, count=8, layer=mixed, embed=16):
    """The message for rules that were changed."""
    rules = rules_of(mesh)
    if change is not None:
        change(rules)
    params, x = make(jax.random.key(0), count, embed, 24), jnp.ones((8, 4, embed))
    with pytest.raises(jgt.InputError) as error:
        jgt.place(loss_of(layer, 2), rules, jgt.make_mesh(mesh), params, x)
    return str(error.value)


def of_moe(**keys):
    return lambda rules: rules["signals"]["**/moe"]["experts"].update(keys)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"capacity_factor": 0.5}, "0.5 is too small; it must be at least 1"),
        ({"capacity_factor": "all"}, "capacity_factor: must be a number, not the text 'all'"),
        ({"exchange": "gather"}, "'gather' is not one of all-to-all"),
        ({"over": "rounded"}, "is not one of rounds, drop"),
        ({"axis": "experts"}, "the mesh has no axis 'experts'. Did you mean 'expert'?"),
        ({"axes": "expert"}, "unknown key. Did you mean 'axis'?"),
    ],
)
def test_wrong_values(keys, said):
    assert said in refused(of_moe(**keys))


def test_an_axis_is_needed():
    assert "the key 'axis' is missing: the mesh axis that holds the experts" in refused(
        lambda rules: rules["signals"]["**/moe"]["experts"].pop("axis")
    )


def test_the_axis_divides_the_experts():
    assert "expert=4 does not divide 6 experts. Sizes that do: 1, 2, 3, 6" in refused(count=6)


def test_the_tokens_are_split_over_the_axis():
    message = refused(lambda rules: rules["axes"].update(batch=["data"]))
    assert "the tokens are not split over expert" in message
    assert "axes: {batch: [..., expert]}" in message


def test_the_axis_splits_no_other_dim_of_the_weights():
    message = refused(lambda rules: rules["signals"]["**/moe"]["params"].update({"{gate,up}": [None, None, "expert"]}))
    assert "expert holds the experts, so it can split dim 0 of gate [8, 16, 24] only" in message


def test_a_rule_without_a_call():
    def dense(params, x, choose, bias):
        with signal.context("moe"):
            return x @ params["router"] @ params["router"].T

    assert "no jgt.signal.experts is called at this signal or below it" in refused(layer=dense)


def centred(rows, sizes, weights):
    """Over all rows."""
    return rows - jnp.mean(rows, axis=0, keepdims=True)


def centred_by_expert(rows, sizes, weights):
    """Over the rows of each expert, of which a device may have a part."""
    own = jax.nn.one_hot(jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(rows)), side="right"), len(sizes))
    return rows - own @ (own.T @ rows / jnp.maximum(sizes, 1)[:, None])


def by_its_place(rows, sizes, weights):
    return rows * jnp.arange(len(rows))[:, None]


def less_the_row_before(rows, sizes, weights):
    return rows - jnp.roll(rows, 1, axis=0)


def by_the_size_of_its_group(rows, sizes, weights):
    return rows / jnp.sum(sizes)


def first_alone(rows, sizes, weights):
    """The first expert of all is a special one, but each device has a first one."""
    expert = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(rows))
    return jnp.where((expert == 0)[:, None], rows, 2 * rows)


def centred_if_wide(rows, sizes, weights):
    return centred(rows, sizes, weights) if rows.shape[1] > 100 else rows


def centred_in_heads(rows, sizes, weights):
    """With a number of columns that no other width has."""
    heads = rows.reshape(len(rows), 4, 32)
    return (heads - jnp.mean(heads, axis=0, keepdims=True)).reshape(rows.shape)


def through(fn):
    """A layer whose experts run `fn` in front of a matmul."""

    def run(rows, sizes, weights):
        return jax.lax.ragged_dot(fn(rows, sizes, weights), weights["up"], sizes)

    def layer(params, x, choose, bias):
        with signal.context("moe"):
            return signal.experts(run, {"up": params["up"]}, x, *route(params, x, choose, bias))

    return layer


def only_up(rules):
    rules["signals"]["**/moe"].update(params={"up": ["expert", None, None]})


@pytest.mark.parametrize(
    ("fn", "embed"),
    [
        (centred, 16),
        (centred, 128),
        (centred_by_expert, 16),
        (by_its_place, 128),
        (less_the_row_before, 128),
        (by_the_size_of_its_group, 128),
        (first_alone, 128),
        (centred_if_wide, 128),
        (centred_in_heads, 128),
    ],
)
def test_functions_that_mix_rows(fn, embed):
    message = refused(only_up, layer=through(fn), embed=embed)
    assert "does not map each row on its own" in message
    assert "tests/replacements/experts/test_experts_rules.py:" in message


def with_heads(rows, sizes, weights):
    heads = rows.reshape(len(rows), 4, 32)
    return (heads / jnp.sqrt(jnp.mean(heads**2, axis=-1, keepdims=True))).reshape(rows.shape)


def normalised(rows, sizes, weights):
    return (rows - jnp.mean(rows, axis=-1, keepdims=True)) / jnp.std(rows, axis=-1, keepdims=True)


@pytest.mark.parametrize("fn", [with_heads, normalised])
def test_functions_of_each_row_have_any_width(fn):
    rules = rules_of(MESH)
    only_up(rules)
    jgt.place(loss_of(through(fn), 2), rules, jgt.make_mesh(MESH), make(jax.random.key(0), 8, 128, 24), jnp.ones((8, 4, 128)))


def test_tokens_that_the_axes_do_not_divide():
    params, x = make(jax.random.key(0), 8, 16, 24), jnp.ones((6, 4, 16))
    with pytest.raises(jgt.InputError, match="divide"):
        jgt.place(loss_of(mixed, 2), rules_of(MESH), jgt.make_mesh(MESH), params, x)
