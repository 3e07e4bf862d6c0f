"""What follows from evaluations: the checkpoint of the best step, an early end, and the same after a restart."""

import contextlib
import json
import math
from dataclasses import replace

import jax
import numpy as np
import pytest

from jgt.document import InputError
from train.checkpoint import manifest
from train.checkpoint.listing import Kept
from train.checkpoint.restore import restore
from train.checkpoint.saved import find_checkpoint
from train.checkpoint.steps import Steps
from train.config import load
from train.journal.rows import read_metrics
from train.run.hooks import evaluator
from train.run.hooks.evaluations import Metric, open_evaluations
from train.run.hooks.evaluator import Evaluator
from train.run.loop import Loop
from train.run.train import train
from train.settings.code.files import read_code
from train.setup import prepare

# Evaluations of every second step. The best is at step 6, and the third one after it at step 12.
LOSSES = {2: 5.0, 4: 3.0, 6: 2.5, 8: 2.5, 10: 2.7, 12: 2.6, 14: 2.0, 16: 1.0}
COMMON = ("data.eval_tokens=2000", "train.steps=16", "train.eval_every=2", "checkpoint.minutes=null", "log=[]")


@pytest.fixture
def known_losses(monkeypatch):
    """Evaluations have these losses."""
    step = [0]
    evaluate = Evaluator.evaluate

    def _evaluate(self, state, now, metrics):
        step[0] = now
        evaluate(self, state, now, metrics)

    monkeypatch.setattr(Evaluator, "evaluate", _evaluate)
    monkeypatch.setattr(evaluator, "held_out_means", lambda *_: {"eval_loss": LOSSES[step[0]]})


@pytest.mark.parametrize(
    ("name", "values", "best", "since"),
    [
        ("eval_loss", {2: 3.0, 4: 2.0, 6: 2.5}, 4, 1),
        ("-eval_acc", {2: 0.1, 4: 0.5, 6: 0.4, 8: 0.5}, 4, 2),
        ("x", {2: math.nan, 4: None, 6: math.inf}, None, 3),
        ("x", {2: 1.0, 4: math.nan}, 2, 1),
        ("x", {}, None, 0),
    ],
)
def test_the_best_of_a_metric(name, values, best, since):
    metric = Metric(name)
    for step, value in values.items():
        metric.add(step, {name.removeprefix("-"): value, "other": 0.0})
    assert (metric.best(), metric.since) == (best, since)
    assert metric.best([2, 100]) == (2 if isinstance(values.get(2), float) and math.isfinite(values[2]) else None)


def test_a_run_ends_after_the_last_evaluation_that_patience_allows(tiny, known_losses, capsys, read_rows, tmp_path):
    run = tiny(*COMMON, "train.stop_early={patience: 3}", "sample={tokens: 4}")
    assert train(run) == 0
    rows = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert [row["step"] for row in rows if "eval_loss" in row] == [2, 4, 6, 8, 10, 12]
    said = capsys.readouterr().out
    assert "Ended early at step 12 of 16 by train.stop_early: eval_loss was best at step 6 (2.5) and not better in 3 evaluations" in said
    assert Steps(tmp_path / "run" / "checkpoints").listed() == [12]
    assert read_rows(tmp_path / "run" / "events.jsonl")[-1]["why"] == "done"
    assert (tmp_path / "run" / "sample.txt").exists()
    # The same command trains nothing.
    assert train(run) == 0
    assert list(read_metrics(tmp_path / "run" / "metrics.jsonl")) == rows
    assert "Ended early at step 12 of 16" in capsys.readouterr().out
    # With more patience, the run continues.
    assert train(tiny(*COMMON, "train.stop_early={patience: 6}", "sample={tokens: 4}")) == 0
    assert list(read_metrics(tmp_path / "run" / "metrics.jsonl"))[-1]["step"] == 16


def test_the_best_checkpoint_survives_keep(tiny, known_losses, capsys, tmp_path):
    run = tiny(*COMMON, "checkpoint={every: 5, keep: 1, best: eval_loss}", "train.steps=12")
    assert train(run) == 0
    # Step 6 is the best, though no multiple of 5; step 12 is the last.
    assert Steps(tmp_path / "run" / "checkpoints").listed() == [6, 12]
    assert f"Best checkpoint: {tmp_path / 'run' / 'checkpoints' / '6'}, with eval_loss 2.5" in capsys.readouterr().out


def test_of_a_metric_with_a_minus_the_largest_is_kept(tiny, known_losses, tmp_path):
    assert train(tiny(*COMMON, "checkpoint={keep: 1, best: -eval_loss}", "train.steps=12")) == 0
    assert Steps(tmp_path / "run" / "checkpoints").listed() == [2, 12]


