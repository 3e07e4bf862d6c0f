"""Runs through a pipeline have the numbers of one device at every step, and can resume without it or with another pipeline."""

import json
import shutil
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import saved
from models import assert_close
from runs import flags, run_both

from jgt.schedule.schedules import SCHEDULES
from train.config import load
from train.data.opening import open_data
from train.run.restored import restore_state
from train.run.train import train
from train.setup import prepare
from train.setup.feed import Feed

CONFIG = Path(__file__).parents[3] / "configs" / "pipeline.yaml"
STEPS = 20
CLIP = 0.5
SMALL = (
    "model.layers=8",
    "model.embed=32",
    "model.ffn=64",
    "model.seq=32",
    "train.batch=16",
    "pipeline.microbatches=4",
    f"train.steps={STEPS}",
    "train.eval_every=0",
    "train.eval_batches=null",
    f"checkpoint.every={STEPS // 2}",
    "optimizer.schedule=constant",
    "optimizer.warmup=2",
    f"optimizer.clip={CLIP}",
    "sample={tokens: 0, prompt: '12', temperature: 0}",
    "data.source=text",
    "data.eval_tokens=1000",
)
ONE_DEVICE = ("pipeline=null", "rules=null", "mesh={data: 1}", "sample.tokens=20")
TWO_STAGES = ("sample.tokens=20",)
FOUR_STAGES = (
    "mesh={data: 1, fsdp: 2, stage: 4, tensor: 1}",
    "pipeline={signal: layers, axis: stage, schedule: interleaved, microbatches: 4}",
)
PIPELINES = pytest.mark.parametrize(
    "pipeline", [TWO_STAGES, pytest.param(FOUR_STAGES, marks=pytest.mark.slow)], ids=["1f1b", "interleaved"]
)


@dataclass(frozen=True)
class Curve:
    """The numbers of the logged steps in a run directory, and its path."""

    folder: Path
    losses: np.ndarray
    norms: np.ndarray
    eval_loss: float


@pytest.fixture(scope="module")
def small(text_file):
    """A small version of configs/pipeline.yaml, with overrides."""
    return lambda *overrides: load(CONFIG, [f"data.path={text_file}", *SMALL, *overrides])


@pytest.fixture(scope="module")
def curve(small, tmp_path_factory):
    """The curve of a run, which trains once."""
    known = {}

    def _curve(*overrides):
        if overrides not in known:
            folder = tmp_path_factory.mktemp("run")
            train(small(f"run.dir={folder}", *overrides))
            known[overrides] = read(folder)
        return known[overrides]

    return _curve


