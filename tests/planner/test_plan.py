"""Plans of a user's own function, for the devices of this machine and for others."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from plugin import needs_plugin

import jgt
from jgt.planner.hardware.chip import chip_names, load_chip
from jgt.planner.hardware.target import Target
from jgt.planner.signals import folded
from train.config import load
from train.plan.make import make_plan

SIZES = {"data": 2, "tensor": 4}
RULES = jgt.make_rules(
    {
        "axes": {"batch": ["data"]},
        "signals": {
            "mlp": {
                "params": {"up": [None, "tensor"], "down": ["tensor", None]},
                "tensors": {"hidden": ["batch", "tensor"]},
                "out": ["batch", None],
            }
        },
        "default": "replicate",
    }
)
BATCH = {"x": jax.ShapeDtypeStruct((32, 16), jnp.float32), "y": jax.ShapeDtypeStruct((32, 8), jnp.float32)}
OPTIMIZER = optax.adam(1e-3)


def loss(params, batch):
    with jgt.signal.context("mlp"):
        hidden = jgt.signal.tensor(jax.nn.relu(batch["x"] @ params["up"]), "hidden")
        out = hidden @ params["down"]
    return jnp.mean((out - batch["y"]) ** 2)


def step_on(mesh):
    """A step over a mesh, and the shapes of its state and of its batch with their shardings."""
    params = {"up": jax.ShapeDtypeStruct((16, 64), jnp.float32), "down": jax.ShapeDtypeStruct((64, 8), jnp.float32)}
    moments = jax.eval_shape(OPTIMIZER.init, params)
    placement = jgt.place(loss, RULES, mesh, params, BATCH)
    shardings = (placement.params, placement.optimizer(moments))
    state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), (params, moments), shardings)
    sharded = jgt.shard(loss, RULES, mesh)

    def step(state, batch):
        params, moments = state
        updates, moments = OPTIMIZER.update(jax.grad(sharded)(params, batch), moments, params)
        return optax.apply_updates(params, updates), moments

    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec("data"))), BATCH)
    return step, state, batch


def facts(plan):
    return sorted((c.kind, c.bytes, c.count, c.axes, c.signal, c.phase) for c in plan.collectives if c.bytes > 200)


GRADIENT = ("all-reduce", 1024, 1, ("data",), "mlp", "backward")
"""The gradient of `up`, [16, 64 / 4] in f32, over two devices: each sends twice the half of its 1024 bytes."""


@pytest.mark.parametrize("make_mesh", [jgt.make_mesh, jgt.abstract_mesh])
@pytest.mark.parametrize("target", [None, pytest.param("h100:1x8", marks=needs_plugin)])
def test_any_mesh_can_be_planned_for(make_mesh, target):
    step, *arguments = step_on(make_mesh(SIZES))
    plan = jgt.plan(step, *arguments, target=target)
    assert (plan.target, plan.devices, plan.mesh) == (target or "cpu", 8, SIZES)
    assert GRADIENT in facts(plan)
    assert plan.memory.groups == {
        "parameters": 4 * (16 * 16 + 16 * 8),
        "optimizer state": 8 * (16 * 16 + 16 * 8) + 4,
        "inputs": 4 * 16 * 24,
    }
    assert plan.memory.gradient_bytes == plan.memory.groups["parameters"]
    assert plan.warnings == []
    assert (plan.step_time_ms is None) is (target is None)


def test_what_jit_says_counts():
    step, *arguments = step_on(jgt.make_mesh(SIZES))
    donated = jgt.plan(jax.jit(step, donate_argnums=0), *arguments)
    kept = jgt.plan(jax.jit(step), *arguments)
    assert facts(donated) == facts(kept)
    assert kept.memory.peak_bytes - donated.memory.peak_bytes > donated.memory.groups["parameters"]


@needs_plugin
@pytest.mark.parametrize("name", chip_names())
def test_every_chip_can_be_planned_for(name):
    chip, size = load_chip(name), 1024
    plan = jgt.plan(lambda x: x @ x, jax.ShapeDtypeStruct((size, size), jnp.bfloat16), target=f"{name}:1x1")
    at_peak = 2 * size**3 / chip.peak_flops("bf16") * 1e3
    assert at_peak < plan.step_time_ms < 10 * at_peak + 0.1
    # XLA's description and the plan's figures are one chip.
    described = {key: float(re.search(rf"\b{key}: (\d+)", chip.xla)[1]) for key in ("device_memory_size", "memory_bandwidth")}
    assert described == pytest.approx({"device_memory_size": chip.hbm_gb * 1e9, "memory_bandwidth": chip.hbm_gbs * 1e9}, rel=0.01)
    assert f'device_description_str: "{chip.name}' in chip.xla


@needs_plugin
def test_a_shard_map_moves_to_the_target():
    mesh = jgt.make_mesh(SIZES)

    def fn(x):
        def local(x):
            return jax.lax.all_to_all(jax.lax.ppermute(x, "data", [(0, 1), (1, 0)]), "tensor", 1, 0, tiled=True)

        return jax.shard_map(
            local, mesh=mesh, in_specs=PartitionSpec(("data", "tensor")), out_specs=PartitionSpec(("data", "tensor")), check_vma=False
        )(x)

    plan = jgt.plan(fn, jax.ShapeDtypeStruct((64, 8), jnp.float32), target="h100:1x8")
    assert [(c.kind, c.axes, c.bytes) for c in plan.collectives] == [
        ("collective-permute", ("data",), 256),
        ("all-to-all", ("tensor",), 192),
    ]


def test_arguments_may_be_numbers_and_share_their_names():
    """The second argument has the names of the parameters, but other shardings."""
    _, state, _ = step_on(jgt.make_mesh(SIZES))
    whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state[0])
    plan = jgt.plan(lambda params, other, scale: jax.tree.map(lambda a, b: scale * (a + b), params, other), state[0], whole, 0.5)
    assert plan.memory.groups == {"parameters": 4 * (16 * 16 + 16 * 8), "inputs": 4 * (16 * 64 + 64 * 8) + 4}


def test_a_function_without_signals_is_one_row():
    plan = jgt.plan(lambda x: x @ x, jax.ShapeDtypeStruct((8, 8), jnp.float32))
    assert [row.signal for row in plan.signals] == ["(none)"]
    assert (plan.devices, plan.collectives, plan.flops_per_device) == (1, (), 2 * 8**3)


@needs_plugin
def test_what_stands_in_the_hosts_memory_is_told_apart():
    mesh = jgt.make_mesh({"data": 8})
    on_host = NamedSharding(mesh, PartitionSpec("data"), memory_kind="pinned_host")
    here = NamedSharding(mesh, PartitionSpec("data"))

    def fn(state, x):
        return jax.device_put(state, here) + x

    state = jax.ShapeDtypeStruct((1024, 128), jnp.float32, sharding=on_host)
    plan = jgt.plan(fn, state, jax.ShapeDtypeStruct((1024, 128), jnp.float32, sharding=here), target="h200:1x8")
    assert (plan.memory.host_bytes, plan.memory.args_bytes) == (4 * 128 * 128, 4 * 128 * 128)


@pytest.mark.parametrize(
    ("sizes", "target", "message"),
    [
        ({"data": 16}, None, "the mesh has 16 devices, but JAX has 8"),
        ({"data": 8}, "h100:2x8", "h100:2x8 has 16 devices, but the mesh data=8 has 8"),
        ({"data": 8}, "h300:1x8", "'h300' is not a chip that jgt knows"),
        ({"data": 8}, "h100", "say how many hosts"),
    ],
)
def test_what_does_not_fit_is_told(sizes, target, message):
    mesh = jgt.abstract_mesh(sizes)
    x = jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    with pytest.raises(jgt.InputError, match=message):
        jgt.plan(lambda x: x + 1, x, target=target)


def test_a_plan_is_of_one_mesh():
    one, other = (NamedSharding(jgt.abstract_mesh(sizes), PartitionSpec("data")) for sizes in ({"data": 8}, {"data": 4}))
    x, y = (jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=s) for s in (one, other))
    with pytest.raises(jgt.InputError, match="names 2 meshes"):
        jgt.plan(lambda x, y: (x, y), x, y)


@needs_plugin
@pytest.mark.parametrize(
    ("sizes", "attention"),
    [
        ("{data: 1, fsdp: 2, stage: 4, tensor: 1}", "cudnn"),
        pytest.param("{data: 1, fsdp: 2, stage: 2, tensor: 2}", "auto", marks=pytest.mark.slow),
    ],
)
def test_a_pipeline_is_planned_for_a_gpu_that_is_not_here(sizes, attention):
    small = [
        "model.embed=32",
        "model.ffn=32",
        "model.layers=4",
        "model.seq=16",
        "model.dtype=bf16",
        f"mesh={sizes}",
        f"model.attention={attention}",
        "train.batch=8",
        "devices.virtual_cpu=8",
    ]
    run = load("configs/pipeline.yaml", [*small, "pipeline.microbatches=2"])
    found = make_plan(run, Target.parse("h100:1x8"))
    assert {"layers/attn", "layers/mlp", "head", "pipeline"} <= {row.signal for row in found.signals}


@needs_plugin
def test_a_time_has_an_error_unless_the_step_does_not_fit():
    chip = load_chip("h100")
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    fits = jgt.plan(lambda x: x @ x, x, target="h100:1x1")
    assert fits.step_time_error == chip.error["one_host"]
    assert fits.step_time_caveat == ""
    assert sum(fits.parts_ms.values()) == pytest.approx(fits.step_time_ms)
    small = dataclasses.replace(Target.parse("h100:1x1"), chip=dataclasses.replace(chip, hbm_gb=1e-3))
    tight = jgt.plan(lambda x: x @ x, x, target=small)
    assert tight.memory.fits is False
    assert tight.step_time_error is None
    assert tight.step_time_caveat.startswith("the step does not fit")


def test_the_rows_of_equal_layers_of_a_loop_are_one_with_the_costs_of_all():
    def loss(params, x):
        for n, w in enumerate(params["blocks"]):
            with jgt.signal.context(f"blocks_{n}"), jgt.signal.context("mlp"):
                x = jnp.tanh(x @ w["up"])
        with jgt.signal.context("head"):
            return jnp.sum(x @ params["head"])

    params = {"blocks": [{"up": jnp.ones((16, 16))} for _ in range(3)], "head": jnp.ones((16, 4))}
    rules = {"signals": {"blocks_*/mlp": {"params": {"up": [None, "tensor"]}}}, "default": "replicate"}
    mesh = jgt.make_mesh({"data": 2, "tensor": 4})
    plan = jgt.plan(jax.jit(jax.grad(jgt.shard(loss, rules, mesh))), params, jnp.ones((8, 16)), rules=rules)
    layers = [row for row in plan.signals if row.signal.startswith("blocks_")]
    (row,) = (row for row in folded(plan.signals) if row.signal.startswith("blocks_"))
    assert len(layers) == 3 and row.signal == "blocks_*/mlp (3)"
    assert row.parameter_bytes == sum(one.parameter_bytes for one in layers) == 3 * 16 * 16 * 4
    assert row.flops == sum(one.flops for one in layers) > 0
    assert sum(row.sent.values()) == sum(sum(one.sent.values()) for one in layers)
    assert "blocks_*/mlp (3)" in str(plan)
