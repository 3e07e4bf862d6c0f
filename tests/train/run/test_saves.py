"""When a run saves, and what is left of a run that ends by itself: nothing that it has trained is lost."""

import itertools
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.checkpoint.checkpoint import Checkpoints, SaveError
from train.checkpoint.config import CheckpointConfig
from train.checkpoint.saved import find_checkpoint
from train.checkpoint.steps import Steps
from train.records.progress import SkippedError
from train.run.hooks.evaluator import Evaluator
from train.run.opened import open_run
from train.run.restored import restore_state
from train.run.saves import Saves
from train.run.start import Position
from train.run.train import train
from train.setup.feed import Feed

BAD = 5
"""The step at which a run ends by itself."""
ONE, EIGHT = ("mesh={data: 1}",), ("mesh={data: 8}", "rules={axes: {batch: [data]}, default: replicate}")
EVERYTHING = ("train.ema=0.9", "train.skip_spikes={window: 8}", "optimizer.name=muon")


class BrokenError(Exception):
    """An error of the user's data or evaluation."""


@pytest.fixture
def broken(monkeypatch):
    """Makes a run end by itself at step BAD: by NaN in its batch, by its data, or in an evaluation."""
    plain_train, plain_evaluate = Feed.train, Evaluator.evaluate

    @contextmanager
    def _broken(kind):
        def batches(self, samples):
            for step, batch in enumerate(plain_train(self, samples), samples // 16 + 1):
                if step == BAD and kind == "data":
                    raise BrokenError
                yield batch | {"weights": batch["weights"] * (jnp.nan if step == BAD and kind == "nan" else 1)}

        def evaluate(self, state, step, *more):
            if step == BAD and kind == "evaluation":
                raise BrokenError
            plain_evaluate(self, state, step, *more)

        with monkeypatch.context() as patch:
            patch.setattr(Feed, "train", batches)
            patch.setattr(Evaluator, "evaluate", evaluate)
            yield

    return _broken


def saved_steps(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir()) if (folder / "checkpoints").is_dir() else []


def state_of(run):
    setup, _ = open_run(run)
    return jax.device_get(restore_state(setup, find_checkpoint(run.config.run.path)[0]))


@pytest.mark.parametrize(
    ("kind", "last"),
    [("nan", BAD - 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("data", BAD - 1), ("evaluation", BAD)))],
)
@pytest.mark.parametrize("mesh", [ONE, EIGHT], ids=["ahead", "eight"])
def test_the_last_good_state_is_saved_and_the_run_resumes_bit_for_bit(tiny, tmp_path, broken, capsys, kind, last, mesh):
    """With the settings of checkpoints left at their defaults. On one device the host has dispatched two more steps by then."""
    options = ("train.steps=9", f"train.eval_every={BAD}", "data.eval_tokens=1000", *mesh, *EVERYTHING)
    run, unbroken = tiny(*options), tiny(f"run.dir={tmp_path / 'unbroken'}", *options)
    with broken(kind), pytest.raises(SkippedError if kind == "nan" else BrokenError):
        train(run)
    assert saved_steps(tmp_path / "run") == [last]
    assert f"the run failed; the newest checkpoint is from step {last}" in capsys.readouterr().err
    assert state_of(run).step == last
    if kind == "nan":
        # It stops there again, and does not count as a newer checkpoint.
        with broken(kind), pytest.raises(SkippedError, match=f"step {BAD}: "):
            train(run)
        assert saved_steps(tmp_path / "run") == [last]
    train(run)
    train(unbroken)
    jax.tree.map(np.testing.assert_array_equal, state_of(run), state_of(unbroken))


def test_a_save_that_fails_while_an_error_ends_the_run_is_repeated(tiny, tmp_path, broken, monkeypatch, capsys):
    plain = Steps.finish

    def fail_once(steps, listing):
        monkeypatch.setattr(Steps, "finish", plain)
        raise OSError("no such device")

    monkeypatch.setattr(Steps, "finish", fail_once)
    with broken("data"), pytest.raises(BrokenError):
        train(tiny("train.steps=9", f"checkpoint.every={BAD - 1}", *ONE))
    assert "a checkpoint could not be saved: no such device" in capsys.readouterr().err
    assert saved_steps(tmp_path / "run") == [BAD - 1]


def test_a_run_that_has_skipped_too_many_updates_keeps_the_checkpoint_before(tiny, tmp_path, broken):
    """Otherwise each restart would skip as many more."""
    with broken("nan"), pytest.raises(SkippedError):
        train(tiny("train.steps=9", "train.on_nonfinite=skip", "train.max_skipped=1", "checkpoint.every=3"))
    assert saved_steps(tmp_path / "run") == [3]


def test_an_update_that_ends_a_run_is_the_last_one_that_the_devices_apply(tiny, broken):
    setup, data = open_run(tiny("train.steps=9", *EVERYTHING))
    step, state, states = setup.train_step(), setup.init(), []
    with broken("nan"):
        for number, batch in zip(range(1, BAD + 3), Feed(data, setup).train(0), strict=False):
            states.append(jax.device_get(state))
            state, metrics = step(state, batch, setup.settings(number))
            assert bool(metrics["applied"]) == (number < BAD)
    assert [int(x.step) for x in states] == [0, 1, 2, 3, 4, ~4, ~4]
    jax.tree.map(np.testing.assert_array_equal, states[-1].arrays() | {"step": 4}, states[4].arrays())


