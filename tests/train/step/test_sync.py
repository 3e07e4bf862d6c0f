"""`sync:` on a mesh: what crosses the axis, and the numbers of a run without it."""

from pathlib import Path

import jax
import numpy as np
import pytest
from hlo import axes_of, collectives
from plugin import needs_plugin
from replicas import assert_equal_on_all_devices, first_steps, over, sent

import jgt
from jgt.document import InputError
from jgt.planner.hardware.target import Target
from jgt.planner.hlo.text import Module
from train.config import load
from train.plan.make import make_plan
from train.setup import prepare

ROOT = Path(__file__).parents[3]
RULES = ROOT / "configs" / "rules"
HYBRID = (f"rules={RULES / 'hybrid.yaml'}", "mesh={replica: 2, fsdp: 4}")
PHASES = "sync={axis: replica, every: 3}"
DILOCO = "sync={axis: replica, every: 3, outer: {lr: 0.7, momentum: 0.9}}"


@pytest.fixture(scope="module")
def made(tiny_file):
    """The setup of a run."""
    return lambda *overrides: prepare(load(tiny_file, overrides))


@pytest.fixture(scope="module")
def plain(made):
    return first_steps(made(*HYBRID), 4)


@pytest.mark.parametrize(
    ("sync", "tolerance"),
    [
        ("sync={axis: replica}", 2e-6),
        pytest.param("sync={axis: replica, wire: bf16}", 2e-3, marks=pytest.mark.slow),
        pytest.param("sync={axis: replica, wire: int8}", 2e-3, marks=pytest.mark.slow),
        pytest.param("sync={axis: replica, wire: int8}", 2e-3, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_every_step_give_the_losses_of_the_plain_step(made, plain, sync, tolerance):
    state, losses = first_steps(made(*HYBRID, sync), 4)
    np.testing.assert_allclose(losses, plain[1], rtol=0, atol=tolerance)
    assert_equal_on_all_devices(state.params)


@pytest.mark.parametrize(
    "sync",
    [
        PHASES,
        pytest.param(DILOCO.replace("0.7", "1").replace("0.9", "0"), marks=pytest.mark.slow),
        pytest.param("sync={axis: replica, every: 4, fragments: 3}", marks=pytest.mark.slow),
    ],
)
def test_replicas_with_equal_rows_are_the_plain_run(made, sync):
    setup, one = made(*HYBRID, sync), made(*HYBRID)
    state, losses = first_steps(setup, 4, repeat=True)
    expected, whole = first_steps(one, 4, repeat=True)
    np.testing.assert_allclose(losses, np.stack([whole, whole], 1), rtol=0, atol=5e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[1], y, rtol=0, atol=5e-5), state.params, expected.params)


@pytest.mark.slow
def test_a_step_is_silent_and_an_exchange_makes_all_replicas_equal(made):
    setup = made(*HYBRID, DILOCO, "train.accumulate=2")
    assert over(setup.compile_train_step(), setup) == {"fsdp"}
    assert over(setup.compile_exchanges().whole, setup) == {"replica"}
    inside, _ = first_steps(setup, 2)
    assert any(not np.array_equal(x[0], x[1]) for x in map(np.asarray, jax.tree.leaves(inside.params)))
    after, losses = first_steps(setup, 3)
    assert losses.shape == (3, 2)
    for x, anchor in zip(jax.tree.leaves(after.params), jax.tree.leaves(after.anchor), strict=True):
        np.testing.assert_array_equal(x, np.stack([anchor, anchor]))
    # What is evaluated in the middle of a phase is the last exchange's.
    begun = setup.eval_params(inside)
    jax.tree.map(np.testing.assert_array_equal, begun, setup.eval_params(setup.init()))


@pytest.mark.slow
def test_the_first_exchange_is_the_mean_or_nesterovs_step(made):
    means, outer = made(*HYBRID, PHASES), made(*HYBRID, DILOCO)
    (mean, _), (moved, _) = first_steps(means, 3), first_steps(outer, 3)
    start = jax.device_get(means.init().anchor)
    assert mean.momentum is None
    for a, new, m, first in zip(
        *(jax.tree.leaves(jax.device_get(t)) for t in (mean.anchor, moved.anchor, moved.momentum, start)),
        strict=True,
    ):
        change = first - a
        np.testing.assert_allclose(m, change, rtol=0, atol=1e-6)
        np.testing.assert_allclose(new, first - 0.7 * (change + 0.9 * change), rtol=0, atol=1e-6)


EXPERTS = (f"rules={RULES / 'experts.yaml'}", "mesh={data: 2, fsdp: 1, expert: 4}", "model.experts={count: 4, choose: 2, ffn: 32}")


@pytest.mark.slow
def test_replicas_with_experts_send_rows_inside_of_a_replica_only(made):
    setup, one = made(*EXPERTS, "sync={axis: data, every: 3}"), made(*EXPERTS)
    assert over(setup.compile_train_step(), setup) == {"expert"}
    kinds = {c.kind for c in jgt.plan(setup.train_step(), *setup.step_shapes).collectives}
    assert "all-to-all" in kinds
    state, losses = first_steps(setup, 3, repeat=True)
    expected, whole = first_steps(one, 3, repeat=True)
    np.testing.assert_allclose(losses, np.stack([whole, whole], 1), rtol=0, atol=5e-6)
    # The bias of the router is the model's, and no parameter.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[1], y, rtol=0, atol=5e-5), state.variables, expected.variables)


@pytest.mark.slow
def test_moments_in_the_hosts_memory_give_the_same_bits(made):
    state, losses = first_steps(made(*HYBRID, PHASES, "optimizer.offload=host"), 4)
    np.testing.assert_array_equal(losses, first_steps(made(*HYBRID, PHASES), 4)[1])
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state) if x.ndim > 2} == {"pinned_host"}


