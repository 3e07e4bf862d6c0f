"""Runs with phases: resumed at any step, continued with another number of replicas, and read by others."""

import contextlib
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import jgt
from jgt.document import InputError
from train.checkpoint.checkpoint import Checkpoints
from train.checkpoint.restore import restore_params as restore
from train.checkpoint.saved import find_checkpoint
from train.checkpoint.steps import Steps
from train.config import load
from train.run.directory.identity import Resume
from train.run.restored import restore_state
from train.run.start import Start
from train.run.train import train
from train.settings.command_line import FEWER
from train.setup import prepare

# Each test shares processes that take long to start.
pytestmark = pytest.mark.slow

RULES = f"rules={Path(__file__).parents[3] / 'configs' / 'rules' / 'hybrid.yaml'}"
MESH = "mesh={replica: 2, fsdp: 4}"
OUTER = "sync={axis: replica, every: 3, outer: {lr: 0.9, momentum: 0.5}}"
STEPS = 5


def trained(tiny_file, folder, *overrides):
    """A run to its end: its setup, and the position that it reached."""
    found = []
    checked = load(tiny_file, [f"run.dir={folder}", RULES, MESH, f"train.steps={STEPS}", "train.eval_every=2", *overrides])
    train(checked, Resume(), on_end=lambda setup, position, done: found.append((setup, position)))
    return found[0]


