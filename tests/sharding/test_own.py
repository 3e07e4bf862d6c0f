"""Programs that bring a layout along: it is read, erased or kept, and rules decide."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jgt

EXPLICIT = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
AUTO = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
OTHER = jgt.make_mesh({"rows": 4, "columns": 2})
ELSEWHERE = {"axes": {"batch": ["rows"]}, "params": {"up": ["columns", None], "down": [None, "columns"]}, "default": "replicate"}
RANDOM = np.random.default_rng(0)
PARAMS = {"up": RANDOM.normal(size=(3, 16, 32)) / 16, "down": RANDOM.normal(size=(3, 32, 16)) / 16, "table": RANDOM.normal(size=(8, 16))}
PARAMS = {name: x.astype(np.float32) for name, x in PARAMS.items()}
X = np.arange(8, dtype=np.int32) % 5
SPECS = {"up": P(None, None, "tensor"), "down": P(None, "tensor", None), "table": P()}


def asks(x, *spec):
    return (
        jax.sharding.reshard(x, P(*spec))
        if jax.sharding.get_abstract_mesh().explicit_axes
        else jax.lax.with_sharding_constraint(x, P(*spec))
    )


@jax.custom_jvp
def squared(x):
    return x * x


@squared.defjvp
def _(primals, tangents):
    return squared(*primals), 2 * asks(primals[0], "data", "tensor") * tangents[0]


@jax.custom_vjp
def halved(x):
    return asks(x, "data", None) / 2


halved.defvjp(lambda x: (halved(x), None), lambda _, cotangent: (asks(cotangent, "data", None) / 2,))


def of_layers(params, ids):
    """Scan, checkpoint, custom derivatives, einsum and lookup with their layouts."""

    def layer(h, w):
        with jax.named_scope("mlp"):
            u = jnp.einsum("bi,io->bo", h, w["up"], out_sharding=P("data", "tensor"))
            u = squared(jax.nn.relu(u))
            return h + jnp.einsum("bo,oi->bi", u, w["down"], out_sharding=P("data", None)), None

    h = params["table"].at[ids].get(out_sharding=P("data", None))
    h, _ = jax.lax.scan(jax.checkpoint(layer), h, {name: params[name] for name in ("up", "down")})
    return jnp.sum(jnp.tanh(halved(h)))


def of_branches(params, ids):
    """While, cond and jit, which name no type of their own, with values that move between layouts."""
    h = asks(params["table"].at[ids].get(out_sharding=P(None, "tensor")), "data", None)
    w = jax.sharding.reshard(jnp.einsum("io,oj->ij", params["up"][0], params["down"][0], out_sharding=P(None, None)), P("tensor", None))
    w = jax.sharding.reshard(w, P(None, None))
    inner = jax.jit(lambda h: jax.lax.cond(jnp.sum(h) > 0, lambda h: h @ w, lambda h: 2 * h, h))
    h = jax.lax.fori_loop(0, 2, lambda n, h: asks(inner(h) / 4, "data", None), h)
    return jnp.sum(jax.lax.reshape(h, (2, 4, 16), out_sharding=P("data", None, None)) ** 2)


def of_auto_axes(params, ids):
    """Parts with Auto axes, new arrays with a layout, and random numbers."""
    h = params["table"].at[ids].get(out_sharding=P("data", None)) + jnp.zeros((8, 16), out_sharding=P("data", None))
    h = jax.sharding.auto_axes(lambda h, w: jnp.tanh(h @ w), out_sharding=P("data", "tensor"))(h, params["up"][0])
    noise = jax.random.normal(jax.random.key(0), (8, 32), out_sharding=P("data", "tensor"))
    return jnp.sum(jnp.einsum("bo,oi->bi", h + noise, params["down"][1], out_sharding=P("data", None)) ** 2)


def of_transforms(params, ids):
    """A vmap, whose dim rules do not count, and a gradient inside, whose first cotangent is a scalar with a layout."""
    h = params["table"].at[ids].get(out_sharding=P("data", None))
    rows = jax.lax.reshape(h, (4, 2, 16), out_sharding=P("data", None, None))
    u = jax.vmap(lambda row: jnp.einsum("bi,io->bo", row, params["up"][0], out_sharding=P(None, "tensor")))(rows)

    def inner(h):
        return jnp.sum(jnp.tanh(jnp.einsum("bi,io->bo", h, params["up"][1], out_sharding=P("data", "tensor"))))

    down = jnp.einsum("bi,io->bo", jax.grad(inner)(h), params["up"][2], out_sharding=P("data", "tensor"))
    return jnp.sum(u**2) + jnp.sum(jnp.einsum("bo,oi->bi", down, params["down"][0], out_sharding=P("data", None)) ** 2)


EXPLICIT_PROGRAMS = [of_layers, of_branches, of_auto_axes, of_transforms]


def placed(mesh):
    params = {name: jax.device_put(x, NamedSharding(mesh, SPECS[name])) for name, x in PARAMS.items()}
    return params, jax.device_put(X, NamedSharding(mesh, P("data")))


def values(fn, *args):
    return [np.asarray(x) for x in jax.tree.leaves(jax.jit(jax.value_and_grad(fn))(*args))]


def equal(found, expected, tolerance=2e-6):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max()))


def on_one_device(fn):
    one = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:1])
    with jax.set_mesh(one):
        return values(fn, PARAMS, X)


@pytest.mark.parametrize("fn", EXPLICIT_PROGRAMS)
def test_an_explicit_program_under_its_own_rules_and_under_others(fn):
    expected = on_one_device(fn)
    args = placed(EXPLICIT)
    with jax.set_mesh(EXPLICIT):
        equal(values(fn, *args), expected)
        found = jgt.rules_of(fn, *args)
        own = jgt.shard(fn, found.rules)
        elsewhere = jgt.shard(fn, ELSEWHERE, OTHER)
        equal(values(own, *args), expected)
        assert jgt.verify(fn, ELSEWHERE, OTHER, PARAMS, X).is_right
    equal(values(own, PARAMS, X), expected)
    equal(values(elsewhere, PARAMS, X), expected)
    assert {"up": ((), ("tensor",)), "down": (("tensor",), ())}.items() <= {e.path: e.dims[-2:] for e in found.params}.items()


def test_the_rules_of_a_program_name_what_it_asks_for_with_its_lines():
    with jax.set_mesh(EXPLICIT):
        found = jgt.rules_of(of_layers, *placed(EXPLICIT))
    lines = [line.split(" # ") for line in str(found).splitlines()]
    assert [text.rstrip() for text, *_ in lines[1:]] == [
        "inputs:",
        "  ids: [data]",
        "params:",
        "  down: [tensor, null]",
        "  up: [null, tensor]",
        "signals:",
        "  mlp:",
        "    tensors:",
        "      dot_general: [data, tensor]",
        "      dot_general_2: [data, null]",
        '  "**":',
        "    tensors:",
        "      reshard: [data, null]",
        "default: replicate",
    ]
    assert all("test_own.py:" in where for _, *wheres in lines for where in wheres)
    assert jgt.make_rules(found.tree) == found.rules


def test_constraints_of_a_program_with_auto_axes_are_erased_or_kept():
    def fn(params, x):
        with jax.named_scope("mlp"):
            return jnp.sum(jax.lax.with_sharding_constraint(x @ params["w"], NamedSharding(AUTO, P("data", "tensor"))) ** 2)

    params, x = {"w": PARAMS["table"]}, PARAMS["table"] @ PARAMS["up"][0][:, :8]
    rules = {"inputs": [["data", "tensor"], None], "default": "replicate"}
    texts = {own: str(jax.make_jaxpr(jgt.shard(fn, rules, AUTO, own=own))(params, x)) for own in ("drop", "keep", None)}
    assert texts["drop"].count("sharding_constraint") + 1 == texts["keep"].count("sharding_constraint")
    assert texts[None] == texts["drop"]
    equal(values(jgt.shard(fn, {**rules, "own": "keep"}, AUTO), params, x), values(fn, params, x))
    placement = jgt.place(fn, rules, AUTO, params, x)
    assert str(placement).endswith("The program asks for 1 layouts of its own, which are dropped")


def test_a_rule_about_a_layout_that_is_kept_is_an_error_with_both_lines(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text("signals: {mlp: {tensors: {dot_general: [data, null]}}}\nown: keep\ndefault: replicate\n")
    with jax.set_mesh(EXPLICIT), pytest.raises(jgt.InputError) as caught:
        jgt.shard(of_layers, path, EXPLICIT)(PARAMS, X)
    (problem,) = caught.value.problems
    assert problem.startswith(
        f"{path}:1: dot_general: is about the tensor dot_general at mlp, for which the program asks [data, tensor] at "
    )
    assert "test_own.py:" in problem


def test_a_layout_that_is_kept_names_axes_of_the_mesh():
    with jax.set_mesh(EXPLICIT):
        sharded = jgt.shard(of_layers, {"own": "keep", "default": "replicate"}, OTHER)
    with pytest.raises(jgt.InputError, match=r"test_own.py:\d+: .*the mesh has no axis 'data'"):
        sharded(PARAMS, X)


def test_a_layout_that_does_not_divide_its_array_is_kept_and_said():
    def fn(params, x):
        return jnp.sum(jax.lax.with_sharding_constraint(x @ params["w"], NamedSharding(AUTO, P("data", "tensor"))) ** 2)

    params, x = {"w": PARAMS["table"][:, :6]}, PARAMS["table"]
    kept = jgt.shard(fn, {"own": "keep", "default": "replicate"}, AUTO)
    assert "('data', 'tensor')" in str(jax.make_jaxpr(kept)(params, x.T))
    found = jgt.rules_of(fn, params, x.T)
    (said,) = found.unsaid
    assert said.endswith("sharding_constraint [16, 6] has [data, tensor], which does not divide it")
    for sharded in (kept, jgt.shard(fn, found.rules, AUTO)):
        equal(values(sharded, params, x.T), values(fn, params, x.T))


class Logical(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "ffn"))
        x = nn.with_logical_constraint(nn.relu(nn.Dense(32, kernel_init=kernel, name="up")(x)), ("rows", "ffn"))
        return nn.with_logical_constraint(nn.Dense(16, name="down")(x), ("rows", None))


def test_logical_axes_of_linen():
    model, x = Logical(), PARAMS["table"]
    with jax.set_mesh(AUTO), nn.logical_axis_rules([("rows", "data"), ("ffn", "tensor"), ("embed", None)]):
        params = model.init(jax.random.key(0), x)

        def loss(params, x):
            return jnp.sum(model.apply(params, x) ** 2)

        expected = values(loss, params, x)
        found = jgt.rules_of(loss, params, x)
        assert {e.path: e.dims for e in found.params}["params/up/kernel"] == ((), ("tensor",))
        assert {(e.signal, e.dims) for e in found.tensors} >= {("Logical", (("data",), ("tensor",))), ("Logical", (("data",), ()))}
        equal(values(jgt.shard(loss, found.rules, AUTO), params, x), expected)
        elsewhere = jgt.shard(
            loss, {"axes": {"batch": ["rows"]}, "params": {"up/kernel": ["columns", None]}, "default": "replicate"}, OTHER
        )
    equal(values(elsewhere, jax.device_get(params), x), expected)


def test_a_shard_map_inside_keeps_its_mesh():
    def fn(params, ids):
        h = params["table"].at[ids].get(out_sharding=P("data", None))
        summed = jax.shard_map(lambda h: jax.lax.psum(h * h, "data"), in_specs=P("data", None), out_specs=P(None, None))
        return jnp.sum(summed(h) * params["table"][:4])

    expected = on_one_device_sum(fn)
    with jax.set_mesh(EXPLICIT):
        same, other = (jgt.shard(fn, {"default": "replicate"}, mesh) for mesh in (EXPLICIT, OTHER))
        equal(values(same, *placed(EXPLICIT)), expected)
    with pytest.raises(jgt.InputError, match=r"test_own.py:\d+: a shard_map over data=2, tensor=4"):
        other(PARAMS, X)


def test_a_shard_map_that_leaves_axes_explicit_gets_auto_ones():
    def fn(params, ids):
        h = params["table"].at[ids].get(out_sharding=P("data", None))
        part = jax.shard_map(
            lambda h, w: jax.lax.psum(jnp.sum(jax.sharding.reshard(h @ w, P(None, None)) ** 2, keepdims=True), "data"),
            axis_names={"data"},
            in_specs=(P("data", None), P(None, None)),
            out_specs=P(None, None),
        )
        return jnp.sum(part(h, params["up"][0]))

    expected = on_one_device_sum(fn)
    with jax.set_mesh(EXPLICIT):
        equal(values(jgt.shard(fn, {"default": "replicate"}), *placed(EXPLICIT)), expected)


def test_sums_that_are_not_added_up_are_said_and_added_up():
    def fn(params, x):
        h = jnp.einsum("bi,io->bo", x, params["w"], out_sharding=P("data", None, unreduced={"tensor"}))
        return jnp.sum(jax.sharding.reshard(h, P("data", None)) ** 2)

    with jax.set_mesh(EXPLICIT):
        w = jax.device_put(PARAMS["up"][0], NamedSharding(EXPLICIT, P("tensor", None)))
        x = jax.device_put(PARAMS["table"], NamedSharding(EXPLICIT, P("data", "tensor")))
        found = jgt.rules_of(fn, {"w": w}, x)
        assert [line for line in found.unsaid if "test_own.py:" in line and "sums that are not added up yet" in line]
        equal(values(jgt.shard(fn, found.rules), {"w": w}, x), values(fn, {"w": w}, x))


def test_the_mesh_of_a_constraint_and_the_layout_of_a_single_array():
    def fn(w, x):
        return jnp.sum(jax.lax.with_sharding_constraint(x @ w, NamedSharding(AUTO, P("data", "tensor"))) ** 2)

    found = jgt.rules_of(fn, PARAMS["up"][0], PARAMS["table"])
    assert found.mesh == {"data": 2, "tensor": 4} and found.params[0].dims == ((), ())
    w = jax.device_put(PARAMS["up"][0], NamedSharding(AUTO, P(None, "tensor")))
    rules = jgt.rules_of(fn, w, PARAMS["table"]).rules
    sharded = jgt.shard(fn, rules, AUTO)
    assert sharded.placement(w, PARAMS["table"]).params.spec == P(None, "tensor")
    equal(values(sharded, w, PARAMS["table"]), values(fn, w, PARAMS["table"]))


def on_one_device_sum(fn):
    with jax.set_mesh(EXPLICIT):
        return values(fn, *placed(EXPLICIT))


def test_the_mesh_may_be_left_out():
    with jax.set_mesh(AUTO):
        sharded = jgt.shard(lambda params, x: params["table"][x].sum(), {"params": {"table": [None, "tensor"]}, "default": "replicate"})
    assert sharded.placement(PARAMS, X).params["table"] == NamedSharding(AUTO, P(None, "tensor"))
    with pytest.raises(ValueError, match=r"no mesh is given, and none is around this call. Pass jgt.make_mesh"):
        jgt.shard(of_layers, {"default": "replicate"})


def test_parameters_of_an_explicit_program_are_born_where_the_rules_have_them():
    def init(key):
        return {name: jax.random.normal(key, x.shape, out_sharding=SPECS[name]) for name, x in PARAMS.items()}

    with jax.set_mesh(EXPLICIT):
        params = jgt.init(init, ELSEWHERE, OTHER, jax.random.key(0), loss=of_layers, batch=X)
    assert params["up"].sharding == NamedSharding(OTHER, P(None, "columns", None))


@pytest.mark.parametrize("own", ["drop", "keep"])
def test_a_gradient_of_a_sharded_function_is_sharded_again(own):
    """A step calls the gradient of a loss that has rules of its own."""

    def loss(params, x):
        with jgt.signal.context("mlp"):
            return (jgt.signal.tensor(jnp.tanh(params["table"][x]), "h") ** 2).mean()

    rules = {"signals": {"mlp": {"tensors": {"h": ["data", None]}}}, "default": "replicate"}
    step = jax.value_and_grad(jgt.shard(loss, rules, AUTO))
    outer = {"params": {"table": [None, "tensor"]}, "default": "replicate"}
    value, gradients = jgt.shard(lambda params, x: step(params, x), outer, AUTO, own=own)(PARAMS, X)
    right, of_one_device = jax.value_and_grad(loss)(PARAMS, X)
    np.testing.assert_allclose(value, right, rtol=1e-6)
    np.testing.assert_allclose(gradients["table"], of_one_device["table"], rtol=1e-5, atol=1e-7)


def test_what_names_no_mesh_and_what_names_two_is_refused():
    with pytest.raises(jgt.InputError, match="rules_of: nothing names a mesh"):
        jgt.rules_of(lambda params, x: x, PARAMS, X)
    two = {name: jax.device_put(x, NamedSharding(mesh, P())) for (name, x), mesh in zip(PARAMS.items(), (AUTO, OTHER, AUTO), strict=True)}
    with pytest.raises(jgt.InputError, match="names several meshes, data=2 x tensor=4 and rows=4 x columns=2"):
        jgt.rules_of(lambda params, x: x, two, X)


def test_arrays_that_a_program_closes_over_stay():
    scale, (params, ids) = jnp.arange(16.0), placed(AUTO)

    def loss(params, ids):
        h = jax.lax.with_sharding_constraint(params["table"][ids], NamedSharding(AUTO, P("data", "tensor")))
        return jnp.sum(jax.checkpoint(lambda h: jnp.tanh(h * scale[None]))(h))

    for fn in (loss, jax.jit(loss)):
        found = jgt.rules_of(fn, params, ids)
        equal(values(jgt.shard(fn, found.rules, AUTO), params, ids), values(loss, params, ids))


def test_a_plan_of_an_explicit_program_is_of_the_program_itself_on_any_devices():
    def loss(params, x):
        hidden = jax.nn.relu(x @ params["up"][0])
        return jnp.sum(jnp.einsum("bf,fe->be", hidden, params["down"][0], out_sharding=P("data", None)) ** 2)

    with jax.set_mesh(EXPLICIT):
        args = placed(EXPLICIT)[0], jax.device_put(np.ones((8, 16), np.float32), NamedSharding(EXPLICIT, P("data")))
        gradient = jax.jit(jax.grad(loss))
        text = gradient.lower(*args).compile().as_text()
        plans = [jgt.plan(gradient, *args), jgt.plan(gradient, *args, target="h100:1x8")]
    assert "all-reduce(" in text and "all-gather(" not in text
    bytes_sent = [sorted((c.kind, c.total_bytes) for c in plan.collectives) for plan in plans]
    assert bytes_sent[0] == bytes_sent[1]
    assert {kind for kind, _ in bytes_sent[0]} == {"all-reduce"}


@jax.custom_vjp
def backward_asks(x):
    return x * x


backward_asks.defvjp(lambda x: (x * x, x), lambda x, cotangent: (jax.lax.with_sharding_constraint(2 * x * cotangent, P("data", "tensor")),))


def forward_asks(x):
    return jax.lax.with_sharding_constraint(x * x, P("data", "tensor"))


@pytest.mark.parametrize("squares", [backward_asks, forward_asks])
def test_specs_without_a_mesh_are_on_the_mesh_that_is_set_or_else_that_of_the_rules(squares):
    params, rules = {"w": PARAMS["up"][0]}, {"inputs": ["data", None], "default": "replicate"}

    def loss(params, x):
        return jnp.sum(squares(jax.checkpoint(lambda x: x @ params["w"])(x)))

    with jax.set_mesh(AUTO):
        expected = values(loss, params, PARAMS["table"])
        sharded, elsewhere = jgt.shard(loss, rules, AUTO), jgt.shard(loss, {"default": "replicate"}, OTHER)
        equal(values(sharded, params, PARAMS["table"]), expected)
        assert "spec=P('data', 'tensor')" not in str(jax.make_jaxpr(jax.grad(sharded))(params, PARAMS["table"]))
        on_other = elsewhere.placement(params, PARAMS["table"])
    assert on_other.mesh == OTHER
    if squares is forward_asks:
        equal(values(jgt.shard(loss, rules, AUTO), params, PARAMS["table"]), expected)
        with pytest.raises(RuntimeError, match="non-empty mesh"):
            jgt.shard(loss, {"default": "replicate"}, OTHER)(params, PARAMS["table"])
