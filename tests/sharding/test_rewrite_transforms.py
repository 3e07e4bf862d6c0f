"""Constraints inside shard_map and vmap, and values that the rules save for the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals
from jax.sharding import PartitionSpec as P
from next_checkpoint import ASKS_POLICIES, either_checkpoint, next_checkpoint  # noqa: F401
from programs import all_constraints, assert_same, assert_same_derivatives, constraints, derivatives
from rewrites import MESH, U, W, X, block, name_of, out_rules, plain, scan, unsharded

import jgt
from jgt.document import InputError
from jgt.signal import context, tensor

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


@pytest.mark.usefixtures("either_checkpoint")
@pytest.mark.parametrize("model", [named_plain, named_scan], ids=name_of)
def test_a_region_that_the_rules_make_keeps_names_and_nothing_else(model):
    assert kept(model, q="keep") == (2, 0)


@pytest.mark.usefixtures("either_checkpoint")
@pytest.mark.parametrize("model", [named_remat, named_remat_scan], ids=name_of)
def test_a_region_of_the_model_keeps_what_it_is_told(model):
    assert kept(model, q="keep") == (1, 0)
    assert kept(model, q="keep", k="keep") == (2, 0)


@pytest.mark.usefixtures("either_checkpoint")
@pytest.mark.parametrize("model", [named_plain, named_scan, named_remat, named_remat_scan], ids=name_of)
def test_what_is_recomputed_is_not_kept(model):
    assert kept(model, q="recompute", k="recompute") == (0, 0)
    assert kept(model, q="recompute", k="keep") == (1, 0)


@pytest.mark.usefixtures("either_checkpoint")
@pytest.mark.parametrize("model", [named_plain, named_scan, named_remat, named_remat_scan], ids=name_of)
def test_what_is_offloaded_is_kept_on_the_host(model):
    assert kept(model, q="offload", k="recompute") == (0, 1)
    assert kept(model, **{"*": "offload"}) == (0, 2)


@pytest.mark.usefixtures("either_checkpoint")
@pytest.mark.parametrize("model", [named_plain, named_scan, named_remat, named_remat_scan], ids=name_of)
def test_what_the_backward_pass_finds_changes_no_value(model):
    assert_same(derivatives(jgt.shard(model, save_rules(q="offload", k="recompute"), MESH), W, X), unsharded(model))


@pytest.mark.usefixtures("either_checkpoint")
def test_a_policy_of_the_model_holds_for_all_else():
    only_k = jax.checkpoint(named, policy=jax.checkpoint_policies.save_only_these_names("k"))
    model = lambda w, x: only_k(x, w)  # noqa: E731
    assert len(residuals(model, X)) == 1
    assert kept(model, q="keep") == (2, 0)
    assert kept(model, k="recompute") == (0, 0)


@pytest.mark.skipif(ASKS_POLICIES, reason="this JAX asks policies with jax_remat3")
def test_a_policy_that_jax_would_not_ask_is_refused():
    with next_checkpoint(), pytest.raises(InputError, match="Set JAX_REMAT3=0, or use a newer jax"):
        kept(named_plain, q="keep")


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
