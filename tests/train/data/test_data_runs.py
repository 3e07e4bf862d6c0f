"""Whole runs on more than one kind of data: stopped and resumed on Parquet, evaluated by part, and as long as some epochs."""

import json

import jax
import numpy as np
import pytest
from checkpoints import newest_of

from jgt.document import InputError
from train.checkpoint.checkpoint import Checkpoints
from train.checkpoint.restore import restore
from train.config import load
from train.records.step_range import StepRange
from train.run.replay import replay
from train.run.train import train
from train.setup import prepare
from train.step.optimizer import learning_rate

SMALL = ("model.layers=1", "model.embed=16", "model.ffn=16", "train.batch=8")


@pytest.fixture
def rows(read_rows):
    """The losses, steps and epochs in the metrics of a run directory."""

    def kept(row):
        return {key: value for key, value in row.items() if "loss" in key or key in ("step", "epoch")}

    return lambda folder: [kept(row) for row in read_rows(folder / "metrics.jsonl")]


def last_state(run):
    setup = prepare(run)
    checkpoints = Checkpoints(run.config.run.path / "checkpoints", run.config.checkpoint)
    state = restore(newest_of(checkpoints)[0], setup.shapes, setup.shardings)
    checkpoints.close()
    return jax.device_get(state)


@pytest.mark.slow
def test_a_killed_run_on_parquet_resumes_bit_for_bit_and_equals_one_on_jsonl(tiny, tmp_path, stopped_at, rows):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"{i} squared is {i * i}\n" for i in range(400)]
    parquet.write_table(pyarrow.table({"content": texts}), tmp_path / "a.parquet", row_group_size=50)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"content": text}) + "\n" for text in texts))

    def run(name, source, *more):
        data = f"data={{source: {source}, path: {tmp_path}/a.{source}, field: content}}"
        return tiny(*SMALL, data, f"run.dir={tmp_path / name}", "train.steps=8", "train.eval_every=4", "checkpoint.every=3", *more)

    train(run("straight", "jsonl"))
    broken = run("broken", "parquet")
    with stopped_at(5):
        train(broken)
    train(broken)
    assert rows(tmp_path / "broken") == rows(tmp_path / "straight")
    jax.tree.map(np.testing.assert_array_equal, last_state(broken), last_state(run("straight", "jsonl")))


def test_a_mixture_is_evaluated_part_by_part(tiny, tmp_path, text_file, rows):
    (tmp_path / "letters.txt").write_text("abcdefgh" * 1000)
    parts = f"[{{weight: 1, source: text, path: {text_file}}}, {{weight: 1, source: text, path: {tmp_path}/letters.txt, name: abc}}]"
    train(tiny(*SMALL, f"data={{source: mixture, mixture: {parts}, eval_tokens: 660}}", "train.steps=12", "optimizer.lr=0.01"))
    evaluated = rows(tmp_path / "run")[-1]
    assert set(evaluated) == {"step", "eval_loss", "eval_loss/squares", "eval_loss/abc"}
    # 20 windows each.
    assert evaluated["eval_loss"] == pytest.approx((evaluated["eval_loss/squares"] + evaluated["eval_loss/abc"]) / 2, rel=1e-6)
    assert evaluated["eval_loss/abc"] < evaluated["eval_loss/squares"] < np.log(256)


# -- epochs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def epochs(tiny, tmp_path):
    (tmp_path / "short.txt").write_bytes(bytes(range(256)) * 3 + b"0")

    def _epochs(name, *more):
        # 24 windows of 32 tokens.
        data = f"data={{source: text, path: {tmp_path}/short.txt, eval_tokens: 0}}"
        return tiny(*SMALL, data, f"run.dir={tmp_path / name}", "train.steps=null", "optimizer.schedule=cosine", *more)

    return _epochs


def test_epochs_make_steps_also_when_the_batch_changes(epochs, tmp_path, stopped_at, rows, read_rows, capsys):
    train(epochs("three", "train.epochs=3"))
    out = capsys.readouterr().out
    assert "3 epochs of 24 samples are 9 steps" in out
    assert [(row["step"], row["epoch"]) for row in rows(tmp_path / "three")][-1] == (9, 3.0)
    train(epochs("three", "train.epochs=3"))
    assert "Already at step 9 of 9. To train further, raise train.epochs, for example train.epochs=6" in capsys.readouterr().out
    # The schedule ends with the run.
    last = read_rows(tmp_path / "three" / "metrics.jsonl")[-1]
    assert last["lr"] == learning_rate(epochs("three", "train.epochs=3").config.optimizer, 9, 9)
    with stopped_at(3):
        train(epochs("changed", "train.epochs=2.5", "checkpoint.every=2"))
    # 16 of 60 samples are read. 44 more in batches of 4 are 11 steps.
    train(epochs("changed", "train.epochs=2.5", "train.batch=4"))
    assert [(row["step"], row["epoch"]) for row in rows(tmp_path / "changed")][-1] == (13, 2.5)
    written = load(tmp_path / "changed" / "config.yaml")
    assert (written.config.train.steps, written.config.train.epochs) == (None, 2.5)
    assert replay(epochs("three", "train.epochs=3"), 8).fault == "none"
    with pytest.raises(InputError, match=r"--profile: 9:10: the run has 9 steps\. Name earlier ones, or raise train\.epochs"):
        train(epochs("profiled", "train.epochs=3"), profiled=StepRange(first=9, last=10))


def test_a_run_has_one_length(tiny_file, tmp_path):
    def problems(*overrides):
        with pytest.raises(ValueError) as caught:
            load(tiny_file, overrides)
        return caught.value.problems

    both = f"command line: train.epochs=2: train.epochs: is 2, but train.steps is 20 ({tiny_file}:"
    (problem,) = problems("train.epochs=2")
    assert problem.startswith(both)
    assert problem.endswith("Remove one of them, or set train.steps=null or train.epochs=null")
    assert problems("train.steps=null")[0].endswith("Write a number of steps, or add train.epochs")
    plain = tmp_path / "plain.yaml"
    plain.write_text("train: {epochs: 2}\n")
    assert load(plain).config.train.epochs == 2
