"""Updates that are not finite never reach the parameters, and are reported with their samples."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from steps import step_of

from train.records.progress import SkippedError
from train.run.train import train
from train.setup.feed import Feed
from train.step.state import State


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_update_that_is_not_finite_changes_nothing(value):
    params = {"w": jnp.arange(6.0).reshape(2, 3)}
    optimizer = optax.adamw(0.1)
    step = jax.jit(step_of(lambda p, b: jnp.sum(b["weights"] * (p["w"] @ b["x"]) ** 2), optimizer))
    state = State(jnp.zeros((), jnp.int32), params, optimizer.init(params))
    batch = {"weights": jnp.ones(2), "x": jnp.array([1.0, 2.0, 3.0])}
    moved, metrics = step(state, batch)
    assert metrics["applied"] and not np.array_equal(moved.params["w"], params["w"])
    same, metrics = step(moved, batch | {"x": batch["x"].at[1].set(value)})
    assert not metrics["applied"] and same.step == 2
    jax.tree.map(np.testing.assert_array_equal, (same.params, same.opt_state), (moved.params, moved.opt_state))


@pytest.fixture
def spoil(monkeypatch):
    """Makes the weights in the batches of some steps NaN."""
    plain = Feed.train

    def _spoil(*steps):
        def spoiled(self, samples):
            for step, batch in enumerate(plain(self, samples), samples // 16 + 1):
                yield batch | {"weights": batch["weights"] * (jnp.nan if step in steps else 1)}

        monkeypatch.setattr(Feed, "train", spoiled)

    return _spoil


def events(run, read_rows):
    return [e for e in read_rows(run.config.run.path / "events.jsonl") if e["phase"] == "nonfinite"]


def test_a_run_stops_and_says_where(tiny, spoil, read_rows, capsys):
    spoil(3)
    run = tiny("train.steps=6", "checkpoint.every=2")
    with pytest.raises(
        SkippedError, match=r"step 3: the loss is nan and the norm of the gradient nan, on samples 32 to 47; the update was not applied"
    ):
        train(run)
    assert [(e["step"], e["samples"]) for e in events(run, read_rows)] == [(3, [32, 47])]
    assert "the newest checkpoint is from step 2" in capsys.readouterr().err


def test_a_run_may_skip_them(tiny, spoil, read_rows, capsys):
    spoil(3, 6)
    run = tiny("train.steps=6", "train.on_nonfinite=skip", "checkpoint.every=3")
    train(run)
    assert [e["step"] for e in events(run, read_rows)] == [3, 6]
    rows = {row["step"]: row["loss"] for row in read_rows(run.config.run.path / "metrics.jsonl") if "loss" in row}
    assert [step for step, loss in rows.items() if loss is None] == [3, 6]
    assert rows[5] < rows[1]
    assert capsys.readouterr().err.count("the update was not applied") == 2


def test_too_many_in_a_row_stop_a_run(tiny, spoil, read_rows):
    spoil(1, 3, 4)
    run = tiny("train.steps=6", "train.on_nonfinite=skip", "train.max_skipped=2")
    with pytest.raises(SkippedError, match=r"step 4: .* It is number 2 in a row \(train.max_skipped\)"):
        train(run)
    assert [e["step"] for e in events(run, read_rows)] == [1, 3, 4]
