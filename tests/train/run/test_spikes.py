"""Losses far above earlier ones are skipped, reported, and stored in checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoints import newest_of
from steps import step_of

from train.checkpoint.checkpoint import Checkpoints
from train.checkpoint.restore import restore
from train.records.progress import SkippedError, StepResult, UpdateGuard
from train.run.restored import restore_state
from train.run.train import train
from train.settings.training import SpikesConfig, TrainConfig
from train.setup import prepare
from train.setup.feed import Feed
from train.step.state import State
from train.step.step import StepFeatures

WINDOW = 8
OVERRIDES = ("train.steps=9", "checkpoint.every=3", "train.skip_spikes={window: 4, deviations: 2}", "model.layers=1", "optimizer.lr=0.01")
NOISE = (2.0, 2.2, 1.9, 2.1, 2.05, 1.95, 2.15, 1.85)


@jax.custom_jvp
def of_norm(w, norm):
    """Zero, with a gradient of this norm with respect to w."""
    return 0.0 * w


of_norm.defjvp(lambda primals, tangents: (0.0 * primals[0], primals[1] * tangents[0]))


@pytest.fixture(scope="module")
def run():
    """Trains on given losses and gradient norms. Returns which of the updates were applied, and the states after them."""
    features, optimizer = StepFeatures(spikes=SpikesConfig(window=WINDOW, deviations=6)), optax.adamw(0.1)
    step = jax.jit(step_of(lambda p, b: b["loss"] + of_norm(p["w"], b["norm"]), optimizer, features=features))

    def _run(*losses, norms=None):
        params = {"w": jnp.float32(1.0)}
        states, applied = [State(jnp.zeros((), jnp.int32), params, optimizer.init(params), losses=features.first_losses())], []
        for loss, norm in zip(losses, norms or [1.0] * len(losses), strict=True):
            state, metrics = step(states[-1], {"weights": jnp.ones(1), "loss": jnp.float32(loss), "norm": jnp.float32(norm)})
            applied.append(bool(metrics["applied"]))
            states.append(state)
        return applied, states

    return _run


def test_a_spike_changes_nothing_but_the_window(run):
    applied, states = run(*NOISE, 10.0)
    assert applied == [True] * 8 + [False]
    before, after = states[-2:]
    jax.tree.map(np.testing.assert_array_equal, (after.params, after.opt_state), (before.params, before.opt_state))
    assert after.step == 9
    np.testing.assert_array_equal(after.losses, np.float32([10.0, *NOISE[1:]]))


def test_losses_within_the_deviations_are_applied(run):
    limit = np.mean(NOISE) + 6 * np.std(NOISE, ddof=1)
    assert run(*NOISE, limit - 0.01)[0][-1]
    assert not run(*NOISE, limit + 0.01)[0][-1]
    assert run(*NOISE, -100.0)[0][-1]


def test_nothing_is_a_spike_before_half_a_window_is_known(run):
    assert run(2.0, 2.1, 2.0, 50.0)[0] == [True] * 4
    assert run(2.0, 2.1, 2.0, 2.1, 50.0)[0] == [True] * 4 + [False]


def test_a_new_level_is_accepted_after_a_while(run):
    applied, _ = run(*NOISE, *(loss + 20 for loss in NOISE))
    assert not applied[8] and all(applied[9:])


@pytest.mark.parametrize("loss", [np.nan, np.inf])
def test_losses_that_are_not_finite_stay_out_of_the_window(run, loss):
    applied, states = run(*NOISE, loss, loss, 2.0, 10.0)
    assert applied == [True] * 8 + [False, False, True, False]
    np.testing.assert_array_equal(states[-3].losses, np.float32(NOISE))


def test_the_loss_of_a_gradient_that_is_not_finite_stays_out_too(run):
    applied, states = run(*NOISE, 2.0, norms=[1.0] * 8 + [np.inf])
    assert not applied[-1]
    np.testing.assert_array_equal(states[-1].losses, np.float32(NOISE))


# -- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def strange(monkeypatch):
    """Replaces all targets of one step by token 255."""
    plain = Feed.train

    def _strange(strange):
        def spoiled(self, samples):
            for step, batch in enumerate(plain(self, samples), samples // 16 + 1):
                yield batch | {"targets": jnp.full_like(batch["targets"], 255)} if step == strange else batch

        monkeypatch.setattr(Feed, "train", spoiled)

    return _strange


def last_state(run):
    setup = prepare(run)
    checkpoints = Checkpoints(run.config.run.path / "checkpoints", run.config.checkpoint)
    state = restore(newest_of(checkpoints)[0], setup.shapes, setup.shardings)
    checkpoints.close()
    return jax.device_get(state)


@pytest.mark.slow
def test_a_run_skips_a_spike_and_goes_on_bit_for_bit_when_it_is_started_again(tiny, tmp_path, strange, read_rows, stopped_at, capsys):
    strange(7)
    run = tiny(*OVERRIDES)
    train(run)
    (event,) = [event for event in read_rows(run.config.run.path / "events.jsonl") if event["phase"] == "spike"]
    assert (event["step"], event["samples"]) == (7, [96, 111])
    assert float(event["loss"]) > 4
    assert "jgt: step 7: the loss is " in capsys.readouterr().err
    other = tiny(*OVERRIDES, f"run.dir={tmp_path / 'other'}")
    with stopped_at(5):
        train(other)
    train(other)
    expected, found = last_state(run), last_state(other)
    assert np.isfinite(expected.losses).all()
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_the_option_may_be_turned_on_changed_and_turned_off(tiny, tmp_path):
    options = {"off": "null", "4": "{window: 4}", "6": "{window: 6}"}
    setups = {name: prepare(tiny("model.layers=1", "model.embed=8", f"train.skip_spikes={option}")) for name, option in options.items()}
    for saved, asked in (("off", "4"), ("4", "6"), ("4", "off")):
        before, after = setups[saved], setups[asked]
        state = jax.tree.map(lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), before.shapes)
        checkpoints = Checkpoints(tmp_path / f"{saved}-{asked}", before.run.config.checkpoint)
        checkpoints.save(state, 1, 16)
        checkpoints.wait()
        found = restore_state(after, newest_of(checkpoints)[0])
        checkpoints.close()
        jax.tree.map(np.testing.assert_array_equal, (found.params, found.opt_state), (state.params, state.opt_state))
        assert jax.tree.map(lambda x: x.sharding, found) == after.shardings
        assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(lambda x: (x.shape, x.dtype), after.shapes)
        assert found.losses is None if asked == "off" else not np.isfinite(jnp.asarray(found.losses)).any()


# -- the guard -------------------------------------------------------------------------------------------------------


class Noted(list):
    def event(self, name, started, seconds, **details):
        self.append((name, details["step"], details["samples"]))


def done(step, loss, applied):
    return StepResult(step=step, samples=(step * 16, step * 16 + 15), metrics={"loss": loss, "grad_norm": 1.0, "applied": applied})


def test_the_guard_goes_on_after_a_spike_also_where_what_is_not_finite_stops(capsys):
    noted = Noted()
    guard = UpdateGuard(TrainConfig(on_nonfinite="stop"), noted, enabled=True)
    guard.check(done(3, 50.0, applied=False))
    guard.check(done(4, 2.0, applied=True))
    with pytest.raises(SkippedError, match="step 5: the loss is nan"):
        guard.check(done(5, float("nan"), applied=False))
    assert noted == [("spike", 3, [48, 63]), ("nonfinite", 5, [80, 95])]
    assert (
        capsys.readouterr().err
        == "jgt: step 3: the loss is 50.0 and the norm of the gradient 1.0, on samples 48 to 63; the update was not applied\n"
    )


def test_too_many_spikes_in_a_row_stop_a_run():
    guard = UpdateGuard(TrainConfig(max_skipped=3), Noted(), enabled=False)
    for step, applied in enumerate([False, False, True, False, False]):
        guard.check(done(step, 50.0, applied=applied))
    with pytest.raises(SkippedError, match=r"step 5: .* It is number 3 in a row \(train\.max_skipped\)"):
        guard.check(done(5, 50.0, applied=False))