# -- the last save ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failures", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_the_last_save_is_tried_again_for_as_long_as_the_run_has_trained(tiny, monkeypatch, capsys, tmp_path, failures):
    plain, number, pauses = Checkpoints._space_problem, itertools.count(), []
    monkeypatch.setattr(
        Checkpoints, "_space_problem", lambda self, state: OSError("no room") if next(number) < failures else plain(self, state)
    )
    # The clock stands still but for pauses, and the run has trained for 40 seconds.
    monkeypatch.setattr("train.run.saves.time", clock := SimpleNamespace(now=0.0, time=time.time, monotonic=lambda: clock.now))
    clock.sleep = lambda seconds: (pauses.append(seconds), setattr(clock, "now", clock.now + seconds))
    finish = Saves.finish

    def finish_later(self, position):
        clock.now = 40.0
        finish(self, position)

    monkeypatch.setattr(Saves, "finish", finish_later)
    with nullcontext() if failures == 4 else pytest.raises(SaveError, match="no room"):
        train(tiny("train.steps=2"))
    assert pauses == ([1, 2, 4] if failures == 4 else [1, 2, 4, 8, 16, 32])
    assert saved_steps(tmp_path / "run") == ([2] if failures == 4 else [])
    err = capsys.readouterr().err
    assert "a checkpoint could not be saved: no room. It is the last one, and is tried again in 4 s; no checkpoint was saved" in err
    assert ("This was the last try" in err) == (failures == 100)


def test_a_save_that_fails_while_a_run_stops_early_does_not_say_that_training_continues(capsys):
    class Failing:
        failures, saved = [SaveError("no room")], []

        def wait(self):
            if self.failures:
                raise self.failures.pop()

        def save(self, state, step, *_):
            self.saved.append(step)

        def describe(self):
            return "no checkpoint was saved"

    run = SimpleNamespace(steps=100, config=SimpleNamespace(checkpoint=SimpleNamespace(minutes=10)))
    setup, nothing = (
        SimpleNamespace(run=run, to_save=lambda state: state),
        SimpleNamespace(check=lambda: None, stored=lambda samples: None, event=lambda *_, **__: None),
    )
    saves = Saves(setup, nothing, Failing(), None, nothing, lambda *_, **__: nullcontext(), 0)
    saves.finish(Position(state=None, step=7, samples=0, phase=0))
    assert Failing.saved == [7]
    line = "a checkpoint could not be saved: no room. The last state is saved next; no checkpoint was saved"
    assert capsys.readouterr().err == f"jgt: {line}\n"


# -- saves by time ----------------------------------------------------------------------------------------------------


@pytest.fixture
def clocked(monkeypatch):
    """Saves whose clock is set by hand, and the steps that they saved. A step takes a minute."""
    monkeypatch.setattr("train.run.saves.time", clock := SimpleNamespace(now=0.0, time=time.time, monotonic=lambda: clock.now))
    saved = []

    class Fake(SimpleNamespace):
        is_saving = False

        def save(self, state, step, *_):
            if step in self.bad:
                raise SaveError("no room")
            saved.append(step)

    def _clocked(*, bad=(), **config):
        run = SimpleNamespace(config=SimpleNamespace(checkpoint=CheckpointConfig(**config)), steps=100)
        pending = []
        watch = SimpleNamespace(
            request=lambda what: (_clocked.asked.append(1), pending.append(what)),
            asked_for=lambda step: {pending.pop()} if pending else set(),
        )
        checkpoints = Fake(bad=bad, describe=lambda: "")
        phase = lambda name, **details: nullcontext()  # noqa: E731
        setup, data = (
            SimpleNamespace(run=run, to_save=lambda state: state),
            SimpleNamespace(check=lambda: None, stored=lambda samples: None),
        )
        saves = Saves(setup, data, checkpoints, watch, SimpleNamespace(event=lambda *_, **more: None), phase, 0)
        progress = SimpleNamespace(interrupted=nullcontext)
        for step in range(1, 40):
            clock.now = 60.0 * step
            position = Position(state=None, step=step, phase=step % 4)
            if saves.are_asked_for(position):
                saves.start(progress, position)
            _clocked.each(checkpoints, step)
        return saved

    _clocked.asked = []
    _clocked.each = lambda checkpoints, step: None
    return _clocked


def test_a_run_saves_every_ten_minutes(clocked):
    assert CheckpointConfig() == CheckpointConfig(every=0, minutes=10.0, keep=None)
    assert clocked() == [10, 20, 30]


def test_minutes_may_be_others_or_none(clocked):
    assert clocked(minutes=15) == [15, 30]
    assert clocked(minutes=None) == [15, 30]


def test_after_a_failed_save_the_next_one_is_due_a_minute_later(clocked):
    assert clocked(bad=(10, 11, 12)) == [13, 23, 33]


def test_no_save_is_due_while_one_is_under_way(clocked):
    clocked.each = lambda checkpoints, step: setattr(checkpoints, "is_saving", 10 <= step < 25)
    assert clocked() == [10, 26, 36]


def test_with_fewer_processes_in_sight_a_save_waits_for_an_exchange(clocked, monkeypatch):
    monkeypatch.setattr("train.run.saves.may_have_fewer", lambda: True)
    assert clocked() == [12, 24, 36]
    assert len(clocked.asked) == 3


def test_a_run_saves_by_time(tiny, tmp_path, monkeypatch):
    """In a real run: each step has a checkpoint if the time between two is next to nothing."""
    monkeypatch.setattr(Checkpoints, "is_saving", False)
    train(tiny("train.steps=5", "checkpoint.minutes=0.000001", "checkpoint.keep=100"))
    assert saved_steps(tmp_path / "run") == [1, 2, 3, 4, 5]
