"""Calls, placement and init share one trace for each set of shapes, and some programs must not share one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgt
from train.config import load
from train.setup import losses, prepare

RULES = jgt.make_rules({"axes": {"batch": ["data"]}, "params": {"w": [None, "tensor"]}, "default": "replicate"})
SIZES = {"data": 2, "tensor": 4}
X = jnp.ones((4, 8))


class Counted:
    """A loss that counts how often it is called."""

    def __init__(self):
        self.calls = 0

    def __call__(self, params, x, scale=1.0):
        self.calls += 1
        return scale * jnp.sum(x @ params["w"])


@pytest.fixture
def mesh():
    return jgt.make_mesh(SIZES)


def params(rng=None):
    return {"w": jnp.ones((8, 16))}


def test_placement_step_and_init_share_one_trace(mesh):
    fn = Counted()
    loss = jgt.shard(fn, RULES, mesh)
    shapes = jax.eval_shape(params)
    placement = loss.placement(shapes, jax.ShapeDtypeStruct(X.shape, X.dtype))
    made = loss.init(params, batch=X)
    value, gradient = jax.jit(jax.value_and_grad(loss))(made, X)
    assert loss(made, X) == value == 4 * 8 * 16
    assert fn.calls == 1
    assert made["w"].sharding == placement.params["w"]
    assert np.all(gradient["w"] == 4)


def test_place_and_init_use_the_trace_of_a_sharded_function(mesh):
    fn = Counted()
    loss = jgt.shard(fn, RULES, mesh)
    assert jgt.place(loss, RULES, mesh, params(), X) == loss.placement(params(), X)
    jgt.init(params, RULES, mesh, loss=loss, batch=X)
    assert fn.calls == 1
    jgt.place(loss, jgt.make_rules({"default": "replicate"}), mesh, params(), X)
    assert fn.calls == 2


@pytest.mark.parametrize(
    "other",
    [lambda: (params(), X[:2]), lambda: (params(), X.astype(jnp.bfloat16)), lambda: (params(), X, 2.0), lambda: (params(), X, 1)],
    ids=["shape", "dtype", "constant", "type of a constant"],
)
def test_another_program_has_a_trace_of_its_own(mesh, other):
    fn = Counted()
    loss = jgt.shard(fn, RULES, mesh)
    loss(params(), X, 1.0)
    assert loss(*other()) == fn(*other())
    loss(params(), X, 1.0)
    assert fn.calls == 3


def test_a_vmap_over_a_mesh_axis_has_a_trace_of_its_own(mesh):
    fn = Counted()
    loss = jgt.shard(fn, jgt.make_rules({"default": "replicate", "inputs": {"x": []}}), mesh, partial=True)
    alone = loss(params(), X)
    both = jax.vmap(loss, in_axes=(None, 0), spmd_axis_name="data")(params(), jnp.stack([X, 2 * X]))
    assert both.tolist() == [alone, 2 * alone]
    assert fn.calls == 2


def test_a_function_that_reads_a_value_of_the_trace_around_it_is_traced_again(mesh):
    @jax.jit
    def step(scale):
        loss = jgt.shard(lambda params, x: scale * jnp.sum(x @ params["w"]), RULES, mesh)
        return loss(params(), X) + loss(params(), X)

    assert step(1.0) == 2 * 512
    assert step(2.0) == 4 * 512


def test_arguments_that_may_change_are_not_shared(mesh):
    class Options:
        factor = 1.0

    options, calls = Options(), []

    def fn(params, x, options):
        calls.append(options.factor)
        return options.factor * jnp.sum(x @ params["w"])

    loss = jgt.shard(fn, RULES, mesh)
    assert loss(params(), X, options) == 512
    options.factor = 2.0
    assert loss(params(), X, options) == 1024
    assert calls == [1.0, 2.0]


def test_one_array_passed_as_two_parameters_is_seen_on_a_second_call(mesh):
    rules = jgt.make_rules({"params": {"a": ["data", None], "b": [None, "tensor"]}})
    loss = jgt.shard(lambda params, x: jnp.sum(x @ params["a"]) + jnp.sum(x @ params["b"]), rules, mesh)
    w = jnp.ones((8, 16))
    loss({"a": w, "b": w + 0}, X)
    with pytest.raises(jgt.InputError, match="this array is a too"):
        loss({"a": w, "b": w}, X)


def test_a_mistake_is_reported_by_every_call(mesh):
    loss = jgt.shard(lambda params, x: jnp.sum(x @ params["w"]), jgt.make_rules({"params": {"v": []}}), mesh)
    for _ in range(2):
        with pytest.raises(jgt.InputError, match="no rule matches this parameter"):
            loss(params(), X)


def test_a_mesh_of_one_device_needs_no_constraints():
    mesh = jgt.make_mesh({"data": 1, "tensor": 1}, devices=jax.devices()[:1])
    loss = jgt.shard(Counted(), RULES, mesh)
    assert "sharding_constraint" not in str(jax.make_jaxpr(loss)(params(), X))


TINY = ["model.layers=2", "model.embed=32", "model.heads=4", "model.kv_heads=4", "model.ffn=64", "model.seq=32", "train.batch=16"]


@pytest.mark.parametrize(
    ("config", "overrides", "calls"),
    [
        ("quickstart", [], 1),
        ("quickstart", ["rules=null", "mesh={data: 1}"], 1),
        # The whole batch, and one microbatch: the two programs from which a pipeline learns how the loss adds up.
        ("pipeline", ["train.batch=32"], 2),
    ],
    ids=["rules", "no rules", "pipeline"],
)
def test_the_trainer_calls_its_loss_once_for_each_batch_size(config, overrides, calls, monkeypatch):
    counted = []
    make_loss = losses.make_loss

    def make(*args, **kwargs):
        loss = make_loss(*args, **kwargs)

        def counting(*args):
            counted.append(None)
            return loss(*args)

        return counting

    monkeypatch.setattr(losses, "make_loss", make)
    made = prepare(load(f"configs/{config}.yaml", [*TINY, *overrides]))
    made.train_step().lower(*made.step_shapes)
    jax.eval_shape(made.objective.evaluated, made.shapes.params, made.shapes.variables, made.batch_shapes)
    assert len(counted) == calls


def test_what_a_sharded_function_says_of_itself(tmp_path, mesh):
    (tmp_path / "rules.yaml").write_text("params: {w: [data, null]}\nsignals: {mlp: {out: [data, null]}}\nown: keep\ndefault: replicate\n")

    def loss(params, x):
        return x @ params["w"]

    sharded = jgt.shard(loss, str(tmp_path / "rules.yaml"), mesh)
    sizes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    first, *others = str(sharded).splitlines()
    assert first == f"{loss.__qualname__}, sharded"
    assert others == [
        f"  rules: {tmp_path}/rules.yaml:1, 1 signal, 2 specs",
        f"  mesh: {sizes} = {mesh.size} devices",
        "  layouts of its own: kept",
    ]
    pipeline = jgt.Pipeline(signal="layers", microbatches=2, axis=mesh.axis_names[0])
    assert f"  pipeline: layers over {mesh.axis_names[0]}" in str(jgt.shard(loss, {}, mesh, pipeline=pipeline)).splitlines()
