"""What is refused of rules for experts, each with its line and with what would fit."""

import jax
import jax.numpy as jnp
import pytest
from mixture import loss_of, make, mixed, route, rules_of

import jgt
from jgt import signal

MESH = {"data": 2, "expert": 4}


def refused(change=None, mesh=MESH, count=8, layer=mixed):
    """The message for rules that were changed."""
    rules = rules_of(mesh)
    if change is not None:
        change(rules)
    params, x = make(jax.random.key(0), count, 16, 24), jnp.ones((8, 4, 16))
    with pytest.raises(jgt.InputError) as error:
        jgt.place(loss_of(layer, 2), rules, jgt.make_mesh(mesh), params, x)
    return str(error.value)


def of_moe(**keys):
    return lambda rules: rules["signals"]["**/moe"]["experts"].update(keys)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"room": 0.5}, "room is a number from 1 to 1024, not the number 0.5"),
        ({"room": "all"}, "room is a number from 1 to 1024"),
        ({"exchange": "gather"}, "the text 'gather' is not one of all-to-all"),
        ({"over": "rounded"}, "is not one of rounds, drop"),
        ({"axis": "experts"}, "the mesh has no axis 'experts'. Did you mean 'expert'?"),
        ({"axes": "expert"}, "unknown key. Did you mean 'axis'?"),
    ],
)
def test_wrong_values(keys, said):
    assert said in refused(of_moe(**keys))


def test_an_axis_is_needed():
    assert "needs the mesh axis that holds the experts" in refused(lambda rules: rules["signals"]["**/moe"]["experts"].pop("axis"))


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


def test_a_function_that_mixes_rows():
    def centred(rows, sizes, weights):
        return jax.lax.ragged_dot(rows - jnp.mean(rows, axis=0, keepdims=True), weights["up"], sizes)

    def layer(params, x, choose, bias):
        with signal.context("moe"):
            return signal.experts(centred, {"up": params["up"]}, x, *route(params, x, choose, bias))

    message = refused(lambda rules: rules["signals"]["**/moe"].update(params={"up": ["expert", None, None]}), layer=layer)
    assert "does not map each row on its own" in message
    assert "tests/replacements/experts/test_experts_rules.py:" in message


def test_tokens_that_the_axes_do_not_divide():
    params, x = make(jax.random.key(0), 8, 16, 24), jnp.ones((6, 4, 16))
    with pytest.raises(jgt.InputError, match="divide"):
        jgt.place(loss_of(mixed, 2), rules_of(MESH), jgt.make_mesh(MESH), params, x)
