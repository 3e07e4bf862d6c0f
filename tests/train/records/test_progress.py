"""The rows of steps: whatever the loss returns, samples or tokens, memory, and the time left."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from train.records.console import Screen
from train.records.progress import Countdown, Progress, StepResult, memory_use
from train.records.records import Records
from train.setup import prepare


@pytest.fixture
def setup(tiny, tmp_path):
    (tmp_path / "run").mkdir()
    return prepare(tiny("train.steps=4"))


def follow(setup, tmp_path, **metrics):
    progress = Progress(setup, Screen(enabled=True), Records(tmp_path / "run"), 0, epoch_samples=64)
    for step in range(1, 5):
        values = {"loss": jnp.float32(2.0), "grad_norm": jnp.float32(1.0), "applied": jnp.bool_(True), **metrics}
        progress.dispatched(StepResult(step=step, samples=(16 * step - 16, 16 * step - 1), metrics=values))
        progress.step_over()
    progress.end()


def test_further_metrics_of_the_loss_are_logged_and_shown(setup, tmp_path, read_rows, capsys):
    follow(setup, tmp_path, accuracy=jnp.float32(0.5), samples=jnp.float32(7.0), image=jnp.zeros((2, 2)))
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["accuracy"] for row in rows] == [0.5] * 4
    # The trainer's own names are its own, and what is not a number is not a metric.
    assert [row["samples"] for row in rows] == [16, 32, 48, 64] and [row["image"] for row in rows] == [None] * 4
    assert [row["epoch"] for row in rows] == [0.25, 0.5, 0.75, 1.0]
    assert all("accuracy 0.5" in line for line in capsys.readouterr().out.splitlines())


def test_inputs_that_are_no_tokens_are_counted_in_samples(setup, tmp_path, read_rows, capsys):
    images = {"inputs": jax.ShapeDtypeStruct((8, 8, 3), jnp.float32), "targets": jax.ShapeDtypeStruct((), jnp.int32)}
    follow(dataclasses.replace(setup, program=dataclasses.replace(setup.program, element=images)), tmp_path)
    row = read_rows(tmp_path / "run" / "metrics.jsonl")[-1]
    assert "tokens" not in row and "tokens_per_s" not in row
    assert row["samples"] == 64 and row["mfu"] is None and "samples_per_s" in row
    assert "64 samples" in capsys.readouterr().out


def test_the_fullest_device_counts(monkeypatch):
    class Device:
        def __init__(self, used):
            self.memory_stats = lambda: used and {"bytes_in_use": used, "peak_bytes_in_use": 2 * used, "bytes_limit": 100}

    monkeypatch.setattr("jax.local_devices", lambda: [Device(3), Device(40), Device(None)])
    assert memory_use() == {"memory_bytes": 40, "memory_peak_bytes": 80, "memory_limit_bytes": 100}
    monkeypatch.setattr("jax.local_devices", lambda: [Device(None)])
    assert memory_use() == {}


def test_the_time_left_includes_what_is_not_a_step(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    countdown = Countdown(10)
    found = []
    for step in range(11, 15):
        now[0] += 5
        found.append(countdown.seconds_left(step, 20))
    assert found == [None, None, 35.0, 30.0]
