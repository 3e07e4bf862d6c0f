"""The parts of a batch (`train.accumulate`): gradients are added up before they are sent, whatever the rules."""

from itertools import islice
from pathlib import Path

import jax
import numpy as np
import pytest
from hlo import axes_of, collectives
from plugin import needs_plugin

import jgt
from jgt.planner.hardware.target import Target
from jgt.planner.hlo.text import Module
from train.config import load
from train.data.opening import open_data
from train.plan.make import make_plan
from train.setup import prepare
from train.setup.feed import Feed
from train.setup.layout import mesh_layout

RULES = Path(__file__).parents[3] / "configs" / "rules"
PIPELINE = "pipeline={signal: layers, microbatches: 2}"
CASES = {
    "hybrid": ("replica", "{replica: 2, fsdp: 4}"),
    "replicated": ("data", "{data: 8}"),
    "zero1": ("data", "{data: 8}"),
    "fsdp_tensor": ("data", "{data: 2, fsdp: 2, tensor: 2}"),
    "pipeline": ("data", "{data: 2, fsdp: 2, stage: 2, tensor: 1}", PIPELINE),
}


@pytest.fixture(scope="module")
def steps_of(tiny_file):
    """The losses and norms of the first steps of a run, and the bytes of its step over each axis."""
    known = {}

    def run(*overrides, num_steps=3):
        if overrides not in known:
            setup = prepare(load(tiny_file, overrides))
            config = setup.run.config
            data = open_data(config.data, seq=config.model.seq, vocab=config.model.vocab, seed=0, cache_dir=Path("unused"))
            state, step, rows = setup.init(), setup.train_step(), []
            for number, batch in enumerate(islice(Feed(data, setup).train(0), num_steps), 1):
                state, metrics = step(state, batch, setup.settings(number))
                rows.append((metrics["loss"], metrics["grad_norm"]))
            sent = {}
            for row in jgt.plan(step, *setup.step_shapes).collectives:
                for axis in row.axes:
                    sent[axis] = sent.get(axis, 0) + row.total_bytes
            known[overrides] = np.array(jax.device_get(rows)), sent
        return known[overrides]

    return run


def overrides_of(name):
    _, mesh, *more = CASES[name]
    return f"rules={RULES / name}.yaml", f"mesh={mesh}", "train.batch=32", *more


@pytest.mark.parametrize("name", ["hybrid", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "hybrid")])
def test_no_part_sends_anything_over_the_axis(tiny_file, name):
    setup = prepare(load(tiny_file, [*overrides_of(name), "train.accumulate=4"]))
    module = Module.parse(setup.compile_train_step().as_text())
    sizes = dict(setup.mesh.shape)
    inside, outside = ({axis for c in collectives(module, in_loops=looped) for axis in axes_of(c, sizes)} for looped in (True, False))
    assert CASES[name][0] in outside - inside


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_parts_send_over_the_axis_what_the_whole_batch_sends(steps_of, name):
    (losses, sent), (whole, at_once) = steps_of(*overrides_of(name), "train.accumulate=4"), steps_of(*overrides_of(name))
    np.testing.assert_allclose(losses, whole, rtol=0, atol=5e-6)
    axis = CASES[name][0]
    # A few numbers more: the losses of the replicas are added up on their own.
    assert 0 < sent[axis] <= at_once[axis] * 1.01 + 64


@pytest.mark.parametrize(
    ("rules", "mesh", "more", "axes"),
    [
        ("hybrid", "{replica: 2, fsdp: 4}", (), ("replica",)),
        ("hybrid", "{replica: 1, fsdp: 8}", (), ()),
        ("fsdp", "{fsdp: 8}", (), ()),
        ("zero1", "{data: 8}", (), ("data",)),
        ("pipeline", "{data: 2, fsdp: 2, stage: 2, tensor: 1}", (PIPELINE,), ()),
        ("hybrid", "{replica: 2, fsdp: 4}", ("model.fp8=true", "model.dtype=bf16"), ()),
        ("hybrid", "{replica: 2, fsdp: 4}", ("train.accumulate=1",), ()),
    ],
)
def test_axes_along_which_gradients_stay_apart(tiny_file, rules, mesh, more, axes):
    run = load(tiny_file, [f"rules={RULES / rules}.yaml", f"mesh={mesh}", "train.accumulate=2", *more])
    assert mesh_layout(run, num_devices=8).replicas == axes


@needs_plugin
@pytest.mark.slow
def test_the_flags_of_overlap_keep_the_activations_of_one_part_only():
    model = [f"model.{size}" for size in ("layers=4", "embed=256", "ffn=1024", "seq=512", "dtype=bf16")]
    constant = [*model, "mesh={fsdp: 8}", "rules=jgt:fsdp", "train.batch=64", "train.accumulate=4", "train.remat=none"]

    def peak(preset):
        run = load(Path(__file__).parents[3] / "configs/quickstart.yaml", [*constant, f"xla.preset={preset}", "devices.virtual_cpu=8"])
        return make_plan(run, Target.parse("h100:1x8")).memory.peak_bytes

    # gpu-pipeline lacks the passes that copy loops.
    assert peak("gpu-overlap") <= 1.1 * peak("gpu-pipeline")
