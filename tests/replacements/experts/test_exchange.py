"""Experts on a mesh: values, gradients and bytes."""

import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_mixture import every_expert, every_expert_of, ffn, loss_of, make, mixed, rules_of, worst
from plugin import needs_plugin

import jgt
from jgt import signal
from jgt.replacements.experts.dispatch import AllToAll

EMBED, FFN = 16, 24
MESHES = [
    {"data": 2, "expert": 4},
    {"expert": 8},
    {"data": 4, "expert": 2},
    {"data": 8, "expert": 1},
    {"data": 2, "fsdp": 2, "expert": 2},
    {"data": 2, "expert": 2, "tensor": 2},
    {"expert": 4, "tensor": 2},
]
FACTORS = [1.0, 1.25, 4.0]
ROUTERS = {"balanced": 0.0, "skewed": 0.2, "one": 9.0}
GRID = list(itertools.product(MESHES, FACTORS, ((8, 2), (16, 4), (8, 1)), ROUTERS))
QUICK = [(MESHES[0], 1.25, (8, 2), "balanced"), (MESHES[5], 1.0, (8, 2), "one")]


def bias_of(router, count):
    return ROUTERS[router] * jnp.arange(count)[::-1]


@pytest.mark.parametrize(
    ("mesh", "factor", "sizes", "router"), [pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow, id=str(one)) for one in GRID]
)
def test_values_and_gradients_are_those_of_every_expert_on_every_row(mesh, factor, sizes, router):
    count, choose = sizes
    params, x = make(jax.random.key(0), count, EMBED, FFN), jax.random.normal(jax.random.key(1), (16, 8, EMBED))
    bias = bias_of(router, count)
    wanted = jax.jit(jax.value_and_grad(loss_of(every_expert, choose, bias)))(params, x)
    rules = jgt.make_rules(rules_of(mesh, capacity_factor=factor))
    sharded = jgt.shard(loss_of(mixed, choose, bias), rules, jgt.make_mesh(mesh))
    found = jax.jit(jax.value_and_grad(sharded))(params, x)
    assert worst(found, wanted) < 2e-6
    assert mesh["expert"] == 1 or "expert" in found[1]["up"].sharding.spec


@pytest.mark.parametrize(
    "mesh", [{"data": 4, "expert": 1, "tensor": 2}, pytest.param({"expert": 4, "tensor": 2}, marks=pytest.mark.slow)], ids=str
)
def test_a_router_whose_scales_are_the_values_of_top_k(mesh):
    def layer(run):
        def loss(params, x):
            with signal.context("moe"):
                scores, choice = jax.lax.top_k(x @ params["router"], 2)
                return jnp.mean(jnp.sin(run(params, x, choice.astype(jnp.uint8), jax.nn.softmax(scores))))

        return loss

    def here(params, x, choice, scale):
        return signal.experts(ffn, {name: params[name] for name in ("gate", "up", "down")}, x, choice, scale)

    params, x = make(jax.random.key(0), 8, EMBED, FFN), jax.random.normal(jax.random.key(1), (16, 8, EMBED))
    wanted = jax.jit(jax.value_and_grad(layer(every_expert_of)))(params, x)
    run = jax.jit(jax.value_and_grad(jgt.shard(layer(here), jgt.make_rules(rules_of(mesh)), jgt.make_mesh(mesh))))
    assert worst(run(params, x), wanted) < 2e-6
    # Each device chooses for its own rows.
    assert "all-gather(" not in run.lower(params, x).compile().as_text()