def test_multiples_are_kept(tiny, tmp_path):
    assert train(tiny("checkpoint={every: 2, keep: 1, keep_every: 4, minutes: null}", "train.steps=10", "log=[]")) == 0
    assert Steps(tmp_path / "run" / "checkpoints").listed() == [4, 8, 10]


@pytest.mark.parametrize("killed_at", [7, 8, 12])
def test_a_restart_decides_as_the_unbroken_run(tiny_file, known_losses, stopped_at, tmp_path, killed_at):
    """Also if a kill comes between the save of a step and its evaluation."""

    def start(name):
        return load(
            tiny_file,
            [f"run.dir={tmp_path / name}", *COMMON, "checkpoint={every: 4, keep: 1, best: eval_loss}", "train.stop_early={patience: 3}"],
        )

    assert train(start("straight")) == 0
    with stopped_at(killed_at):
        train(start("broken"))
    assert train(start("broken")) == 0
    rows, states = [], []
    for name in ("straight", "broken"):
        assert Steps(tmp_path / name / "checkpoints").listed() == [6, 12]
        found = read_metrics(tmp_path / name / "metrics.jsonl")
        rows.append([(row["step"], row.get("loss"), row.get("eval_loss")) for row in found])
        setup, (saved, _) = prepare(start(name)), find_checkpoint(tmp_path / name)
        states.append(jax.device_get(restore(saved, setup.saved_shapes, setup.saved_shardings)))
    assert rows[0] == rows[1]
    jax.tree.map(np.testing.assert_array_equal, *states)


CODE = """
def nothing(now):
    pass


def number(now):
    return {"mine": 1.0}


def loss_of_step(now):
    return {"seen": now.metrics["loss"]}
"""
HOOKS = "hooks={a: {call: hk:nothing, at: [start]}, b: {call: hk:number, every: 4}, c: {call: hk:loss_of_step, at: [eval]}}"


@pytest.fixture
def code(tmp_path):
    (path := tmp_path / "hk.py").write_text(CODE)
    return read_code([path])


@pytest.fixture
def killed_before_evaluation(monkeypatch):
    """A context in which a run ends when a step is saved, and before it is evaluated."""

    class KilledError(Exception):
        pass

    @contextlib.contextmanager
    def _killed(at):
        plain = Loop._evaluate_if_due

        def evaluate(self, *made):
            if self.position.step == at:
                raise KilledError
            plain(self, *made)

        with monkeypatch.context() as patch, pytest.raises(KilledError):
            patch.setattr(Loop, "_evaluate_if_due", evaluate)
            yield

    return _killed


def evaluated(folder):
    return [(row["step"], row["eval_loss"], row.get("seen")) for row in read_metrics(folder / "metrics.jsonl") if "eval_loss" in row]


BEST, STOP = "checkpoint.best=-eval_loss", "train.stop_early={by: -eval_loss, patience: 3}"
QUICK = [(4, BEST, HOOKS), (8, "checkpoint.best=null", "hooks={}")]
KILLS = [(at, override, hooks) for at in (4, 8) for override in ("checkpoint.best=null", BEST, STOP) for hooks in ("hooks={}", HOOKS)]


@pytest.mark.parametrize(
    ("killed_at", "override", "hooks"), [pytest.param(*kill, marks=[] if kill in QUICK else pytest.mark.slow) for kill in KILLS]
)
def test_an_evaluation_is_made_up_for(tiny_file, code, killed_before_evaluation, tmp_path, killed_at, override, hooks):
    def start(name):
        common = ("data.eval_tokens=2000", "train.steps=8", "train.eval_every=2", "checkpoint.every=2", "checkpoint.keep=9", "log=[]")
        return load(tiny_file, [f"run.dir={tmp_path / name}", *common, override, hooks], code=code)

    assert train(start("straight")) == 0
    with killed_before_evaluation(killed_at):
        train(start("broken"))
    assert [step for step, *_ in evaluated(tmp_path / "broken")] == [2, 4, 6][: killed_at // 2 - 1]
    assert Steps(tmp_path / "broken" / "checkpoints").newest() == killed_at
    assert train(start("broken")) == 0
    assert evaluated(tmp_path / "broken") == evaluated(tmp_path / "straight") != []
    before = (tmp_path / "broken" / "metrics.jsonl").read_bytes()
    assert train(start("broken")) == 0
    assert (tmp_path / "broken" / "metrics.jsonl").read_bytes() == before


def test_tasks_are_made_up_for(tiny, killed_before_evaluation, monkeypatch, tmp_path):
    """Beside a row of the evaluation on held-out data of the same step, and alone."""
    monkeypatch.setattr("train.run.opened.open_tasks", lambda setup: lambda state, step: {"eval_acc/a": step / 100})
    for eval_tokens in (0, 2000):
        run = tiny(f"data.eval_tokens={eval_tokens}", f"run.dir={tmp_path / str(eval_tokens)}", "train.steps=4", "eval.every=2")
        run = replace(run, config=replace(run.config, checkpoint=replace(run.config.checkpoint, every=2)))
        with killed_before_evaluation(4):
            train(run)
        assert train(run) == 0
        rows = list(read_metrics(tmp_path / str(eval_tokens) / "metrics.jsonl"))
        assert [row["step"] for row in rows if "eval_acc/a" in row] == [2, 4]
        assert [row["step"] for row in rows if "eval_loss" in row] == ([4] if eval_tokens else [])


def test_the_best_step_survives_a_lost_row(tiny, known_losses, capsys, tmp_path):
    options = ("train.eval_every=2", "checkpoint={every: 2, keep: 1, best: -eval_loss}")
    assert train(tiny(*COMMON, *options, "train.steps=6")) == 0
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if "eval_loss" not in line))
    assert train(tiny(*COMMON, *options, "train.steps=12")) == 0
    assert Steps(tmp_path / "run" / "checkpoints").listed() == [2, 12]
    assert f"Best checkpoint: {tmp_path / 'run' / 'checkpoints' / '2'}, with eval_loss 5" in capsys.readouterr().out


