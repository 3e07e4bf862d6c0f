"""FLOPs of traced programs compared with closed forms, and bytes of compiled programs compared with counts by hand."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import jgt
from jgt.planner.described import described
from jgt.planner.flops import Flops, flops
from jgt.planner.hlo.origin import Origin
from jgt.planner.signals import signal_rows
from jgt.planner.timeline import Cost, Walk
from jgt.program.kernels import CUDNN
from train.config import load
from train.setup import prepare

SMALL = ["model.embed=128", "model.layers=4", "model.vocab=512", "model.seq=64", "train.batch=16"]


def counted(fn, *args):
    """Executed and useful FLOPs."""
    rows = flops(jax.make_jaxpr(fn)(*args))
    return sum(r.executed for r in rows), sum(r.useful for r in rows)


def closed_form(model, batch, *, recomputed):
    """FLOPs of a training step: matmuls of the blocks and the head, with all scores (arXiv 2104.04473, appendix).

    Backward costs twice the forward pass. Recompute runs a block again except for its last matmul, whose result is not needed.
    """
    tokens, heads, width = batch * model.seq, model.heads * model.head_size, model.embed
    kv = model.num_kv_heads * model.head_size
    mlp = (3 if model.kind == "llama" else 2) * width * model.ffn_size
    block = 2 * tokens * (2 * width * heads + 2 * width * kv + mlp) + 4 * tokens * model.seq * heads
    head = 2 * tokens * width * model.vocab
    last = 2 * tokens * width * model.ffn_size
    return 3 * (model.layers * block + head) + (model.layers * (block - last) if recomputed else 0)


def step_of(config, *overrides):
    """The trainer's step, its setup and its config."""
    run = load(f"configs/{config}.yaml", [*SMALL, *overrides])
    setup = prepare(run, num_devices=8)
    return setup.train_step(), setup, run.config


@pytest.mark.parametrize(("is_causal", "share"), [(True, 0.5), (False, 1)])
def test_attention_of_cudnn_counts_as_xlas_but_for_what_a_causal_mask_leaves_out(is_causal, share):
    q, k = (jax.ShapeDtypeStruct((2, 64, heads, 16), jnp.bfloat16) for heads in (4, 2))

    def gradient(q, k, v, kernel):
        attend = lambda *qkv: jax.nn.dot_product_attention(*qkv, is_causal=is_causal, implementation=kernel)  # noqa: E731
        return jax.grad(lambda *qkv: jnp.sum(attend(*qkv).astype(jnp.float32)), (0, 1, 2))(q, k, v)

    with described():
        found, full = (counted(lambda q, k, v, kernel=kernel: gradient(q, k, v, kernel), q, k, k) for kernel in ("cudnn", "xla"))
    assert found == tuple(share * count for count in full)


@pytest.mark.parametrize(("primitive", "matmuls"), [("fwd", 1), ("bwd", 2)])
def test_attention_of_cudnn_counts_the_width_of_values(primitive, matmuls):
    shapes, params = [(2, 64, 4, 24), (2, 64, 4, 24), (2, 64, 4, 16)], {"layout": 0, "mask_type": "MaskType.CAUSAL"}
    found = CUDNN.traced_flops(f"dot_product_attention_{primitive}_wrapper", params, shapes)
    assert found == matmuls * 2 * (2 * 4 * 64 * 64) * (24 + 16) // 2


@pytest.mark.parametrize(
    ("config", "kind", "remat"),
    [("quickstart", kind, remat) for kind in ("llama", "gpt") for remat in ("none", "block")]
    + [("pipeline", "llama", "none"), ("pipeline", "gpt", "block")],
)
def test_a_training_step_has_the_closed_forms_flops(config, kind, remat):
    step, setup, run = step_of(config, f"model.kind={kind}", "model.ffn=256", f"train.remat={remat}")
    executed, useful = counted(step, *setup.step_shapes)
    closed = closed_form(run.model, run.train.batch, recomputed=remat == "block")
    assert useful == pytest.approx(closed, rel=0.01)
    # 8 microbatches over 2 stages take 9 ticks, and the head works in 8 of them.
    assert executed == useful if config == "quickstart" else useful < executed < useful * 9 / 8 * 1.001


