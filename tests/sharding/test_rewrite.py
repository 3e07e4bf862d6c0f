"""Constraints land where values leave a signal, whatever the program is made of, and change no value and no gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import all_constraints, assert_same, assert_same_derivatives, constraints, derivatives
from rewrites import MESH, W, X, block, name_of, out_rules, plain, scan, unsharded

import jgt
from jgt.signal import context, tensor

# -- one program a kind: the block's output leaves its signal inside of it


def jitted(w, x):
    return jax.jit(block)(x, w) * 2


def jit_in_jit(w, x):
    return jax.jit(lambda h: jax.jit(block)(h, w) * 2)(x)


def scan_of_weights(w, x):
    return jax.lax.scan(lambda h, w: (h + block(h, w), None), x, jnp.stack([w, w * 2]))[0]


def scan_in_scan(w, x):
    return jax.lax.scan(lambda h, _: (scan(w, h) * 2, None), x, None, length=2)[0]


def fori(w, x):
    return jax.lax.fori_loop(0, 3, lambda _, h: block(h, w), x)


def cond(w, x):
    return jax.lax.cond(x.sum() > 100, lambda h: h, lambda h: block(h, w), x)


def switch(w, x):
    return jax.lax.switch(1, [lambda h: h, lambda h: block(h, w), lambda h: h * 2], x)


def remat(w, x):
    return jax.checkpoint(block)(x, w) * 2


def remat_in_scan(w, x):
    return jax.lax.scan(lambda h, _: (jax.checkpoint(block)(h, w), None), x, None, length=3)[0]


def custom_jvp(w, x):
    fn = jax.custom_jvp(block)

    @fn.defjvp
    def rule(primals, tangents):
        h = block(*primals)
        return h, (1 - h**2) * (tangents[0] @ primals[1] + primals[0] @ tangents[1])

    return fn(x, w) * 2


def custom_vjp(w, x):
    fn = jax.custom_vjp(block)

    def forward(h, w):
        out = block(h, w)
        return out, (h, w, out)

    def backward(residuals, cotangent):
        h, w, out = residuals
        inner = cotangent * (1 - out**2)
        return inner @ w.T, h.T @ inner

    fn.defvjp(forward, backward)
    return fn(x, w) * 2


KINDS = [
    plain,
    jitted,
    jit_in_jit,
    scan,
    scan_of_weights,
    scan_in_scan,
    fori,
    cond,
    switch,
    remat,
    remat_in_scan,
    custom_jvp,
    custom_vjp,
]


@pytest.mark.parametrize("model", KINDS, ids=name_of)
def test_a_constraint_lands_where_the_value_leaves_its_signal(model):
    expected = [("block", P("data", "tensor"))] * (2 if model is plain else 1)
    assert constraints(jgt.shard(model, out_rules(), MESH), W, X) == expected


@pytest.mark.parametrize("model", KINDS, ids=name_of)
def test_values_and_gradients_stay(model):
    assert_same(derivatives(jgt.shard(model, out_rules(), MESH), W, X), unsharded(model))


@pytest.mark.parametrize("model", KINDS, ids=name_of)
def test_values_and_gradients_stay_with_another_backward_spec(model):
    rules = out_rules(backward={"out": ["tensor", "data"]})
    assert_same(derivatives(jgt.shard(model, rules, MESH), W, X), unsharded(model))


# A custom rule computes its own cotangents: nothing inside of it has one.
@pytest.mark.parametrize("model", [m for m in KINDS if m not in (custom_jvp, custom_vjp)], ids=name_of)
def test_the_cotangent_has_its_own_spec(model):
    sharded = jgt.shard(model, out_rules(backward={"out": ["tensor", "data"]}), MESH)
    found = constraints(jax.grad(lambda w, x: sharded(w, x).sum()), W, X)
    assert set(found) == {("block", P("data", "tensor")), ("block", P("tensor", "data"))}


@pytest.mark.parametrize("model", [custom_jvp, custom_vjp], ids=name_of)
def test_the_rule_of_a_derivative_is_rewritten(model):
    sharded = jgt.shard(model, out_rules(), MESH)
    assert ("block", P("data", "tensor")) in constraints(jax.grad(lambda w, x: sharded(w, x).sum()), W, X)


@pytest.mark.parametrize("model", [plain, scan, remat, custom_jvp], ids=name_of)
def test_forward_mode_and_second_derivatives_go_through(model):
    sharded = jgt.shard(model, out_rules(), MESH)

    def several(fn):
        scalar = lambda w: fn(w, X).mean()  # noqa: E731
        return (
            jax.jvp(fn, (W, X), (W, X))[1],
            jax.vjp(fn, W, X)[1](X / 32),
            jax.jvp(jax.grad(scalar), (W,), (W,)),
            jax.linearize(scalar, W)[1](W),
        )

    assert_same(jax.jit(several, static_argnums=0)(sharded), jax.jit(several, static_argnums=0)(model), atol=2e-6)


def test_jacfwd_goes_through():
    sharded = jgt.shard(plain, out_rules(), MESH)
    assert_same(jax.jit(jax.jacfwd(sharded, 1))(W, X), jax.jit(jax.jacfwd(plain, 1))(W, X))


# -- jit: one cached program under two signals


@jax.jit
def cached(h, w):
    return jnp.tanh(h @ w)


def shared(w, x):
    with context("a"):
        x = cached(x, w)
    x = x + 1
    with context("b"):
        x = cached(x, w)
    return x + 1


def test_a_cached_program_is_told_apart_by_its_signal():
    rules = jgt.make_rules({"signals": {"a": {"out": ["data", None]}, "b": {"out": [None, "tensor"]}}, "default": "replicate"})
    sharded = jgt.shard(shared, rules, MESH)
    assert constraints(sharded, W, X) == [("a", P("data", None)), ("b", P(None, "tensor"))]
    assert_same_derivatives(sharded, shared, W, X)


def shared_tensor(w, x):
    inner = jax.jit(lambda h: tensor(jnp.tanh(h @ w), "h"))
    with context("a"):
        x = inner(x)
    with context("b"):
        x = inner(x)
    return x


def test_a_cached_program_with_a_tensor_is_rewritten_once_for_each_signal():
    rules = jgt.make_rules(
        {"signals": {"a": {"tensors": {"h": ["data", None]}}, "b": {"tensors": {"h": [None, "tensor"]}}}, "default": "replicate"}
    )
    assert constraints(jgt.shard(shared_tensor, rules, MESH), W, X) == [("a", P("data", None)), ("b", P(None, "tensor"))]


# -- what is constrained


def test_only_the_value_that_leaves_is_constrained():
    def model(w, x):
        with context("block"):
            h = jnp.tanh(x @ w)
            h = h * 2
        return h + 1

    assert len(constraints(jgt.shard(model, out_rules(), MESH), W, X)) == 1


def test_a_value_that_leaves_two_signals_takes_the_outer_rule():
    def model(w, x):
        with context("outer"), context("inner"):
            return jnp.tanh(x @ w)

    rules = jgt.make_rules(
        {"signals": {"outer": {"out": ["data", None]}, "outer/inner": {"out": [None, "tensor"]}}, "default": "replicate"}
    )
    assert constraints(jgt.shard(model, rules, MESH), W, X) == [("outer/inner", P("data", None))]


def test_a_value_that_leaves_an_outer_signal_takes_the_outer_rule():
    def model(w, x):
        with context("outer"):
            with context("inner"):
                h = x @ w
            return jnp.tanh(h)

    rules = jgt.make_rules(
        {"signals": {"outer": {"out": ["data", None]}, "outer/inner": {"out": [None, "tensor"]}}, "default": "replicate"}
    )
    assert constraints(jgt.shard(model, rules, MESH), W, X) == [("outer/inner", P(None, "tensor")), ("outer", P("data", None))]


def test_all_values_that_leave_are_constrained_by_rank():
    def model(w, x):
        with context("block"):
            a, b, c = x @ w, x.sum(0), (x * 2)[None]
        return a.sum() + b.sum() + c.sum()

    assert constraints(jgt.shard(model, out_rules(spec=("data", "tensor")), MESH), W, X) == [("block", P("data", "tensor"))]
    assert constraints(jgt.shard(model, out_rules(spec=("tensor",)), MESH), W, X) == [("block", P("tensor"))]
    assert len(constraints(jgt.shard(model, out_rules(spec=(..., "tensor")), MESH), W, X)) == 3


def test_integers_that_leave_are_not_constrained():
    def model(w, x):
        with context("block"):
            h, index = x @ w, jnp.argmax(x, -1)[:, None] * jnp.ones((1, 8), int)
        return h + index

    assert len(constraints(jgt.shard(model, out_rules(), MESH), W, X)) == 1


def test_a_named_integer_is_constrained():
    def model(w, x):
        with context("block"):
            index = tensor(jnp.argmax(x @ w, -1), "index")
        return index

    rules = jgt.make_rules({"signals": {"block": {"tensors": {"index": ["data"]}}}, "default": "replicate"})
    assert constraints(jgt.shard(model, rules, MESH), W, X) == [("block", P("data"))]


def test_a_dim_of_size_one_is_not_constrained():
    def model(w, x):
        with context("block"):
            return (x @ w)[:1]

    assert constraints(jgt.shard(model, out_rules(), MESH), W, X) == [("block", P(None, "tensor"))]


def test_parameters_and_inputs_are_constrained_at_the_top():
    rules = jgt.make_rules({"axes": {"batch": ["data"]}, "signals": {"block": {"params": {"w": [None, "tensor"]}}}})
    sharded = jgt.shard(lambda p, x, n: block(x, p["w"]) * n, rules, MESH)
    assert all_constraints(sharded, {"w": W}, X, jnp.float32(2)) == [("", P(None, "tensor")), ("", P("data", None))]


def test_a_random_key_is_left_alone():
    rules = jgt.make_rules({"axes": {"batch": ["data"]}, "default": "replicate"})
    sharded = jgt.shard(lambda w, x, key: block(x, w) + jax.random.normal(key, (8,))[None], rules, MESH)
    assert len(all_constraints(sharded, W, X, jax.random.key(0))) == 2


# -- arguments


def test_flags_none_and_keywords_pass_through():
    def model(w, x, double, nothing, *, scale, name=None):
        assert nothing is None
        assert name == "model"
        return block(x, w) * (2 if double else 1) * scale

    sharded = jgt.shard(model, out_rules(), MESH)
    for double in (True, False):
        np.testing.assert_allclose(
            sharded(W, X, double, None, scale=jnp.float32(3), name="model"), model(W, X, double, None, scale=3, name="model"), atol=5e-6
        )


def test_static_arguments_of_jit_stay_static():
    sharded = jax.jit(jgt.shard(lambda w, x, n: block(x, w) * n, out_rules(), MESH), static_argnums=2)
    np.testing.assert_allclose(sharded(W, X, 3), 3 * np.tanh(X @ W), atol=1e-5)


def test_outputs_keep_their_tree():
    sharded = jgt.shard(lambda w, x: {"h": block(x, w), "pair": (x, None), "n": 3}, out_rules(), MESH)
    out = sharded(W, X)
    assert set(out) == {"h", "pair", "n"}
    assert out["pair"][1] is None


def test_the_wrapped_function_keeps_its_name():
    assert jgt.shard(plain, out_rules(), MESH).__name__ == "plain"


def test_a_call_without_parameters_is_refused():
    with pytest.raises(
        ValueError, match="the first positional argument must hold the parameters, but none was given; pass them by position, not by name"
    ):
        jgt.shard(lambda **kw: kw["x"], out_rules(), MESH)(x=X)


# -- rules are part of what is traced


def test_other_rules_give_another_layout():
    rows, columns = out_rules(spec=("data", None)), out_rules(spec=(None, "data"))
    fn = lambda w, x: block(x, w)  # noqa: E731
    layouts = [jax.jit(jgt.shard(fn, rules, MESH))(W, X).sharding.spec for rules in (rows, columns, rows)]
    assert layouts == [P("data"), P(None, "data"), P("data")]


def test_other_shapes_are_checked_again():
    sharded = jax.jit(jgt.shard(plain, out_rules(), MESH))
    sharded(W, X)
    with pytest.raises(
        jgt.InputError, match="block: dim 0 of the value that leaves block \\[3, 8\\] has size 3, which data=4 does not divide"
    ):
        sharded(W, X[:3])


def test_a_tensor_and_the_value_that_leaves_may_be_the_same():
    def model(w, x):
        with context("block"):
            return tensor(jnp.tanh(x @ w), "h")

    rules = jgt.make_rules({"signals": {"block": {"tensors": {"h": [None, "tensor"]}}}, "default": "replicate"})
    assert constraints(jgt.shard(model, rules, MESH), W, X) == [("block", P(None, "tensor"))]


def test_no_rule_at_all_changes_nothing_but_the_parameters():
    sharded = jgt.shard(plain, jgt.make_rules({"default": "replicate"}), MESH)
    assert all_constraints(sharded, W, X) == [("", P(None, None))]


# -- gradients of parameters


def test_the_gradient_is_laid_out_like_the_optimizer_state():
    rules = jgt.make_rules({"signals": {"block": {"params": {"w": []}, "optimizer": {"w": ["data", "tensor"]}}}})
    fn = jgt.shard(lambda p, x: block(x, p["w"]).sum(), rules, MESH)
    found = all_constraints(jax.grad(fn), {"w": W}, X)
    assert found == [("", P(None, None)), ("", P("data", "tensor"))]
    assert jax.jit(jax.grad(fn))({"w": W}, X)["w"].sharding.spec == P("data", "tensor")
    assert_same(jax.jit(jax.grad(fn))({"w": W}, X), jax.jit(jax.grad(lambda p, x: block(x, p["w"]).sum()))({"w": W}, X))