def test_a_checkpoint_has_the_newest_values_and_the_best(tmp_path):
    metric = Metric("-x")
    for step in range(1, 3000):
        metric.add(step, {"x": math.nan if step == 2500 else -step})
    stored = dict(metric.stored())
    assert [*stored] == [1, *range(2000, 3000)] and stored[1] == -1 and stored[2500] is None
    again = Metric("-x")
    for step, value in stored.items():
        again.add(step, {"x": value})
    assert again.best() == 1 and again.value(1) == -1
    # A number of any size, as a row from anywhere may have it.
    again.add(9, {"x": 10**400})
    assert again.best([9]) is None


def test_what_a_manifest_keeps_is_checked(earlier):
    listing = manifest.read(earlier / "checkpoints" / "6")
    kept = Kept(id="ab", evaluations={"x": ((2, 0.1), (4, None))}, reference={"step": 3})
    values = manifest.as_json(replace(listing, kept=kept))
    assert manifest.parse(json.dumps(manifest.sealed(values)).encode()).kept == kept
    # An earlier version kept nothing.
    assert manifest.parse(json.dumps(manifest.sealed({k: v for k, v in values.items() if k != "kept"})).encode()).kept == Kept()
    for wrong in (
        {"id": 3},
        {"evaluations": [2]},
        {"evaluations": {"x": [[-1, 2.0]]}},
        {"evaluations": {"x": [[1, [2]]]}},
        {"reference": 1},
    ):
        values["kept"] = {"id": "ab", "evaluations": {}, "reference": {}, **wrong}
        with pytest.raises(manifest.BrokenError, match="damaged"):
            manifest.parse(json.dumps(manifest.sealed(values)).encode())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("checkpoint.best=-eval_los", "checkpoint.best: no evaluation has the metric 'eval_los'. Did you mean 'eval_loss'?"),
        ("checkpoint.best=accuracy", "checkpoint.best: no evaluation has the metric 'accuracy'. Evaluations have eval_loss"),
        ("train.stop_early={by: loss, patience: 2}", "train.stop_early.by: no evaluation has the metric 'loss'. Did you mean 'eval_loss'?"),
        ("train.stop_early={patience: 0}", "train.stop_early.patience: 0 is too small; it must be at least 1"),
        ("train.stop_early={by: eval_loss}", "train.stop_early: the key 'patience' is missing"),
        ("checkpoint.keep_every=0", "checkpoint.keep_every: 0 is too small; it must be at least 1"),
    ],
)
def test_wrong_input_is_refused(tiny, override, message):
    with pytest.raises(InputError) as caught:
        train(tiny(*COMMON, override))
    (line,) = caught.value.problems
    assert message in line and line.startswith("command line: ")


def test_an_early_end_needs_evaluations(tiny):
    with pytest.raises(InputError, match=r"train\.stop_early: needs evaluations while the run trains\. Set train\.eval_every"):
        tiny("train.stop_early={patience: 3}")
    with pytest.raises(InputError, match=r"The data holds nothing out, so there are no evaluations"):
        train(tiny("train.stop_early={patience: 3}", "train.eval_every=2"))


def test_nothing_is_made_without_the_keys(tiny):
    assert open_evaluations(tiny(), lambda: 1 / 0) is None
