"""`sync:` with a pipeline: what crosses the axis, the numbers of a run without it, and runs that are resumed."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from plugin import needs_plugin
from replicas import assert_equal_on_all_devices, first_steps, over, sent

import jgt
from jgt.planner.hardware.target import Target
from train.checkpoint.saved import find_checkpoint
from train.config import load
from train.plan.make import make_plan
from train.run.directory.identity import Resume
from train.run.restored import restore_state
from train.run.train import train
from train.setup import prepare

ROOT = Path(__file__).parents[3]
RULES = ROOT / "configs" / "rules" / "pipeline.yaml"
SMALL = ("model.layers=4",)
PHASES = "sync={axis: replica, every: 3}"
STEPS = 5


def inside(data=1, fsdp=1, stage=2, tensor=1):
    """A mesh without the axis of sync."""
    return f"data: {data}, fsdp: {fsdp}, stage: {stage}, tensor: {tensor}"


def pipeline(schedule, microbatches=2):
    return f"pipeline={{signal: layers, schedule: {schedule}, microbatches: {microbatches}}}"


@pytest.fixture(scope="module")
def rules(tmp_path_factory):
    """The shipped rules, with the batch over the axis of sync as well."""
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(f"extends: {RULES}\naxes: {{batch: [replica, data, fsdp]}}\n")
    return path


@pytest.fixture(scope="module")
def made(tiny_file, rules):
    """The setup of a run on two replicas of a mesh."""
    return lambda mesh, *more: prepare(load(tiny_file, [*SMALL, f"rules={rules}", f"mesh={{replica: 2, {mesh}}}", *more]))


def test_a_step_is_silent(made):
    setup = made(inside(stage=2, fsdp=2), pipeline("1f1b", 1), PHASES, "model.layers=2", "model.seq=16")
    assert over(setup.compile_train_step(), setup) == {"fsdp", "stage"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "schedule", "more"),
    [
        ({"stage": 4}, "1f1b", ()),
        ({"stage": 2, "fsdp": 2}, "interleaved", ("train.accumulate=2", "pipeline.gather=layer")),
        ({"stage": 2, "tensor": 2}, "zb", ()),
    ],
)
def test_replicas_with_equal_rows_are_the_plain_run(made, mesh, schedule, more):
    options = (inside(**mesh), pipeline(schedule), *more)
    state, losses = first_steps(made(*options, PHASES), 4, repeat=True)
    expected, whole = first_steps(made(*options), 4, repeat=True)
    np.testing.assert_allclose(losses, np.stack([whole, whole], 1), rtol=0, atol=5e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[1], y, rtol=0, atol=5e-5), state.params, expected.params)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "schedule"), [({"stage": 4}, "1f1b"), ({"stage": 2, "fsdp": 2}, "interleaved")])
def test_an_exchange_makes_all_replicas_equal(made, mesh, schedule):
    setup = made(inside(**mesh), pipeline(schedule), "sync={axis: replica, every: 3, outer: {}}")
    assert over(setup.compile_exchanges().whole, setup) == {"replica"}
    before, _ = first_steps(setup, 2)
    assert any(not np.array_equal(x[0], x[1]) for x in map(np.asarray, jax.tree.leaves(before.params)))
    after, _ = first_steps(setup, 3)
    for x, anchor in zip(jax.tree.leaves(after.params), jax.tree.leaves(after.anchor), strict=True):
        np.testing.assert_array_equal(x, np.stack([anchor, anchor]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "schedule", "more"),
    [
        ({"stage": 4}, "1f1b", ()),
        ({"stage": 4}, "zigzag", ()),
        ({"stage": 2, "fsdp": 2}, "1f1b", ()),
        ({"stage": 2, "fsdp": 2}, "interleaved", ("train.accumulate=2", "pipeline.gather=layer")),
        ({"stage": 2, "tensor": 2}, "zb_interleaved", ()),
        ({"stage": 2, "tensor": 2}, "1f1b", ("model.dtype=bf16", "optimizer.gradients=bf16")),
        ({"stage": 2, "data": 2}, "gpipe", ("train.remat=block", "pipeline.remat=stage")),
    ],
)
def test_a_replica_sends_what_a_run_of_its_devices_would(tiny_file, made, mesh, schedule, more):
    deep = "model.layers=8"
    setup = made(inside(**mesh), deep, pipeline(schedule), PHASES, *more)
    alone = (*SMALL, deep, f"rules={RULES}", f"mesh={{{inside(**mesh)}}}", "train.batch=8", pipeline(schedule), *more)
    one = prepare(load(tiny_file, alone), devices=jax.devices()[:4])
    assert sent(jgt.plan(setup.train_step(), *setup.step_shapes)) == sent(jgt.plan(one.train_step(), *one.step_shapes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "schedule", "sync", "tolerance"),
    [
        ({"stage": 4}, "1f1b", "{axis: replica}", 2e-6),
        ({"stage": 2, "fsdp": 2}, "interleaved", "{axis: replica}", 2e-6),
        ({"stage": 2, "tensor": 2}, "zb", "{axis: replica, wire: bf16}", 2e-3),
        ({"stage": 2, "fsdp": 2}, "interleaved", "{axis: replica, wire: int8}", 5e-3),
    ],
)
def test_gradients_of_every_step_give_the_losses_of_the_plain_step(made, mesh, schedule, sync, tolerance):
    options = (inside(**mesh), pipeline(schedule))
    state, losses = first_steps(made(*options, f"sync={sync}"), 20)
    np.testing.assert_allclose(losses, first_steps(made(*options), 20)[1], rtol=0, atol=tolerance)
    assert_equal_on_all_devices(state.params)


@pytest.mark.slow
def test_a_late_gradient_is_applied_in_the_next_step(made):
    constant = ("optimizer.warmup=0", "optimizer.schedule=constant", "optimizer.weight_decay=0")
    options = (inside(stage=2, fsdp=2), pipeline("interleaved"), *constant)
    late, plain = made(*options, "sync={axis: replica, late: 1}"), made(*options)
    jax.tree.map(np.testing.assert_array_equal, first_steps(late, 1)[0].params, late.init().params)
    expected, found = first_steps(plain, 1)[0], first_steps(late, 2)[0]
    # AdamW divides by the gradient's own size, so that its rounding matters where it is small.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=5e-5), found.params, expected.params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sync",
    [
        "{axis: replica, every: 3, outer: {lr: 0.9, momentum: 0.5}}",
        "{axis: replica, every: 5, fragments: 2}",
        "{axis: replica, wire: int8}",
        "{axis: replica, late: 1}",
    ],
)
def test_a_run_that_is_stopped_has_the_bits_of_one_that_is_not(tiny_file, rules, tmp_path, sync):
    stored = (f"mesh={{replica: 2, {inside(stage=2, fsdp=2)}}}", pipeline("interleaved"))
    more = (*SMALL, f"rules={rules}", f"train.steps={STEPS}", "train.eval_every=2", "checkpoint.every=1", "checkpoint.keep=100", *stored)

    def trained():
        found = []
        checked = load(tiny_file, [f"run.dir={tmp_path}/run", "data.eval_tokens=1000", *more, f"sync={sync}"])
        train(checked, Resume(), on_end=lambda setup, position, done: found.append(position.state))
        return jax.device_get(found[0])

    expected = trained()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"{STEPS}")
    if "every" in sync:
        assert find_checkpoint(tmp_path / "run")[0].manifest.phase
    jax.tree.map(np.testing.assert_array_equal, trained(), expected)


@pytest.mark.slow
def test_a_run_continues_without_a_pipeline_from_an_exchange(tiny_file, made, rules, tmp_path):
    options = [
        *SMALL,
        f"rules={rules}",
        f"mesh={{replica: 2, {inside(stage=2, fsdp=2)}}}",
        pipeline("interleaved"),
        PHASES,
        "train.steps=3",
    ]
    found = []
    checked = load(tiny_file, [f"run.dir={tmp_path}/run", *options])
    train(checked, Resume(), on_end=lambda setup, position, done: found.append(jax.device_get(setup.model_params(position.state.anchor))))
    saved, _ = find_checkpoint(tmp_path / "run")
    fsdp = f"rules={ROOT / 'configs' / 'rules' / 'hybrid.yaml'}"
    for other in ((fsdp, "mesh={replica: 4, fsdp: 2}", PHASES), (fsdp, "mesh={replica: 2, fsdp: 4}", "sync=null")):
        setup = prepare(load(tiny_file, [*SMALL, *other]))
        state = restore_state(setup, saved)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(setup.eval_params(state)), found[0])


@needs_plugin
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [("fsdp: 8", None), (inside(fsdp=2, stage=4), "1f1b"), (inside(fsdp=2, stage=2, tensor=2), "interleaved")],
)
def test_a_step_on_two_hosts_of_h100_sends_what_one_host_alone_would(rules, mesh, schedule):
    size = ("layers=8", "embed=1024", "heads=8", "kv_heads=8", "ffn=2816", "vocab=32000", "seq=1024", "dtype=bf16")
    more = [
        *(f"model.{key}" for key in size),
        "train.remat=block",
        "devices.virtual_cpu=16",
        *([pipeline(schedule, 4)] if schedule else []),
    ]
    ours, own = (rules, "jgt:pipeline") if schedule else ("jgt:hybrid", "jgt:fsdp")

    def planned(target, *run):
        return make_plan(load(ROOT / "configs/quickstart.yaml", [*more, *run]), Target.parse(target))

    two = planned("h100:2x8", f"mesh={{replica: 2, {mesh}}}", f"rules={ours}", "train.batch=64", "sync={axis: replica, every: 20}")
    one = planned("h100:1x8", f"mesh={{{mesh}}}", f"rules={own}", "train.batch=32", "devices.virtual_cpu=8")
    assert sent(two) == sent(one)
    assert not two.findings
