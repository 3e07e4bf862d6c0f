"""The moving average of the parameters: its numbers, its use by evaluations, and a run that is continued."""

import shutil

import jax
import numpy as np
import pytest

import jgt
from train.run.train import train
from train.setup import prepare

FSDP = ("rules.axes={batch: [fsdp]}", "rules.params={'**/kernel': [fsdp, null]}", "rules.default=replicate", "mesh={fsdp: 8}")


def batch_of(setup):
    tokens = np.random.default_rng(0).integers(0, 256, (16, 33), np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((16, 32), np.float32)}
    return jax.device_put(batch, setup.batch_shardings)


@pytest.mark.parametrize("layout", [(), FSDP, ("optimizer.offload=host",)], ids=["one device", "fsdp", "offload"])
def test_the_average_is_that_of_a_plain_loop(tiny, layout):
    setup = prepare(tiny("train.ema=0.3", *layout))
    state, step, batch = setup.init(), setup.compile_train_step(), batch_of(setup)
    expected = jax.device_get(state.params)
    for number in range(4):
        state, _ = step(state, batch, setup.settings(number + 1))
        decay = min(0.3, (1 + number) / (10 + number))
        expected = jax.tree.map(lambda a, p, decay=decay: decay * a + (1 - decay) * p, expected, jax.device_get(state.params))
    evaluated = setup.eval_params(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), jax.device_get(evaluated), expected)
    assert jax.tree.map(lambda x: x.sharding, evaluated) == setup.shardings.params


def test_an_update_that_is_not_applied_changes_no_average(tiny):
    setup = prepare(tiny("train.ema=0.9"))
    state, step = setup.init(), setup.compile_train_step()
    before, batch = jax.device_get(state.average), batch_of(setup)
    state, metrics = step(state, batch | {"weights": batch["weights"] * np.inf}, setup.settings(1))
    assert not metrics["applied"]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.average), before)


@pytest.mark.slow
def test_a_run_evaluates_its_average_and_goes_on_with_it(tiny, tmp_path, read_rows):
    run = tiny("data.eval_tokens=400", "train.eval_every=2", "checkpoint.every=2", "train.ema=0.9", "train.steps=4")

    def evaluations():
        return {row["step"]: row["eval_loss"] for row in read_rows(tmp_path / "run" / "metrics.jsonl") if "eval_loss" in row}

    train(run)
    first = evaluations()
    loaded, plain = jgt.load(tmp_path / "run"), jgt.load(tmp_path / "run", ["train.ema=null"])
    assert not np.array_equal(jax.tree.leaves(loaded.params)[0], jax.tree.leaves(plain.params)[0])
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    train(run)
    assert evaluations() == first and first.keys() == {2, 4}


def test_the_average_may_be_switched_on_later(tiny, tmp_path):
    train(tiny("train.steps=2"))
    train(tiny("train.steps=3", "train.ema=0.5"))
    assert jgt.load(tmp_path / "run").step == 3