def test_phases_are_told_apart():
    step, setup, _ = step_of("quickstart", "train.remat=block")
    by_phase = {}
    for row in flops(jax.make_jaxpr(step)(*setup.step_shapes)):
        by_phase[row.phase] = by_phase.get(row.phase, 0) + row.executed
    assert by_phase["backward"] == 2 * by_phase["forward"]
    assert 0 < by_phase["recompute"] < by_phase["forward"]


def test_loops_branches_and_shards_are_counted():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    one = 2 * 8**3
    mesh = jgt.make_mesh({"data": 4, "tensor": 2})

    def looped(x):
        return jax.lax.scan(lambda x, _: (x @ x, None), x, length=5)[0]

    def branched(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x @ x @ x, x)

    def shared(x):
        return jax.shard_map(
            lambda x: x @ x, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), axis_names={"data"}, check_vma=False
        )(x)

    assert [counted(fn, x)[0] for fn in (looped, branched, shared)] == [5 * one, 2 * one, 4 * one]


def test_other_products_are_counted():
    image, kernel = jax.ShapeDtypeStruct((2, 3, 8, 8), jnp.float32), jax.ShapeDtypeStruct((5, 3, 3, 3), jnp.float32)
    rows, groups = jax.ShapeDtypeStruct((6, 4), jnp.float32), jax.ShapeDtypeStruct((2, 4, 5), jnp.float32)
    sizes = jax.ShapeDtypeStruct((2,), jnp.int32)
    assert counted(lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME"), image, kernel)[0] == 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)
    assert counted(jax.lax.ragged_dot, rows, groups, sizes)[0] == 2 * 6 * 4 * 5
    # Backward, by the transposed matrices and for the matrices, takes twice that.
    trained = jax.grad(lambda x, w, s: jnp.sum(jax.lax.ragged_dot(x, w, s) ** 2), (0, 1))
    assert counted(trained, rows, groups, sizes)[0] == 3 * 2 * 6 * 4 * 5


@pytest.mark.parametrize(("computed", "repeats"), [({"recompute": 3}, 1), ({"forward": 2, "backward": 4, "recompute": 2}, 2)])
def test_devices_that_repeat_work_are_told_from_recompute_that_xla_repeats(computed, repeats):
    once = {"forward": 1, "backward": 2, "recompute": 1}
    walk = Walk(costs={Origin("attn", phase): Cost(flops=count) for phase, count in (once | computed).items()})
    traced = [Flops(signal="attn", phase=phase, executed=8 * count, useful=8 * count) for phase, count in once.items()]
    (row,) = signal_rows([], SimpleNamespace(activations={}), [], walk, traced, 8, None, None, timed=False)
    assert (row.repeats, row.flops_share) == (repeats, 4)


def test_a_loop_counts_as_often_as_its_name_says():
    matrix = jax.ShapeDtypeStruct((8, 8), jnp.float32)

    def looped(name):
        def fn(x, n):
            with jax.named_scope(name):
                return jax.lax.fori_loop(0, n, lambda _, y: jnp.dot(y, x), x)

        return counted(fn, matrix, jax.ShapeDtypeStruct((), jnp.int32))[0] / (2 * 8**3)

    assert [looped(name) for name in ("jgt.trips.12", "jgt.more_rounds", "loop")] == [12, 0, 1]


@pytest.mark.parametrize("rules", ["fsdp_tensor", "zero1"])
def test_state_bytes_are_those_of_the_layout(rules):
    """Parameters and both moments in f32: 12 bytes each, over the devices that share them."""
    mesh = {"fsdp_tensor": "{data: 2, fsdp: 2, tensor: 2}", "zero1": "{data: 8}"}[rules]
    run = load("configs/quickstart.yaml", [*SMALL, "model.embed=256", "model.ffn=1024", f"mesh={mesh}", f"rules=rules/{rules}.yaml"])
    setup = prepare(run)
    plan = jgt.plan(setup.train_step(), *setup.step_shapes)
    groups, whole = plan.memory.groups, 4 * setup.num_parameters
    shares = {"fsdp_tensor": (4, 4), "zero1": (8, 8)}[rules]
    assert groups["parameters"] == pytest.approx(whole / shares[0], rel=0.005)
    assert groups["optimizer state"] == pytest.approx(2 * whole / shares[1], rel=0.005)
    assert sum(groups.values()) == pytest.approx(plan.memory.args_bytes, rel=0.005)