@pytest.mark.slow
def test_rows_beyond_the_room_are_dropped_if_the_rules_say_so():
    mesh, count, choose = {"expert": 4}, 4, 1
    params, x = make(jax.random.key(0), count, EMBED, FFN), jax.random.normal(jax.random.key(1), (4, 16, EMBED))
    rules = jgt.make_rules(rules_of(mesh, capacity_factor=1.0, over="drop"))
    bias = bias_of("one", count)
    run = jgt.shard(lambda params, x: mixed(params, x, choose, bias), rules, jgt.make_mesh(mesh, devices=jax.devices()[:4]))
    found, wanted = jax.jit(run)(params, x), every_expert(params, x, choose, bias)
    # Every device sends its 16 rows to one device, and has room for 8, in tiles of 8.
    served = np.any(np.asarray(found) != 0, axis=-1)
    assert served.sum(axis=1).tolist() == [8] * 4
    np.testing.assert_allclose(np.asarray(found)[served], np.asarray(wanted)[served], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_rows_come_back_to_where_they_came_from(number):
    choice = jax.random.randint(jax.random.key(0), (4, 16, 2), 0, 8) // 2 * jnp.array([[[1, 2]]])
    x = jnp.arange(1.0, 65).reshape(4, 16, 1)

    def on_device(choice, x):
        one = AllToAll.of(choice[0] % 8, 2, "expert", 1.0, drops=False).start(number)
        rows = one.to_experts(x[0])
        return jnp.sum(one.to_tokens(rows), axis=1)[None], one.sizes[None], rows[None]

    mesh = jgt.make_mesh({"expert": 4}, devices=jax.devices()[:4])
    spec = jax.P("expert")
    back, sizes, rows = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False))(choice, x)
    # A token comes back as often as its choices are of this round, and as itself.
    times = np.asarray(back) / np.asarray(x)
    assert np.all(times == np.round(times))
    assert times.sum() == sizes.sum()
    # Rows are grouped by expert: those of the group are tokens that chose it.
    for device, (groups, values) in enumerate(zip(np.asarray(sizes), np.asarray(rows), strict=True)):
        begin = 0
        for local, size in enumerate(groups):
            tokens = values[begin : begin + size, 0].astype(int) - 1
            chosen = np.asarray(choice % 8).reshape(64, 2)[tokens]
            assert np.all(np.any(chosen == 2 * device + local, axis=1))
            begin += size


# -- bytes ---------------------------------------------------------------------------------------------------------

COUNT, CHOOSE, BATCH, SEQ, LAYERS = 16, 4, 16, 16, 2


def planned(mesh, target=None):
    """The plan of the loss and the gradients of a stack of mixtures."""

    def loss(params, x):
        with signal.context("layers"):
            y, _ = jax.lax.scan(jax.checkpoint(lambda x, layer: (x + mixed(layer, x, CHOOSE, 0.0), None), prevent_cse=False), x, params)
        return jnp.mean(y)

    params = jax.eval_shape(lambda: make(jax.random.key(0), COUNT, EMBED, FFN, LAYERS))
    x = jax.ShapeDtypeStruct((BATCH, SEQ, EMBED), jnp.float32)
    on, rules = jgt.abstract_mesh(mesh), jgt.make_rules(rules_of(mesh, capacity_factor=1.25))
    where = jgt.place(loss, rules, on, params, x)
    step = jax.jit(jax.value_and_grad(jgt.shard(loss, rules, on)), in_shardings=(where.params, where.inputs(x)))
    return jgt.plan(step, params, x, target=target)


def bytes_of(mesh):
    """What a device sends over `expert` in f32: forward rows and results; backward rows, cotangents, and the gradients of rows."""
    n = mesh["expert"]
    tokens = BATCH * SEQ // int(np.prod([size for axis, size in mesh.items() if axis != "tensor"]))
    rows = n * (-(-5 * tokens * CHOOSE // (4 * n * 8)) * 8)
    # Before the rows, each device says how many there are; scales go with the rows, and their gradients come back.
    return LAYERS * (n - 1) * 4 * (rows * (2 * EMBED + 3 * EMBED + 2) + 2 * COUNT) // n


@pytest.mark.parametrize("mesh", [{"data": 2, "expert": 4}, pytest.param({"expert": 4, "tensor": 2}, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("target", [pytest.param(None, marks=pytest.mark.slow), pytest.param("h100:1x8", marks=needs_plugin)])
def test_bytes_are_those_of_the_formula(mesh, target):
    plan = planned(mesh, target)
    found = Counter()
    for one in plan.collectives:
        # The maximum over the devices says how many rounds there are. Gradients of the router are added up with those of other axes.
        if "expert" in one.axes and one.signal == "layers/moe" and one.kind != "all-reduce":
            found[one.kind] += one.bytes * one.count
    assert sum(found.values()) == bytes_of(mesh)
    assert set(found) == {"all-to-all"}
    assert [row.bytes for row in plan.expected if row.axes == ("expert",) and row.formula == "shard_map"] == [bytes_of(mesh)]


@pytest.mark.parametrize("router", [pytest.param("balanced", marks=pytest.mark.slow), "one"])
def test_memory_is_that_of_one_round_whatever_is_routed(router):
    params, x = make(jax.random.key(0), 8, 64, 128), jax.random.normal(jax.random.key(1), (16, 64, 64))

    def temporary(factor):
        rules = jgt.make_rules(rules_of({"expert": 8}, capacity_factor=factor))
        sharded = jgt.shard(loss_of(mixed, 2, bias_of(router, 8)), rules, jgt.make_mesh({"expert": 8}))
        return jax.jit(jax.value_and_grad(sharded, argnums=(0, 1))).lower(params, x).compile().memory_analysis().temp_size_in_bytes

    assert temporary(1.25) < 0.5 * temporary(8.0)