@pytest.mark.slow
def test_the_average_of_replicas_is_the_average_of_their_means(made):
    setup = made(*HYBRID, PHASES, "train.ema=0.5")
    expected = jax.device_get(setup.init().anchor)
    for step in range(4):
        state, _ = first_steps(setup, step + 1)
        weight = 1 - min(0.5, (1 + step) / (10 + step))
        mean = jax.tree.map(lambda x: np.asarray(x).mean(0), state.params)
        expected = jax.tree.map(lambda a, p, weight=weight: a + weight * (p - a), expected, mean)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6), setup.eval_params(state), expected)


@pytest.mark.slow
def test_replicas_continue_with_the_mean_of_their_statistics(made):
    setup = made(*EXPERTS, "sync={axis: data, every: 3}")
    (inside, _), (after, _) = first_steps(setup, 2), first_steps(setup, 3)
    bias, later = (np.asarray(state.variables["layers"]["moe"]["bias"]) for state in (inside, after))
    assert not np.array_equal(bias[0], bias[1])
    np.testing.assert_array_equal(later[0], later[1])
    np.testing.assert_allclose(setup.eval_variables(inside)["layers"]["moe"]["bias"], bias.mean(0), rtol=1e-6)


def test_gradients_of_every_step_need_a_model_of_parameters_only(made):
    with pytest.raises(InputError, match=r"model.kind: the model keeps more than parameters .*Use a larger every"):
        made(*EXPERTS, "sync={axis: data}")


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("rules", "batch", "mesh", "inside"),
    [
        ("replicated", "[replica, data]", "{replica: 2, data: 4}", "{data: 4}"),
        ("fsdp", "[replica, fsdp]", "{replica: 2, fsdp: 4}", "{fsdp: 4}"),
        ("fsdp_tensor", "[replica, data, fsdp]", "{replica: 2, data: 1, fsdp: 2, tensor: 2}", "{data: 1, fsdp: 2, tensor: 2}"),
        ("overlap", "[replica, data, fsdp]", "{replica: 2, data: 1, fsdp: 2, tensor: 2}", "{data: 1, fsdp: 2, tensor: 2}"),
    ],
)
def test_a_replica_sends_what_a_run_of_its_devices_would(tiny_file, tmp_path, rules, batch, mesh, inside, accumulate):
    path = tmp_path / "rules.yaml"
    path.write_text(f"extends: {RULES / rules}.yaml\naxes: {{batch: {batch}}}\n")
    parts = f"train.accumulate={accumulate}"
    phases = prepare(load(tiny_file, [f"rules={path}", f"mesh={mesh}", PHASES, parts]))
    alone = load(tiny_file, [f"rules={RULES / rules}.yaml", f"mesh={inside}", "train.batch=8", parts])
    one = prepare(alone, devices=jax.devices()[:4])
    assert sent(jgt.plan(phases.train_step(), *phases.step_shapes)) == sent(jgt.plan(one.train_step(), *one.step_shapes))
    for wire, share in (("f32", 1.0), ("int8", 0.27)):
        setup = prepare(load(tiny_file, [f"rules={path}", f"mesh={mesh}", f"sync={{axis: replica, every: 3, wire: {wire}}}"]))
        exchanged = jgt.plan(setup.exchanges.exchange(), setup.shapes).sent_bytes
        formula = sum(place.bytes_per_device(setup.mesh) for place in setup.storage.placement.parameters)
        assert exchanged == formula if wire == "f32" else exchanged <= 0.35 * formula * share / 0.27


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [("optimizer.name=muon",), ("train.skip_spikes={}",), ("train.loss_chunks=4",), ("optimizer.moments=bf16", "train.remat=block")]
)
def test_whatever_else_a_step_does_stays_with_its_replica(made, more):
    setup = made(*HYBRID, PHASES, *more)
    assert over(setup.compile_train_step(), setup) == {"fsdp"}
    losses = first_steps(setup, 6)[1]
    assert np.isfinite(losses).all()


@pytest.mark.slow
def test_fragments_are_exchanged_one_after_another(made):
    setup = made(*HYBRID, "sync={axis: replica, every: 4, fragments: 2}")
    first, second = setup.exchanges.fragments
    programs = setup.compile_exchanges()
    assert all(over(program, setup) == {"replica"} for program in programs.parts)

    def equal(state):
        """Whether all replicas have the anchor, by fragment."""
        found = []
        for fragment in (first, second):
            pairs = zip(fragment.cut(state.params, lead=1), fragment.cut(state.anchor), strict=True)
            found.append(all(np.array_equal(p, np.stack([a, a])) for p, a in pairs))
        return found

    assert [equal(first_steps(setup, step)[0]) for step in (1, 2)] == [[False, False], [True, False]]
    assert equal(first_steps(setup, 4)[0]) == [False, True]