def read(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
    (evaluation,) = (row for row in rows if "eval_loss" in row)
    return Curve(folder, *(np.array([row[key] for row in steps]) for key in ("loss", "grad_norm")), evaluation["eval_loss"])


def opened(run):
    """A run's setup and its data, without a run directory."""
    setup, config = prepare(run), run.config
    data = open_data(config.data, seq=config.model.seq, vocab=config.model.vocab, seed=0, cache_dir=Path("unused"))
    return setup, Feed(data, setup)


def first_steps(run, number=4):
    """Losses and norms of a run's first steps."""
    setup, feed = opened(run)
    state, step = setup.init(), setup.compile_train_step()
    found = []
    for count, batch in enumerate(islice(feed.train(0), number), 1):
        state, metrics = step(state, batch, setup.settings(count))
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return np.array(found).T


def assert_near(found, expected, tolerance=1e-5):
    np.testing.assert_allclose(found, expected[: len(found)], rtol=0, atol=tolerance)


@pytest.mark.parametrize("schedule", ["1f1b", *(pytest.param(one, marks=pytest.mark.slow) for one in SCHEDULES if one != "1f1b")])
def test_matmuls_in_eight_bits_have_the_scales_of_a_microbatch(small, schedule):
    pipeline = f"pipeline={{signal: layers, schedule: {schedule}, microbatches: 4}}"
    setup, feed = opened(small("model.fp8=true", "mesh={data: 4, fsdp: 1, stage: 2, tensor: 1}", pipeline))
    batch = jax.device_get(next(iter(feed.train(0))))
    batch["weights"] = batch["weights"] / batch["weights"].sum()
    plain = prepare(small("model.fp8=true", *ONE_DEVICE))
    state = jax.device_get(plain.init())

    def gradients(setup, params, rows):
        (loss, _), found = jax.jit(jax.value_and_grad(setup.objective.loss, has_aux=True))(params, state.variables, rows)
        return jax.device_get((loss, setup.model_params(found)))

    # 4 microbatches on each of 4 data shards have one row each.
    def summed(params):
        parts = [gradients(plain, params, {name: x[n : n + 1] for name, x in batch.items()}) for n in range(16)]
        return jax.tree.map(lambda *x: np.sum(x, axis=0), *parts)

    expected = summed(state.params)
    found = gradients(setup, setup.stored_params(state.params), batch)
    # A difference in the last bit may put an entry on the other side of a rounding to eight bits. Gradients that are computed after it
    # then change by percents, as those of one device do if parameters change by 1e-7. So most of the check is about the first ones.
    assert_close(first_met(found), first_met(expected), 5e-4)
    draw = np.random.default_rng(1)
    moved = jax.tree.map(lambda x: (x * (1 + 1e-7 * draw.standard_normal(x.shape))).astype(x.dtype), state.params)
    assert furthest(found, expected) < 2 * furthest(summed(moved), expected)
    of_one_scale = gradients(plain, state.params, batch)
    with pytest.raises(AssertionError, match="of its largest entry"):
        assert_close(first_met(of_one_scale), first_met(expected), 1e-2)


def furthest(got, want):
    """The largest error of an array, in parts of its largest entry."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def first_met(found):
    """The loss, and the gradients that the backward pass computes first: of the head and of the last two layers."""
    loss, tree = found
    return loss, tree["head"], tree["norm"], jax.tree.map(lambda x: x[-2:], tree["layers"])


# -- the numbers of one device -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_reference_learns_and_its_gradients_are_clipped(curve):
    reference = curve(*ONE_DEVICE)
    assert reference.losses[-1] < reference.losses[0] - 0.5
    assert (reference.norms > CLIP).sum() > STEPS / 2


@PIPELINES
def test_losses_and_norms_are_those_of_one_device(curve, pipeline):
    found, reference = curve(*pipeline), curve(*ONE_DEVICE)
    assert len(found.losses) == STEPS
    assert_near(found.losses, reference.losses)
    assert_near(found.norms, reference.norms)
    assert_near([found.eval_loss], [reference.eval_loss])


@pytest.fixture(scope="module")
def start(small):
    """Parameters before the first step and their loss on the held-out text."""
    known = {}

    def _start(*overrides):
        if overrides not in known:
            setup, feed = opened(small(*overrides))
            params, evaluate = setup.init().params, setup.compile_eval_step(feed.eval_batch)
            sums = np.sum(
                [jax.device_get(evaluate(params, {}, batch)["loss"]) for batch in feed.evaluation(None)], axis=0, dtype=np.float64
            )
            known[overrides] = jax.device_get(setup.model_params(params)), sums[0] / sums[1]
        return known[overrides]

    return _start


@PIPELINES
def test_parameters_start_with_the_bits_of_one_device(start, pipeline):
    jax.tree.map(np.testing.assert_array_equal, start(*pipeline)[0], start(*ONE_DEVICE)[0])


@PIPELINES
def test_the_same_parameters_have_the_same_evaluation_loss(start, pipeline):
    assert start(*pipeline)[1] == pytest.approx(start(*ONE_DEVICE)[1], rel=1e-6, abs=0)


def test_a_batch_in_two_parts_through_the_pipeline_is_the_whole_batch(small, curve):
    losses, norms = first_steps(
        small("train.accumulate=2", "mesh={data: 4, stage: 2, fsdp: 1, tensor: 1}", "pipeline.schedule=gpipe", "pipeline.microbatches=2")
    )
    assert_near(losses, curve(*ONE_DEVICE).losses)
    assert_near(norms, curve(*ONE_DEVICE).norms)


@pytest.mark.slow
def test_bf16_is_near_f32(small, curve):
    losses, reference = first_steps(small("model.dtype=bf16", "pipeline.schedule=gpipe"))[0], curve(*ONE_DEVICE).losses
    assert_near(losses, reference, 2e-2)
    assert not np.allclose(losses, reference[:4], rtol=0, atol=1e-5)


def test_the_sample_is_that_of_one_device(curve):
    written = (curve(*TWO_STAGES).folder / "sample.txt").read_text()
    assert len(written) == 22
    assert written == (curve(*ONE_DEVICE).folder / "sample.txt").read_text()


# -- going on ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [ONE_DEVICE, FOUR_STAGES], ids=["without", "four-stages"])
def test_a_checkpoint_of_two_stages_goes_on_elsewhere(curve, small, tmp_path, capsys, other):
    folder = tmp_path / "run"
    shutil.copytree(curve(*TWO_STAGES).folder, folder)
    shutil.rmtree(folder / "checkpoints" / str(STEPS))
    capsys.readouterr()
    train(small(f"run.dir={folder}", *other))
    assert f"Resumed from step {STEPS // 2} in {folder}" in capsys.readouterr().out
    found, reference = read(folder), curve(*ONE_DEVICE)
    assert len(found.losses) == STEPS
    assert_near(found.losses, reference.losses)
    assert_near(found.norms, reference.norms)


INTERLEAVED = (
    "model.layers=7",
    "mesh={data: 1, fsdp: 2, stage: 2, tensor: 2}",
    "pipeline={signal: layers, axis: stage, schedule: interleaved, virtual: 2, microbatches: 4}",
)
OTHERS = {
    "no pipeline": ("model.layers=7", "pipeline=null", "rules=null", "mesh={data: 1}"),
    "four stages": ("model.layers=7", "pipeline.schedule=zb", "mesh={data: 1, fsdp: 2, stage: 4, tensor: 1}"),
}


def test_a_checkpoint_of_chunks_has_the_bits_of_the_model_everywhere(small, tmp_path):
    setup = prepare(small("train.ema=0.9", *INTERLEAVED))
    assert setup.storage.forms
    state = setup.init()
    # The first dims of a stack, and those of its moments: 2 chunks on 2 stages, 2 layers each, one of them padding.
    stacks = [x.shape[:3] for x in jax.tree.leaves((state.params, state.opt_state, state.average)) if x.ndim >= 4]
    assert set(stacks) == {(2, 2, 2)}
    assert len(stacks) % 4 == 0
    # Moments that are not zero.
    state = replace(state, opt_state=setup.from_saved(jax.tree.map(lambda x: x + 1, setup.to_save(state))).opt_state)
    found = saved(setup, state, tmp_path / "checkpoints")
    expected = jax.device_get(setup.to_save(state))
    assert all(x.shape[0] == 7 for x in jax.tree.leaves(expected.params["layers"]))
    for other in OTHERS.values():
        elsewhere = prepare(small("train.ema=0.9", *other))
        restored = jax.device_get(elsewhere.to_save(restore_state(elsewhere, found)))
        jax.tree.map(np.testing.assert_array_equal, restored, expected)
    again = restore_state(setup, found)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(setup.to_save(again)), expected)


# -- several processes -------------------------------------------------------------------------------------------


def test_a_pipeline_across_two_processes_has_the_curve_of_one(curve, text_file, tmp_path, pytestconfig):
    mesh = ("mesh={stage: 2, data: 4, fsdp: 1, tensor: 1}", "devices.virtual_cpu=4")
    overrides = [f"data.path={text_file}", *SMALL, *mesh, "train.steps=4"]
    command = ["-m", "train", "--config", str(CONFIG), f"run.dir={tmp_path}/run", *overrides]
    first, _ = run_both(tmp_path, lambda port, i: [*command, *flags(port, 2, i)], pytestconfig.rootpath)
    assert "Mesh: data 4 x fsdp 1 x stage 2 x tensor 1 = 8 x cpu on 2 processes" in first
    found = read(tmp_path / "run")
    assert len(found.losses) == 4
    assert_near(found.losses, curve(*TWO_STAGES).losses)
