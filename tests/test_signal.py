"""Signals are named scopes and checkpoint names: visible in every traced program, and nothing but names."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jgt
from jgt.program import jaxpr as jx
from jgt.program.equations import subprograms
from jgt.program.places import Place, place_of
from jgt.program.tracing import trace
from jgt.signal import context, tensor

RULES = jgt.make_rules({"default": "replicate"})


def paths(fn, *args):
    """Primitive → signal paths of its equations in a program, including nested ones."""
    found = {}

    def walk(program, around):
        for equation in jx.body(program).eqns:
            place = place_of(equation, around)
            found.setdefault(equation.primitive.name, set()).add(place.path)
            for inner in subprograms(equation):
                walk(inner, place)

    walk(jax.make_jaxpr(fn)(*args), Place())
    return found


def op_names(fn, *args):
    return jax.jit(fn).lower(*args).compile().as_text()


def nested(x):
    with context("layers"), context("attn"):
        return jnp.sin(x)


def test_names_nest():
    assert paths(nested, 1.0)["sin"] == {"layers/attn"}


def test_names_end_with_their_region():
    def fn(x):
        with context("a"):
            x = jnp.sin(x)
        return jnp.cos(x)

    assert paths(fn, 1.0) == {"sin": {"a"}, "cos": {""}}


def test_a_decorated_function_is_a_region_each_time():
    @context("mlp")
    def fn(x):
        return jnp.sin(x)

    assert paths(lambda x: fn(fn(x)), 1.0)["sin"] == {"mlp"}


def test_a_tensor_has_its_name_in_the_jaxpr():
    assert "name=heads" in str(jax.make_jaxpr(lambda x: tensor(x, "heads"))(1.0))


def test_a_tensor_keeps_its_value_and_type():
    x = jnp.arange(4, dtype=jnp.int8)
    assert tensor(x, "x").dtype == x.dtype
    np.testing.assert_array_equal(tensor(x, "x"), x)


def scanned(x):
    def layer(h, _):
        with context("attn"):
            return jnp.sin(h), None

    with context("layers"):
        return jax.lax.scan(layer, x, None, length=3)[0]


def inside_jit(x):
    with context("layers"):
        return jax.jit(lambda y: context("attn")(jnp.sin)(y))(x)


def inside_checkpoint(x):
    with context("layers"):
        return jax.checkpoint(lambda y: context("attn")(jnp.sin)(y))(x)


def inside_vmap(x):
    with context("layers"):
        return jax.vmap(lambda y: context("attn")(jnp.sin)(y))(x[None])[0]


def inside_shard_map(x):
    with context("layers"):
        fn = jax.shard_map(lambda y: context("attn")(jnp.sin)(y), mesh=jgt.make_mesh({"data": 8}), in_specs=P(), out_specs=P())
        return fn(x)


@pytest.mark.parametrize("fn", [nested, scanned, inside_jit, inside_checkpoint, inside_vmap, inside_shard_map])
def test_names_reach_the_jaxpr_through(fn):
    assert paths(fn, jnp.float32(1))["sin"] == {"layers/attn"}


@pytest.mark.parametrize("fn", [nested, scanned, inside_jit, inside_checkpoint, inside_vmap, inside_shard_map])
def test_names_reach_the_compiled_program_through(fn):
    names = [line for line in op_names(fn, jnp.float32(1)).splitlines() if "op_name" in line and "/sin" in line]
    assert names
    assert all("sig.layers" in name and "sig.attn" in name for name in names)


@pytest.mark.parametrize("transform", [jax.grad, jax.vmap, jax.jit, jax.checkpoint])
def test_names_stay_under(transform):
    x = jnp.ones(2) if transform is jax.vmap else jnp.float32(1)
    assert paths(transform(nested), x).get("cos" if transform is jax.grad else "sin") == {"layers/attn"}


def test_the_backward_pass_is_marked_as_such():
    text = op_names(jax.grad(lambda x: nested(jnp.sin(x)) * x), jnp.float32(1))
    assert any("transpose(" in line and "sig.attn" in line for line in text.splitlines())


def test_plans_know_the_trips_of_a_loop_and_a_backward_pass_that_a_model_writes_out():
    def fn(x, count):
        with jgt.signal.trips(3), jgt.signal.backward(), context("head"):
            return jax.lax.fori_loop(0, count, lambda _, x: x @ x, x)

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    plan = jgt.plan(fn, x, jax.ShapeDtypeStruct((), jnp.int32))
    assert {row.signal: row.flops for row in plan.signals if row.flops} == {"head": 3 * 2 * 64**3}
    assert "jgt.backward" in op_names(fn, jnp.ones((2, 2)), 1)


def test_threads_do_not_mix():
    barrier = threading.Barrier(2)
    found = {}

    def trace(name):
        def fn(x):
            with context(name):
                barrier.wait(timeout=10)
                x = jnp.sin(x)
                barrier.wait(timeout=10)
            return x

        found[name] = paths(fn, 1.0)["sin"]

    threads = [threading.Thread(target=trace, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"one": {"one"}, "two": {"two"}}


@pytest.mark.parametrize("name", ["", "a/b", "a b", "a@b", 'a"', "(a)", "a:b", "ä", "a\n", None, 3])
def test_a_bad_name_is_refused(name):
    with pytest.raises(ValueError, match="is not a valid signal name"):
        context(name)
    with pytest.raises(ValueError, match="is not a valid signal name"):
        tensor(jnp.ones(()), name)


@pytest.mark.parametrize("name", ["a", "layer_3", "q-proj", "v1.2", "A9"])
def test_a_good_name_is_taken(name):
    assert paths(lambda x: context(name)(jnp.sin)(x), 1.0)["sin"] == {name}


def test_without_rules_or_mesh_the_function_stays_itself():
    mesh = jgt.make_mesh({"data": 8})
    assert jgt.shard(nested, None, mesh) is nested
    assert jgt.shard(nested, RULES, None) is nested


def test_signals_do_not_change_a_bit():
    def model(w, x, *, signals):
        name = tensor if signals else lambda x, _: x
        region = context if signals else jax.named_scope

        def layer(h, w):
            with region("mlp"):
                return name(jnp.tanh(h @ w), "h"), None

        return jax.lax.scan(layer, x, w)[0].sum()

    w, x = np.linspace(-1, 1, 192, dtype=np.float32).reshape(3, 8, 8), jnp.ones((4, 8))
    marked = jax.jit(jax.value_and_grad(lambda w: model(w, x, signals=True)))(w)
    plain = jax.jit(jax.value_and_grad(lambda w: model(w, x, signals=False)))(w)
    jax.tree.map(np.testing.assert_array_equal, marked, plain)


def test_a_context_can_be_used_again_and_inside_of_itself():
    again = context("a")

    def model(x):
        with again:
            x = jnp.sin(x)
            with again:
                x = jnp.cos(x)
        with again:
            return x * 2

    places = [place_of(e, Place()).path for e in jx.body(trace(model, 1.0)[0]).eqns]
    assert places == ["a", "a/a", "a"]