@pytest.fixture(scope="module")
def whole(tiny_file, tmp_path_factory):
    """A run with a checkpoint of each step: its folder, its setup, and the position at its end."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, *trained(tiny_file, folder, OUTER, "checkpoint.every=1", "checkpoint.keep=100", "data.eval_tokens=1000")


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_that_is_stopped_at_any_step_has_the_bits_of_one_that_is_not(whole, tiny_file, tmp_path, read_rows, step):
    folder, _, expected = whole
    cut = tmp_path / "cut"
    shutil.copytree(folder, cut)
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(cut / "checkpoints" / str(later))
    assert find_checkpoint(cut)[0].manifest.phase == step % 3
    _, position = trained(tiny_file, cut, OUTER, "data.eval_tokens=1000")
    same(position.state, expected.state)
    rows = [[{k: v for k, v in row.items() if "loss" in k} for row in read_rows(f / "metrics.jsonl")] for f in (folder, cut)]
    assert rows[0] == rows[1]


def test_a_run_ends_with_an_exchange_and_its_model_is_what_all_replicas_have(whole):
    folder, setup, position = whole
    anchor = position.state.anchor
    assert position.phase == 0
    jax.tree.map(lambda x, a: np.testing.assert_array_equal(x, np.stack([a, a])), *jax.device_get((position.state.params, anchor)))
    same(jgt.load(folder).params, setup.model_params(anchor))


@pytest.mark.slow
def test_another_run_starts_from_the_last_exchange(whole, tiny_file):
    folder, _, position = whole
    for sync in (OUTER, "sync=null"):
        setup = prepare(load(tiny_file, [RULES, MESH, sync]))
        one, shardings = setup.saved_of_one
        params = setup.stored_params(restore(find_checkpoint(folder)[0], one.params, shardings.params))
        state = setup.with_model(setup.init(), params, {})
        same(setup.eval_params(state), position.state.anchor)


@pytest.mark.parametrize(("mesh", "sync", "replicas"), [("{replica: 4, fsdp: 2}", OUTER, 4), ("{replica: 2, fsdp: 4}", "sync=null", 0)])
def test_another_number_of_replicas_continues_from_an_exchange(whole, tiny_file, mesh, sync, replicas):
    folder, _, position = whole
    setup = prepare(load(tiny_file, [RULES, f"mesh={mesh}", sync]))
    state = restore_state(setup, find_checkpoint(folder)[0])
    same(setup.eval_params(state), position.state.anchor)
    means = [np.asarray(x).mean(0) for x in jax.tree.leaves(position.state.opt_state)]
    for x, mean in zip(jax.tree.leaves(state.opt_state), means, strict=True):
        np.testing.assert_allclose(x[0] if replicas else x, mean, rtol=1e-5, atol=1e-8)
    if replicas:
        same(state.momentum, position.state.momentum)
    assert jax.tree.map(lambda x: x.sharding, state) == setup.shardings


@pytest.mark.parametrize(
    ("mesh", "sync", "message"),
    [
        (
            "{replica: 4, fsdp: 2}",
            OUTER,
            r"sync.axis: .*/4 is in the middle of a phase, 1 step after an exchange, with 2 replicas, but .* 4",
        ),
        ("{replica: 2, fsdp: 4}", "sync=null", r"sync: .*/4 is in the middle of a phase, .* but this run has no replicas"),
    ],
)
def test_in_the_middle_of_a_phase_the_number_is_fixed(whole, tiny_file, mesh, sync, message):
    inside, _ = find_checkpoint(whole[0], before=5)
    with pytest.raises(InputError, match=message):
        restore_state(prepare(load(tiny_file, [RULES, f"mesh={mesh}", sync])), inside)


def test_where_the_launcher_may_change_the_number_such_a_checkpoint_is_not_used(whole, tiny_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(FEWER, "1")
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    shutil.rmtree(folder / "checkpoints" / "5")
    setup = prepare(load(tiny_file, [f"run.dir={folder}", RULES, "mesh={replica: 4, fsdp: 2}", OUTER]))
    checkpoints = Checkpoints(folder / "checkpoints", setup.run.config.checkpoint)
    position = Start(setup, {}, lambda *_, **__: contextlib.nullcontext(), print).position(checkpoints, Resume())
    checkpoints.close()
    assert (position.step, position.phase) == (3, 0)
    assert "the checkpoint of step 4 is in the middle of a phase, 1 step after an exchange, with 2 replicas" in capsys.readouterr().err
    assert Steps(folder / "checkpoints").listed() == [1, 2, 3]


def test_a_run_without_replicas_gets_them(whole, tiny_file, tmp_path):
    _, position = trained(tiny_file, tmp_path / "plain", "train.steps=2", "data.eval_tokens=0")
    setup = prepare(load(tiny_file, [RULES, MESH, OUTER]))
    state = restore_state(setup, find_checkpoint(tmp_path / "plain")[0])
    same(state.anchor, position.state.params)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[1], y), *jax.device_get((state.opt_state, position.state.opt_state)))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(state.momentum))


@pytest.mark.slow
def test_an_average_of_the_parameters_goes_to_another_number_of_replicas(tiny_file, tmp_path):
    more = ("train.ema=0.9", "data.eval_tokens=0")
    setup, position = trained(tiny_file, tmp_path / "run", OUTER, *more, "train.steps=3")
    expected = jax.device_get(setup.model_params(setup.eval_params(position.state)))
    same(jgt.load(tmp_path / "run").params, expected)
    for mesh, sync in (("{replica: 4, fsdp: 2}", OUTER), (MESH.partition("=")[2], "sync=null")):
        other = prepare(load(tiny_file, [RULES, f"mesh={mesh}", sync, *more]))
        state = restore_state(other, find_checkpoint(tmp_path / "run")[0])
        same(other.model_params(other.eval_params(state)), expected)


@pytest.mark.slow
def test_late_gradients_are_in_the_checkpoint(tiny_file, tmp_path):
    more = ("sync={axis: replica, late: 1}", "checkpoint.every=2", "train.steps=4", "data.eval_tokens=0")
    _, expected = trained(tiny_file, tmp_path / "run", *more)
    assert any(np.asarray(x).any() for x in jax.tree.leaves(expected.state.waiting))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    _, position = trained(tiny_file, tmp_path / "run", *more)
    same(position.state, expected.state)


@pytest.mark.slow
def test_a_run_with_fragments_has_the_bits_of_one_that_is_not_stopped(tiny_file, tmp_path):
    more = ("sync={axis: replica, every: 4, fragments: 2, outer: {}}", "checkpoint.every=1", "checkpoint.keep=100")
    options = (*more, "train.steps=7", "data.eval_tokens=0")
    _, expected = trained(tiny_file, tmp_path / "whole", *options)
    assert expected.phase == 0
    # After an exchange and in between.
    for step in (2, 3, 4, 5):
        shutil.copytree(tmp_path / "whole", cut := tmp_path / f"cut{step}")
        for later in range(step + 1, 8):
            shutil.rmtree(cut / "checkpoints" / str(later))
        assert find_checkpoint(cut)[0].manifest.phase == step
        _, position = trained(tiny_file, cut, *options)
        same(position.state, expected.state)
