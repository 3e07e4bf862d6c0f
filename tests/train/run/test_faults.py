"""Faults for drills: each happens once in a run, in the given process and at the given step."""

import signal
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import newest_of

from train.checkpoint.checkpoint import Checkpoints
from train.checkpoint.config import CheckpointConfig
from train.checkpoint.steps import FOLDER
from train.run.faults import Faults, InjectedError
from train.settings.sections import Fault
from train.step.state import State

BATCH = {"inputs": jnp.arange(12).reshape(4, 3), "weights": jnp.ones((4, 3))}


class HappenedError(Exception):
    """A fault that would have ended the process."""


@pytest.fixture
def start(tmp_path):
    """The faults of a starting process. `noted` collects what it records."""

    def _start(*faults, process=0):
        started = Faults(faults, tmp_path, process, lambda fault: _start.noted.append((fault.kind, fault.at_step)))
        return started

    _start.noted = []
    return _start


@pytest.fixture
def calls(monkeypatch):
    """The calls that would have killed or stopped this process."""
    found = []

    def happen(*call):
        found.append(call)
        raise HappenedError

    monkeypatch.setattr("train.run.faults.os", SimpleNamespace(kill=happen, getpid=lambda: 77))
    monkeypatch.setattr("train.run.faults.time", SimpleNamespace(sleep=lambda seconds: happen("sleep")))
    return found


@pytest.mark.parametrize(("kind", "call"), [("kill", (77, signal.SIGKILL)), ("hang", ("sleep",))])
def test_a_process_is_killed_or_hangs_once(start, calls, kind, call):
    fault = Fault(at_step=3, kind=kind)
    first = start(fault)
    assert first.inject(2, BATCH) is BATCH
    with pytest.raises(HappenedError):
        first.inject(3, BATCH)
    again = start(fault)
    assert again.inject(3, BATCH) is BATCH
    assert calls == [call]
    assert start.noted == [(kind, 3)]


def test_an_error_is_raised_once(start):
    fault = Fault(at_step=1, kind="raise")
    with pytest.raises(InjectedError, match=r"^debug\.faults: raise at step 1$"):
        start(fault).inject(1, BATCH)
    start(fault).inject(1, BATCH)


def test_the_same_fault_twice_happens_twice(start):
    twice = [Fault(at_step=1, kind="raise")] * 2
    for _ in range(2):
        with pytest.raises(InjectedError):
            start(*twice).inject(1, BATCH)
    assert start(*twice).inject(1, BATCH) is BATCH


def test_only_the_named_process_fails(start):
    fault = Fault(at_step=1, kind="raise", process=2)
    for process in (0, 1):
        assert start(fault, process=process).inject(1, BATCH) is BATCH
    with pytest.raises(InjectedError):
        start(fault, process=2).inject(1, BATCH)


def test_a_step_that_a_start_passes_over_is_left_alone(start):
    assert start(Fault(at_step=3, kind="raise")).inject(4, BATCH) is BATCH
    assert start.noted == []


def test_weights_that_are_not_a_number(start):
    faults = start(Fault(at_step=2, kind="nan"))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    batch = jax.device_put(BATCH, sharding)
    assert faults.inject(1, batch) is batch
    poisoned = faults.inject(2, batch)
    assert np.isnan(poisoned["weights"]).all() and poisoned["weights"].sharding == sharding
    assert poisoned["inputs"] is batch["inputs"]
    assert np.isfinite(batch["weights"]).all()
    assert faults.inject(2, batch) is batch


def test_a_full_disk_fails_the_first_save_from_its_step_on(start, tmp_path):
    faults = start(Fault(at_step=3, kind="disk_full"))
    faults.inject(2, BATCH)
    assert faults.free(tmp_path) > 0
    faults.inject(5, BATCH)
    assert faults.free(tmp_path) == 0
    assert faults.free(tmp_path) > 0
    assert start.noted == [("disk_full", 3)]


def test_one_bit_of_the_newest_checkpoint_is_flipped_which_is_not_used(start, tmp_path):
    checkpoints = Checkpoints(tmp_path / FOLDER, CheckpointConfig())
    for step in (2, 4):
        checkpoints.save(State(jnp.int32(step), {"w": jnp.arange(1000.0)}, ()), step, step * 8)
        checkpoints.wait()

    def content():
        return {path.relative_to(tmp_path): path.read_bytes() for path in (tmp_path / FOLDER).rglob("*") if path.is_file()}

    before = content()
    start(Fault(at_step=5, kind="corrupt")).inject(5, BATCH)
    after = content()
    (changed,) = [path for path in before if before[path] != after[path]]
    assert changed.is_relative_to(f"{FOLDER}/4")
    flipped = np.frombuffer(before[changed], np.uint8) ^ np.frombuffer(after[changed], np.uint8)
    assert np.unpackbits(flipped).sum() == 1
    found, (report,) = newest_of(checkpoints)
    checkpoints.close()
    assert found.manifest.step == 2
    assert "the checkpoint of step 4 is damaged" in report and "has other content than was written" in report


def test_without_a_checkpoint_there_is_nothing_to_damage(start, tmp_path):
    assert start(Fault(at_step=1, kind="corrupt")).inject(1, BATCH) is BATCH
    assert not (tmp_path / FOLDER).exists()
