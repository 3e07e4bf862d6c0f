"""Whole runs on one device: they write the right files, and stopping and resuming changes nothing."""

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import newest_of

from train.checkpoint.checkpoint import Checkpoints, SaveError
from train.checkpoint.restore import restore
from train.checkpoint.steps import Steps
from train.config import load
from train.files.ends import Exit
from train.models.decoder import build
from train.processes.watch import Watch
from train.run.train import train
from train.setup import prepare
from train.step.objective import RESERVED

RULES = "rules={axes: {batch: [data]}, default: replicate}"
SIX_STEPS = ("train.steps=6", "train.eval_every=3", "data.eval_tokens=1000", "checkpoint.every=2", "checkpoint.keep=2")


@pytest.fixture(scope="module")
def straight(tiny_file, tmp_path_factory):
    """The directory of an uninterrupted run of six steps, with evaluations and checkpoints."""
    folder = tmp_path_factory.mktemp("straight")
    train(load(tiny_file, [f"run.dir={folder}", *SIX_STEPS]))
    return folder


@pytest.fixture
def losses(read_rows):
    """Step → loss of a run directory."""
    return lambda folder: {row["step"]: row["loss"] for row in read_rows(folder / "metrics.jsonl") if "loss" in row}


@pytest.fixture
def last_params():
    """The parameters of a run's newest checkpoint."""

    def _last_params(run):
        setup = prepare(run)
        checkpoints = Checkpoints(run.config.run.path / "checkpoints", run.config.checkpoint)
        state = restore(newest_of(checkpoints)[0], setup.shapes, setup.shardings)
        checkpoints.close()
        return jax.device_get(state.params)

    return _last_params


# -- saves that fail ----------------------------------------------------------------------------------------------


def full_at(monkeypatch, *saves):
    """Makes the disk look full to some saves of a run, given by their numbers."""
    number = itertools.count(1)
    plain = shutil.disk_usage
    monkeypatch.setattr(
        "train.checkpoint.checkpoint.shutil.disk_usage", lambda path: plain(path)._replace(free=0) if next(number) in saves else plain(path)
    )


def test_a_run_goes_on_when_a_save_fails(tiny, monkeypatch, capsys, read_rows):
    full_at(monkeypatch, 2)
    run = tiny("train.steps=6", "checkpoint.every=2")
    train(run)
    (event,) = [e for e in read_rows(run.config.run.path / "events.jsonl") if e["phase"] == "save_failed"]
    assert event["step"] == 4 and "but 0 B are free" in event["why"]
    assert "a checkpoint could not be saved: " in capsys.readouterr().err
    assert sorted(path.name for path in (run.config.run.path / "checkpoints").iterdir()) == ["2", "6"]


def test_a_run_that_is_stopped_after_a_failed_save_saves_once_more(tiny, monkeypatch, capsys):
    """The save of its last step has begun, and its failure is known only later."""
    run = tiny("train.steps=6", "checkpoint.every=2", "checkpoint.keep=1")
    finish, may_begin = Steps.finish, Watch.may_begin

    def fail_once(steps, manifest):
        monkeypatch.setattr(Steps, "finish", finish)
        raise OSError("no such device")

    def stop_after_two(watch, step):
        return may_begin(watch, step) and step <= 2

    monkeypatch.setattr(Steps, "finish", fail_once)
    monkeypatch.setattr(Watch, "may_begin", stop_after_two)
    assert train(run) == Exit.DONE
    assert "a checkpoint could not be saved: no such device" in capsys.readouterr().err
    assert [path.name for path in (run.config.run.path / "checkpoints").iterdir()] == ["2"]


