"""Constraints land where values leave a signal, whatever the program is made of, and change no value and no gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals
from jax.sharding import PartitionSpec as P
from programs import all_constraints, assert_same, assert_same_derivatives, constraints, derivatives

import jgt
from jgt.signal import context, tensor

U = P.UNCONSTRAINED
MESH = jgt.make_mesh({"data": 4, "tensor": 2})
W = np.sin(np.arange(64, dtype=np.float32)).reshape(8, 8)
X = np.cos(np.arange(32, dtype=np.float32)).reshape(4, 8)


def out_rules(signal="block", spec=("data", "tensor"), **more):
    return jgt.make_rules({"signals": {signal: {"out": list(spec), **more}}, "default": "replicate"})


def block(h, w):
    with context("block"):
        return jnp.tanh(h @ w)


# -- one program a kind: the block's output leaves its signal inside of it


def plain(w, x):
    return block(block(x, w) * 2, w)


def jitted(w, x):
    return jax.jit(block)(x, w) * 2


def jit_in_jit(w, x):
    return jax.jit(lambda h: jax.jit(block)(h, w) * 2)(x)


def scan(w, x):
    return jax.lax.scan(lambda h, _: (block(h, w), None), x, None, length=3)[0]


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


def name_of(fn):
    return fn.__name__


@pytest.mark.parametrize("model", KINDS, ids=name_of)
def test_a_constraint_lands_where_the_value_leaves_its_signal(model):
    expected = [("block", P("data", "tensor"))] * (2 if model is plain else 1)
    assert constraints(jgt.shard(model, out_rules(), MESH), W, X) == expected


@functools.cache
def unsharded(model):
    return derivatives(model, W, X)


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


# -- shard_map


def mapped(axis_names, specs):
    def model(w, x):
        return jax.shard_map(lambda x, w: block(x, w) * 2, mesh=MESH, in_specs=(specs, P()), out_specs=specs, axis_names=axis_names)(x, w)

    return model


def test_manual_axes_are_left_to_the_shard_map():
    model = mapped({"data"}, P("data"))
    sharded = jgt.shard(model, out_rules(), MESH)
    assert constraints(sharded, W, X) == [("block", P(None, "tensor"))]
    assert_same_derivatives(sharded, model, W, X)


def test_a_manual_axis_needs_not_divide_the_local_dim():
    model = mapped({"data"}, P("data"))
    assert_same_derivatives(jgt.shard(model, out_rules(spec=(("data", "tensor"), None)), MESH), model, W, np.tile(X, (2, 1)))


def test_inside_a_fully_manual_shard_map_nothing_is_left_to_say():
    model = mapped({"data", "tensor"}, P("data"))
    sharded = jgt.shard(model, out_rules(), MESH)
    assert constraints(sharded, W, X) == []
    assert_same_derivatives(sharded, model, W, X)


@pytest.mark.parametrize("axis_names", [{"data"}, {"data", "tensor"}])
def test_a_shard_map_may_have_another_backward_spec(axis_names):
    model = mapped(axis_names, P("data"))
    sharded = jgt.shard(model, out_rules(backward={"out": ["data", None]}), MESH)
    assert_same_derivatives(sharded, model, W, X)


def around(fn, in_specs):
    """The whole function inside a shard_map over data, which splits its batch."""
    return lambda w, x: jax.shard_map(fn, mesh=MESH, in_specs=(in_specs, P("data")), out_specs=P("data"), axis_names={"data"})(w, x)


@pytest.mark.parametrize("optimizer", [{}, {"w": ["data", "tensor"]}, {"w": [None, "data"]}], ids=["none", "split", "manual only"])
def test_inside_a_shard_map_manual_axes_are_dropped_everywhere(optimizer):
    rules = jgt.make_rules(
        {
            "axes": {"batch": ["data"]},
            "signals": {"block": {"params": {"w": [["data", "tensor"], None]}, "optimizer": optimizer, "out": ["batch", "tensor"]}},
        }
    )
    plain_fn = lambda p, x: block(x, p["w"])  # noqa: E731
    sharded = around(jgt.shard(plain_fn, rules, MESH), {"w": P()})
    found = all_constraints(sharded, {"w": W}, X)
    assert found[-1] == ("block", P(None, "tensor"))
    assert ("", P("tensor", None)) in found
    assert ("", P(None, None)) in found
    assert not any("data" in str(spec) for _, spec in all_constraints(jax.grad(lambda p, x: sharded(p, x).sum()), {"w": W}, X))
    assert_same_derivatives(sharded, plain_fn, {"w": W}, X)


def test_a_manual_axis_needs_not_divide_the_local_part_of_a_parameter():
    rules = jgt.make_rules(
        {"signals": {"block": {"params": {"w": [["data", "tensor"], None]}, "optimizer": {"w": [["tensor", "data"], None]}}}}
    )
    plain_fn = lambda p, x: block(x, p["w"])  # noqa: E731
    gathered = lambda fn: lambda p, x: fn({"w": p["w"] @ jnp.ones((8, 8))}, x[:, :2])  # noqa: E731
    sharded = around(gathered(jgt.shard(plain_fn, rules, MESH)), {"w": P("data")})
    found = all_constraints(jax.grad(lambda p, x: sharded(p, x).sum()), {"w": W}, X)
    assert {spec for _, spec in found} == {P("tensor", None)}
    assert_same_derivatives(sharded, around(gathered(plain_fn), {"w": P("data")}), {"w": W}, X)


# -- vmap


def test_vmap_around_adds_a_dim_to_the_constraint():
    sharded = jgt.shard(plain, out_rules(), MESH)
    xs = np.stack([X, X + 1, X + 2])
    found = constraints(jax.vmap(sharded, (None, 0)), W, xs)
    assert [len(spec) for _, spec in found] == [3, 3]
    assert {spec[1:] for _, spec in found} == {("data", "tensor")}
    assert_same_derivatives(jax.vmap(sharded, (None, 0)), jax.vmap(plain, (None, 0)), W, xs)


def test_vmap_around_with_a_mesh_axis_lays_its_dim_over_that_axis():
    sharded = jgt.shard(plain, out_rules(spec=(None, "tensor")), MESH)
    xs = np.stack([X, X + 1, X + 2, X + 3])
    mapped = jax.vmap(sharded, (None, 0), spmd_axis_name="data")
    assert set(constraints(mapped, W, xs)) == {("block", P("data", None, "tensor"))}
    assert_same_derivatives(mapped, jax.vmap(plain, (None, 0)), W, xs)


def test_vmap_around_claims_its_mesh_axis_from_the_rules():
    sharded = jgt.shard(plain, out_rules(), MESH)
    xs = np.stack([X, X + 1, X + 2, X + 3])
    mapped = jax.vmap(sharded, (None, 0), spmd_axis_name="data")
    assert set(constraints(mapped, W, xs)) == {("block", P("data", None, "tensor"))}
    assert_same_derivatives(mapped, jax.vmap(plain, (None, 0)), W, xs)


def test_vmap_inside_leaves_its_dim_to_the_partitioner():
    def model(w, xs):
        return jax.vmap(lambda x: block(x, w) * 2)(xs)

    xs = np.stack([X, X + 1, X + 2])
    sharded = jgt.shard(model, out_rules(), MESH)
    assert constraints(sharded, W, xs) == [("block", P(U, "data", "tensor"))]
    assert_same_derivatives(sharded, model, W, xs)


def test_vmap_inside_with_a_mesh_axis():
    def model(w, xs):
        return jax.vmap(lambda x: block(x, w) * 2, spmd_axis_name="data")(xs)

    xs = np.stack([X] * 4)
    sharded = jgt.shard(model, out_rules(spec=(None, "tensor")), MESH)
    assert constraints(sharded, W, xs) == [("block", P(U, None, "tensor"))]
    assert_same_derivatives(sharded, model, W, xs)


def test_vmap_of_a_scan_inside():
    def model(w, xs):
        return jax.vmap(lambda x: scan(w, x))(xs)

    xs = np.stack([X, X + 1])
    sharded = jgt.shard(model, out_rules(), MESH)
    assert constraints(sharded, W, xs) == [("block", P(U, "data", "tensor"))]
    assert_same_derivatives(sharded, model, W, xs)


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


# -- save: what the backward pass finds


def save_rules(**actions):
    return jgt.make_rules({"signals": {"block": {"save": actions}}, "default": "replicate"})


def named(h, w):
    with context("block"):
        q = tensor(jnp.sin(h @ w), "q")
        k = tensor(jnp.cos(q @ w), "k")
        return jnp.tanh(k @ w)


def named_plain(w, x):
    return named(x, w)


def named_scan(w, x):
    return jax.lax.scan(lambda h, _: (named(h, w), None), x, None, length=3)[0]


def named_remat(w, x):
    return jax.checkpoint(named)(x, w)


def named_remat_scan(w, x):
    return jax.lax.scan(lambda h, _: (jax.checkpoint(named)(h, w), None), x, None, length=3)[0]


def residuals(fn, *args):
    """Shape, place (device or host) and source of each value saved for the backward pass, without arguments and constants."""
    found = []
    for aval, source in saved_residuals(lambda w: fn(w, *args).sum(), W):
        if "argument" not in source and "constant" not in source and aval.shape != W.shape:
            found.append((aval.shape, "host" if "<host>" in aval.str_short() else "device", source))
    return found


PER_STEP = [named_scan, named_remat_scan]
OWN_REGION = [named_remat, named_remat_scan]


def kept(model, **actions):
    """The numbers of values saved for the backward pass of a model, on the device and on the host."""
    # A step's own input is found too where a scan is recomputed.
    extra = 1 if model in PER_STEP else 0
    found = [place for _, place, _ in residuals(jgt.shard(model, save_rules(**actions), MESH), X)]
    return found.count("device") - extra, found.count("host")


@pytest.mark.parametrize("model", [named_plain, named_scan], ids=name_of)
def test_a_region_that_the_rules_make_keeps_names_and_nothing_else(model):
    assert kept(model, q="keep") == (2, 0)


@pytest.mark.parametrize("model", [named_remat, named_remat_scan], ids=name_of)
def test_a_region_of_the_model_keeps_what_it_is_told(model):
    assert kept(model, q="keep") == (1, 0)
    assert kept(model, q="keep", k="keep") == (2, 0)


@pytest.mark.parametrize("model", [named_plain, named_scan, named_remat, named_remat_scan], ids=name_of)
def test_what_is_recomputed_is_not_kept(model):
    assert kept(model, q="recompute", k="recompute") == (0, 0)
    assert kept(model, q="recompute", k="keep") == (1, 0)


@pytest.mark.parametrize("model", [named_plain, named_scan, named_remat, named_remat_scan], ids=name_of)
def test_what_is_offloaded_is_kept_on_the_host(model):
    assert kept(model, q="offload", k="recompute") == (0, 1)
    assert kept(model, **{"*": "offload"}) == (0, 2)


@pytest.mark.parametrize("model", [named_plain, named_scan, named_remat, named_remat_scan], ids=name_of)
def test_what_the_backward_pass_finds_changes_no_value(model):
    assert_same(derivatives(jgt.shard(model, save_rules(q="offload", k="recompute"), MESH), W, X), unsharded(model))


def test_a_policy_of_the_model_holds_for_all_else():
    only_k = jax.checkpoint(named, policy=jax.checkpoint_policies.save_only_these_names("k"))
    model = lambda w, x: only_k(x, w)  # noqa: E731
    assert len(residuals(model, X)) == 1
    assert kept(model, q="keep") == (2, 0)
    assert kept(model, k="recompute") == (0, 0)


@pytest.mark.parametrize(("model", "prevents"), [(named_scan, False), (named_plain, True)], ids=["scan", "plain"])
def test_a_region_that_the_rules_make_guards_itself_only_outside_a_scan(model, prevents):
    text = str(jax.make_jaxpr(jgt.shard(model, save_rules(q="keep"), MESH))(W, X))
    assert f"prevent_cse={prevents}" in text
    assert f"prevent_cse={not prevents}" not in text


def test_one_name_with_two_actions_in_one_region_is_refused():
    def model(w, x):
        with context("a"):
            x = tensor(jnp.sin(x @ w), "h")
        with context("b"):
            return tensor(jnp.sin(x @ w), "h")

    rules = jgt.make_rules({"signals": {"a": {"save": {"h": "keep"}}, "b": {"save": {"h": "offload"}}}, "default": "replicate"})
    with pytest.raises(jgt.InputError, match="save: h: offload here, but keep at rules, in one region that is recomputed"):
        jgt.shard(model, rules, MESH)(W, X)


def test_one_name_may_have_two_actions_in_two_scans():
    def model(w, x):
        for name in ("a", "b"):
            x = jax.lax.scan(
                lambda h, _, name=name: (context(name)(lambda: jnp.sin(tensor(jnp.sin(h @ w), "h")))(), None), x, None, length=2
            )[0]
        return x

    rules = jgt.make_rules({"signals": {"a": {"save": {"h": "keep"}}, "b": {"save": {"h": "offload"}}}, "default": "replicate"})
    sharded = jgt.shard(model, rules, MESH)
    assert [place for _, place, _ in residuals(sharded, X)].count("host") == 1
    assert_same_derivatives(sharded, model, W, X)


def named_scan_in_remat(w, x):
    return jax.checkpoint(named_scan)(w, x)


def test_a_region_of_the_model_around_a_scan_is_told_what_to_keep():
    count = lambda model, **actions: [  # noqa: E731
        (shape, place) for shape, place, _ in residuals(jgt.shard(model, save_rules(**actions), MESH), X) if len(shape) == 3
    ]
    plain_saves = [(shape, place) for shape, place, _ in residuals(named_scan_in_remat, X) if len(shape) == 3]
    assert plain_saves == []
    assert count(named_scan_in_remat, q="keep") == [((3, 4, 8), "device")]
    assert count(named_scan_in_remat, q="offload", k="keep") == [((3, 4, 8), "host"), ((3, 4, 8), "device")]
    assert str(jax.make_jaxpr(jgt.shard(named_scan_in_remat, save_rules(q="keep"), MESH))(W, X)).count("prevent_cse") == 1
    assert_same(derivatives(jgt.shard(named_scan_in_remat, save_rules(q="keep"), MESH), W, X), unsharded(named_scan_in_remat))


def test_save_and_constraints_live_together():
    rules = jgt.make_rules(
        {
            "signals": {
                "block": {
                    "tensors": {"q": ["data", "tensor"]},
                    "out": ["data", None],
                    "backward": {"out": [None, "tensor"], "tensors": {"k": ["data", None]}},
                    "save": {"q": "offload", "k": "recompute"},
                }
            },
            "default": "replicate",
        }
    )
    assert_same(derivatives(jgt.shard(named_remat_scan, rules, MESH), W, X), unsharded(named_remat_scan))
