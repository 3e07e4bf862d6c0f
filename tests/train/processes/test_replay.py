"""The cause of a wrong step, for passes made by hand and for runs."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jgt.document import InputError
from train.run.directory.identity import Resume
from train.run.replay import ReplayedStep, judge, replay
from train.run.train import train
from train.setup import Setup
from train.setup.feed import Feed

RULES = Path(__file__).parents[3] / "configs" / "rules"
NAN = float("nan")
WELL = np.float32([2.0, 2.1, 1.9, 2.0])
BEFORE = {5: 2.0, 6: 2.1, 7: 1.9, 8: 2.0}


def passed(losses, *, norm=1.0, digest=7):
    return {step: ReplayedStep(loss=loss, grad_norm=norm, digest=digest) for step, loss in losses.items()}


def judged(losses, *, second=None, logged=None, own=WELL, other=WELL, **changes):
    """The verdict on the last of these steps. By default, both passes give the same result, which is also the logged one."""
    first = passed(losses, **changes)
    plain = {step: loss if np.isfinite(loss) else None for step, loss in losses.items()}
    return judge(max(losses), plain if logged is None else logged, [first, second or first], [own, other], 160)


def test_a_step_without_a_fault():
    verdict = judged(BEFORE | {9: 2.05})
    assert verdict.fault == "none"
    assert verdict.text == "step 9 came out as it was logged, bit for bit, and nothing in it is unusual"


def test_a_step_that_was_the_first_one_has_nothing_to_be_compared_with():
    assert judged({1: 50.0}).fault == "none"


@pytest.mark.parametrize("change", [{"norm": 1.0000001}, {"digest": 8}])
def test_another_outcome_the_second_time_is_the_machines(change):
    verdict = judged(BEFORE, second=passed(BEFORE) | passed({7: 1.9}, **change))
    assert verdict.fault == "machine"
    assert verdict.text.startswith("step 7 came out differently the second time")


def test_the_sign_of_zero_is_another_outcome_and_the_same_nan_is_none():
    assert judged({5: 0.0}, second=passed({5: -0.0})).fault == "machine"
    assert judged({5: NAN}, second=passed({5: NAN}), other=np.float32([NAN, 1])).fault == "code"


def test_the_machine_comes_before_what_was_logged():
    assert judged({5: 2.0}, second=passed({5: 2.1}), logged={5: 3.0}).fault == "machine"


@pytest.mark.parametrize(
    ("losses", "logged", "said"),
    [
        ({5: 2.0}, 2.5, "2.0 in both passes, but was logged as 2.5"),
        ({5: 2.0}, None, "logged as None"),
        ({5: NAN}, 2.0, "nan in both passes"),
    ],
)
def test_another_loss_than_was_logged(losses, logged, said):
    verdict = judged(losses, logged={5: logged})
    assert verdict.fault == "changed" and said in verdict.text


def test_steps_that_were_not_logged_are_not_compared():
    assert judged(BEFORE, logged={8: 2.0}).fault == "none"


@pytest.mark.parametrize("loss", [NAN, float("inf"), 50.0])
def test_samples_with_extreme_losses_are_named_when_others_do_well(loss):
    own = np.float32([2.0, loss, 2.1, loss])
    verdict = judged(BEFORE | {9: loss}, own=own)
    assert verdict.fault == "data" and verdict.text.endswith("Look at the samples 161, 163")


def test_no_more_than_the_worst_samples_are_named():
    own = np.float32([50, 60, 51, 61, 52, 62, 53, 63, 2])
    assert judged(BEFORE | {9: 50.0}, own=own).text.endswith("Look at the samples 161, 163, 165, 166, 167")


def test_when_all_samples_fail_it_is_the_code():
    verdict = judged(BEFORE | {9: NAN}, own=np.full(4, NAN), other=np.full(4, NAN))
    assert verdict.fault == "code" and "the next step's samples fail with these parameters too" in verdict.text


def test_when_no_sample_fails_it_is_the_gradient():
    verdict = judged(BEFORE, norm=float("inf"))
    assert verdict.fault == "code" and "it is the gradient" in verdict.text


# -- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(earlier, tiny, tmp_path):
    """A copy of the earlier run."""
    shutil.copytree(earlier, tmp_path / "run")
    return tiny("train.steps=6")


def test_a_run_comes_out_bit_for_bit(trained, capsys):
    assert replay(trained, 6).fault == "none"
    assert f"Recomputing steps 5 to 6 twice, from {trained.config.run.path}/checkpoints/4" in capsys.readouterr().out.replace("\n", "")


def test_a_line_that_was_cut_short_is_no_step(trained):
    metrics = trained.config.run.path / "metrics.jsonl"
    text = metrics.read_text()
    metrics.write_text(text[: text.index('{"step": 6') + 20])
    with pytest.raises(InputError, match="Steps 1 to 5 are, every 1"):
        replay(trained, 6)


def test_a_loss_that_was_logged_otherwise_has_changed(trained):
    metrics = trained.config.run.path / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows[4]["loss"] += 0.001
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    verdict = replay(trained, 6)
    assert verdict.fault == "changed" and verdict.text.startswith("the loss of step 5 is ")


def test_a_step_that_was_not_logged(trained, tiny, tmp_path):
    with pytest.raises(InputError) as caught:
        replay(trained, 7)
    assert caught.value.problems == (
        f"command line: --replay: step 7 is not logged in {trained.config.run.path}. Steps 1 to 6 are, every 1",
    )
    with pytest.raises(InputError, match="No step is"):
        replay(tiny(f"run.dir={tmp_path / 'none'}"), 7)


def test_a_machine_that_computes_otherwise_the_second_time(trained, monkeypatch):
    plain, calls = Setup.compile_train_step, []

    def compile_train_step(self):
        compiled = plain(self)

        def step(*arguments):
            state, metrics = compiled(*arguments)
            calls.append(1)
            return state, metrics | {"grad_norm": metrics["grad_norm"] * (1.0001 if len(calls) == 4 else 1)}

        return step

    monkeypatch.setattr(Setup, "compile_train_step", compile_train_step)
    verdict = replay(trained, 6)
    assert verdict.fault == "machine" and verdict.text.startswith("step 6 came out differently")


PADDED = (f"rules={RULES / 'fsdp_tensor.yaml'}", "mesh={data: 1, fsdp: 4, tensor: 2}", "model.vocab=257")
STAGES = (
    f"rules={RULES / 'pipeline.yaml'}",
    "mesh={data: 1, fsdp: 4, stage: 2, tensor: 1}",
    "pipeline={signal: layers, microbatches: 2}",
)


@pytest.mark.parametrize("layout", [(), PADDED, STAGES], ids=["one device", "a padded vocabulary", "stacks of stages"])
def test_a_sample_that_spoils_a_step_is_named(tiny, monkeypatch, layout):
    plain = Feed.train

    def spoiled(self, samples):
        for step, batch in enumerate(plain(self, samples), samples // 16 + 1):
            yield batch | {"weights": batch["weights"].at[3].set(jnp.nan)} if step == 2 else batch

    monkeypatch.setattr(Feed, "train", spoiled)
    run = tiny("train.steps=3", "train.on_nonfinite=skip", *layout)
    train(run)
    verdict = replay(run, 2)
    assert verdict.fault == "data" and verdict.text.endswith("Look at the samples 19")


def test_a_run_that_started_elsewhere_is_replayed_from_there(earlier, tiny, tmp_path, capsys):
    weights = tiny("train.steps=1", f"checkpoint.weights={earlier}")
    train(weights)
    assert replay(weights, 1).fault == "none"
    assert "Recomputing steps 1 to 1 twice, from the start" in capsys.readouterr().out
    resume = Resume(path=earlier / "checkpoints" / "4")
    further = tiny("train.steps=5", f"run.dir={tmp_path / 'further'}")
    train(further, resume)
    assert replay(further, 5, resume).fault == "none"