def test_a_run_whose_last_save_fails_has_failed(tiny, monkeypatch, capsys):
    full_at(monkeypatch, *range(2, 1000))
    run = tiny("train.steps=4", "checkpoint.every=2")
    with pytest.raises(SaveError, match="but 0 B are free"):
        train(run)
    out, err = capsys.readouterr()
    assert "It is the last one, and is tried again in 1 s" in err or "This was the last try" in err
    assert "the run failed; the newest checkpoint is from step 2" in err
    assert "Checkpoint of step 4" not in out


def test_a_step_is_saved_though_older_ones_cannot_be_removed(tiny, monkeypatch, capsys):
    def refuse(steps, keep, held):
        raise PermissionError(errno.EACCES, "Permission denied", "old")

    monkeypatch.setattr(Steps, "retire", refuse)
    run = tiny("train.steps=4", "checkpoint.every=2", "checkpoint.keep=1")
    assert train(run) == Exit.DONE
    assert "old checkpoints cannot be removed: old: Permission denied. The next save tries again" in capsys.readouterr().err
    assert sorted(path.name for path in (run.config.run.path / "checkpoints").iterdir()) == ["2", "4"]


# -- what a run writes -------------------------------------------------------------------------------------------


def test_a_logged_step(straight, read_rows):
    rows = [row for row in read_rows(straight / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    keys = {"step", "loss", "grad_norm", "lr", "time", "samples", "tokens", "epoch", "step_time_s", "tokens_per_s", "mfu"}
    assert all(row.keys() == keys for row in rows)  # a CPU has no figures of its memory
    # A metric of the loss would be lost behind any of them.
    assert keys < {*RESERVED}
    assert [(row["samples"], row["tokens"]) for row in rows] == [(16 * n, 16 * n * 32) for n in range(1, 7)]
    # A window is 33 tokens, and the next one begins with its last.
    assert [row["epoch"] for row in rows] == pytest.approx([16 * n / (30372 // 32) for n in range(1, 7)], abs=1e-3)
    assert rows[0]["time"] > 1e9 and [row["time"] for row in rows] == sorted(row["time"] for row in rows)
    assert [row["lr"] for row in rows] == pytest.approx([1e-3, 2e-3, 3e-3, 3e-3, 3e-3, 3e-3])
    timed = [row for row in rows if row["step_time_s"] is not None]
    # A step that a busy host saw late has no time of its own.
    assert timed and timed[0]["step"] > 2
    assert all(row["tokens_per_s"] == pytest.approx(16 * 32 / row["step_time_s"]) for row in timed)
    assert all(row["mfu"] is None for row in rows)  # no peak is known for a CPU
    assert rows[0]["loss"] > np.log(256) > rows[-1]["loss"]


def test_an_evaluation_adds_its_loss(straight, read_rows):
    rows = [row for row in read_rows(straight / "metrics.jsonl") if "eval_loss" in row]
    assert [row["step"] for row in rows] == [3, 6]
    assert rows[1]["eval_loss"] < rows[0]["eval_loss"] < np.log(256)


def test_an_evaluation_is_the_mean_over_all_held_out_tokens(straight, tiny, tmp_path, last_params, read_rows):
    run = tiny(*SIX_STEPS, f"run.dir={straight}")
    held_out = Path(run.config.data.path).read_bytes()[-1000:]
    params, apply = last_params(run), jax.jit(build(run.config.model).apply)
    nats = []
    for start in range(0, len(held_out) - 32, 32):  # 31 windows: the second batch of 16 lacks a row
        window = np.frombuffer(held_out[start : start + 33], np.uint8).astype(np.int32)
        logits = np.asarray(apply(params, {}, window[None, :-1])[0], np.float64)
        for position, target in enumerate(window[1:]):
            nats.append(np.log(np.exp(logits[position]).sum()) - logits[position, target])
    assert len(nats) == 31 * 32
    last = [row["eval_loss"] for row in read_rows(straight / "metrics.jsonl") if "eval_loss" in row][-1]
    assert last == pytest.approx(np.mean(nats), abs=1e-5)


def test_phases(straight, read_rows):
    events = read_rows(straight / "events.jsonl")
    named = {"start", "open", "trace", "verify", "init", "compile", "step", "eval", "save", "write", "other", "stop"}
    assert {event["phase"] for event in events} == named
    assert all(event["seconds"] >= 0 and event["time"] > 1e9 for event in events)
    assert [event["step"] for event in events if event["phase"] == "eval"] == [3, 6]
    stretches = [event for event in events if event["phase"] == "step"]
    assert [step for event in stretches for step in range(event["first"], event["last"] + 1)] == [1, 2, 3, 4, 5, 6]
    assert all(0 <= event["busy"] <= event["seconds"] and event["steps"] == event["last"] + 1 - event["first"] for event in stretches)
    assert events[-1] == {"phase": "stop", "time": events[-1]["time"], "seconds": 0.0, "step": 6, "why": "done"}


def test_only_the_last_checkpoints_are_kept(straight):
    assert sorted(p.name for p in (straight / "checkpoints").iterdir() if p.name.isdigit()) == ["4", "6"]


def test_the_directory_keeps_the_resolved_config(straight):
    run = load(straight / "config.yaml")
    assert run.config.train.steps == 6
    assert json.loads((straight / "data.json").read_text())["eval_tokens"] == 1000


# -- stopping and starting again ---------------------------------------------------------------------------------


def test_a_stopped_run_goes_on_bit_for_bit(straight, tiny, tmp_path, losses, read_rows, stopped_at, last_params):
    run = tiny(*SIX_STEPS)
    with stopped_at(5):
        train(run)
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4, 5]
    train(run)
    rows = [(row["step"], "loss" in row) for row in read_rows(tmp_path / "run" / "metrics.jsonl")]
    assert rows == [(1, True), (2, True), (3, True), (3, False), (4, True), (5, True), (6, True), (6, False)]
    assert losses(tmp_path / "run") == losses(straight)
    jax.tree.map(np.testing.assert_array_equal, last_params(run), last_params(tiny(*SIX_STEPS, f"run.dir={straight}")))
    events = read_rows(tmp_path / "run" / "events.jsonl")
    assert [event["step"] for event in events if event["phase"] == "restore"] == [4]


@pytest.mark.slow
def test_a_run_goes_on_when_steps_are_raised_also_on_another_mesh(straight, tiny, tmp_path, losses, capsys):
    three = tiny("train.steps=3", "data.eval_tokens=1000")
    train(three)
    capsys.readouterr()
    train(three)
    assert "Already at step 3 of 3. To train further, raise train.steps, for example train.steps=6" in capsys.readouterr().out
    train(tiny("train.steps=6", "data.eval_tokens=1000", "mesh={data: 8}", RULES))
    assert f"Resumed from step 3 in {tmp_path / 'run'}" in capsys.readouterr().out
    expected = losses(straight)
    for step, loss in losses(tmp_path / "run").items():
        assert loss == pytest.approx(expected[step], abs=1e-5)


# -- the command -------------------------------------------------------------------------------------------------


def test_the_command_trains_on_virtual_devices(tiny_file, tmp_path, root):
    overrides = [f"run.dir={tmp_path}/run", "devices.virtual_cpu=2", "mesh={data: 2}", RULES, "train.steps=1"]
    command = [sys.executable, "-W", "error", "-m", "train", "--config", str(tiny_file), *overrides]
    env = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": ""}
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("jgt ") and lines[0].endswith(f"Run directory: {tmp_path}/run")
    assert lines[1] == "Mesh: data 2 = 2 x cpu"
    step, checkpoint, trained, files = lines[-4:]
    assert step.startswith("step 1/1  loss ")
    assert checkpoint == f"Checkpoint of step 1 in {tmp_path}/run/checkpoints"
    assert trained.startswith("Trained for ") and files.startswith(f"In {tmp_path}/run: checkpoints/, metrics.jsonl, events.jsonl")