def test_a_fragment_is_at_most_its_share_of_a_tenth_more(made):
    setup = made(*HYBRID, "sync={axis: replica, every: 8, fragments: 5}", "model.layers=3")
    shapes, places = setup.shapes.anchor, setup.shardings.anchor
    sizes = [fragment.numbers(shapes, places) for fragment in setup.exchanges.fragments]
    whole = sum(place.bytes_per_device(setup.mesh) // 4 for place in setup.storage.placement.parameters)
    assert sum(sizes) == whole
    assert max(sizes) <= (1 / 5 + 0.1) * whole


@pytest.mark.slow
@pytest.mark.parametrize("wire", ["f32", "int8"])
def test_the_exchange_of_a_fragment_sends_its_share(made, wire):
    # Large enough for blocks.
    size = ("model.embed=64", "model.ffn=192", "model.heads=4")
    setup = made(*HYBRID, f"sync={{axis: replica, every: 8, fragments: 4, wire: {wire}}}", *size)
    found = [jgt.plan(setup.exchanges.exchange(part), setup.shapes).sent_bytes for part in (*range(4), None)]
    numbers = [fragment.numbers(setup.shapes.anchor, setup.shardings.anchor) for fragment in setup.exchanges.fragments]
    if wire == "f32":
        assert found[:4] == [4 * n for n in numbers]
    assert max(found[:4]) <= (1 / 4 + 0.1) * found[4]


CONSTANT = ("optimizer.warmup=0", "optimizer.schedule=constant", "optimizer.weight_decay=0")


@pytest.mark.parametrize(
    "more",
    [
        ("sync={axis: replica, late: 1}",),
        pytest.param(("sync={axis: replica, late: 1}", "train.accumulate=2"), marks=pytest.mark.slow),
        pytest.param(("sync={axis: replica, late: 1, wire: int8}",), marks=pytest.mark.slow),
        pytest.param(("sync={axis: replica, late: 1, wire: bf16}",), marks=pytest.mark.slow),
    ],
)
def test_a_late_gradient_is_applied_in_the_next_step(made, more):
    late, plain = made(*HYBRID, *CONSTANT, *more), made(*HYBRID, *CONSTANT)
    start = late.init()
    first, second = (first_steps(late, steps) for steps in (1, 2))
    jax.tree.map(np.testing.assert_array_equal, first[0].params, start.params)
    expected, losses = first_steps(plain, 1)
    is_exact = "wire" not in more[0]
    np.testing.assert_allclose(second[1][0], losses[0], rtol=0, atol=2e-6)
    # AdamW divides by the gradient's own size, so that its rounding matters where it is small.
    close = [np.isclose(x, y, rtol=0, atol=5e-5) for x, y in zip(*map(jax.tree.leaves, (second[0].params, expected.params)), strict=True)]
    assert sum(map(np.sum, close)) >= (1 if is_exact else 0.9) * sum(x.size for x in close)


def test_late_sums_ride_in_the_scan_over_layers(made):
    setup = made(*HYBRID, "sync={axis: replica, late: 1}")
    module = Module.parse(setup.compile_train_step().as_text())
    over_replica = [c for c in collectives(module, in_loops=True) if "replica" in axes_of(c, dict(setup.mesh.shape))]
    assert over_replica


@needs_plugin
@pytest.mark.slow
def test_late_gradients_hide_nine_tenths_of_what_the_axis_costs():
    """A llama of 542 million parameters on two hosts of 8 H100, as in docs/sync.md."""
    size = ("layers=8", "embed=2048", "heads=16", "kv_heads=16", "ffn=5632", "vocab=32000", "seq=2048", "dtype=bf16")
    more = ("train.remat=block", "train.batch=64", "mesh={replica: 2, fsdp: 8}", "rules=jgt:hybrid", "devices.virtual_cpu=16")

    def planned(sync):
        run = load(ROOT / "configs/quickstart.yaml", [*(f"model.{key}" for key in size), *more, f"sync={sync}"])
        return make_plan(run, Target.parse("h100:2x8"))

    now, late, alone = (planned(f"{{axis: replica, wire: bf16, {kind}}}") for kind in ("every: 1", "late: 1", "every: 20"))
    assert late.step_time_ms - alone.step_time_ms <= 0.1 * (now.step_time_ms - alone.step_time_ms)
    # What stays are the two sums of 8 bytes over all devices for the loss; gradients cross replica alone.
    assert "replica" not in late.exposed_ms
    assert not late.findings
    # What rides are not parameters of the layers.
    over_axis = sum(row.bytes for row in late.expected if row.axes == ("replica",))
    assert sum(c.total_bytes for c in late.collectives if c.axes == ("replica",)) == pytest.approx(over_axis, rel=1e-3)
