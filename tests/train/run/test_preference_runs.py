"""Runs on preferences: the reference is the model before the first step, computed once, whatever happens to the run."""

import io
import json
import math
import os
import shutil
import zipfile

import numpy as np
import pytest

pytest.importorskip("jinja2")
from jgt.document import InputError
from train.checkpoint.bucket_steps import seal
from train.data.opening import open_data
from train.evaluate.reference import SCORES, _read, checksum, with_reference
from train.run.directory.history import begin_folder
from train.run.directory.identity import Resume, check_folder
from train.run.replay import replay
from train.run.train import train
from train.setup import prepare
from train.step.preference import log_probabilities

FSDP = ("rules=jgt:fsdp_tensor", "mesh={data: 2, fsdp: 2, tensor: 2}")
STAGES = ("rules=jgt:pipeline", "mesh={data: 1, fsdp: 1, stage: 2, tensor: 4}", "pipeline={signal: layers, microbatches: 4}")


@pytest.fixture
def run_of(tiny, tmp_path):
    random = np.random.default_rng(0)

    def text():
        return "".join(random.choice([*"abcdefg"], random.integers(1, 6)))

    rows = [{"prompt": text(), "chosen": text(), "rejected": text() + "!"} for _ in range(40)]
    (path := tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = f"data={{source: preferences, path: {path}, eval_tokens: 200}}"
    return lambda *overrides: tiny(data, "train.loss=dpo", "train.steps=4", "train.batch=8", "checkpoint.every=2", *overrides)


def losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def opened(run):
    config = run.config
    return open_data(config.data, seq=config.model.seq, vocab=config.model.vocab, seed=0, cache_dir=config.run.path / "data")


@pytest.mark.parametrize("layout", [pytest.param((), marks=pytest.mark.slow), FSDP, pytest.param(STAGES, marks=pytest.mark.slow)])
def test_the_reference_is_the_model_before_the_first_step(run_of, layout, tmp_path):
    run = run_of(*layout)
    setup, data = prepare(run), opened(run)
    first = prepare(run_of()).init()
    model = prepare(run_of()).program.model
    scored = with_reference(setup, data, setup.init)
    for batch in (next(scored.train_batches(3, 8, range(8))), next(scored.eval_batches(2, range(2)))):
        expected = log_probabilities(model.module(first.params, first.variables), {k: v for k, v in batch.items() if k != "reference"})
        np.testing.assert_allclose(batch["reference"], expected, rtol=1e-4)


@pytest.mark.parametrize("layout", [FSDP, pytest.param(STAGES, marks=pytest.mark.slow)])
def test_a_run_that_was_killed_ends_with_the_same_bits(run_of, tmp_path, stopped_at, layout):
    with stopped_at(3):
        train(run_of(*layout))
    train(run_of(*layout))
    train(run_of(*layout, f"run.dir={tmp_path / 'whole'}"))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    # The model is its own reference at first.
    assert losses(tmp_path / "run")[1] == pytest.approx(math.log(2), abs=1e-6)
    assert (tmp_path / "run" / SCORES).read_bytes() == (tmp_path / "whole" / SCORES).read_bytes()


@pytest.mark.slow
def test_a_loss_without_a_reference_scores_nothing(run_of, tmp_path, stopped_at):
    with stopped_at(3):
        train(run_of("train.loss=orpo"))
    train(run_of("train.loss=orpo"))
    train(run_of("train.loss=orpo", f"run.dir={tmp_path / 'whole'}"))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert not (tmp_path / "run" / SCORES).exists()


@pytest.mark.slow
def test_a_start_before_the_first_checkpoint_scores_again(run_of, tmp_path, stopped_at):
    """The run that it begins with may have trained on meanwhile."""
    base = ["train.loss=dpo", "optimizer.lr=0.1", f"run.dir={tmp_path / 'base'}"]
    train(run_of(*base, "train.steps=2"))
    weights = f"checkpoint.weights={tmp_path / 'base'}"
    with stopped_at(1):
        train(run_of(weights))
    before = (file := tmp_path / "run" / SCORES).read_bytes()
    train(run_of(*base, "train.steps=4"))
    train(run_of(weights))
    assert file.read_bytes() != before
    assert losses(tmp_path / "run")[1] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.slow
def test_a_lost_file_is_computed_again(run_of, tmp_path, stopped_at):
    with stopped_at(3):
        train(run_of())
    before = (file := tmp_path / "run" / SCORES).read_bytes()
    file.write_bytes(before[: len(before) // 2])
    with pytest.raises(InputError, match="lacks the reference's log-probabilities of these pairs"):
        replay(run_of(), 3)
    train(run_of())
    assert file.read_bytes() == before
    assert replay(run_of(), 4).fault == "none"


def test_a_damaged_file_is_never_computed_with_another_model(run_of, tmp_path, stopped_at):
    base = ["train.loss=dpo", "optimizer.lr=0.1", f"run.dir={tmp_path / 'base'}"]
    train(run_of(*base, "train.steps=2"))
    weights = f"checkpoint.weights={tmp_path / 'base'}"
    with stopped_at(3):
        train(run_of(weights))
    before = (file := tmp_path / "run" / SCORES).read_bytes()
    shutil.copytree(tmp_path / "base", tmp_path / "first")
    train(run_of(*base, "train.steps=4"))
    flipped = bytearray(before)
    flipped[300] ^= 8
    for damaged in (bytes(flipped), before[: len(before) // 2], None):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        with pytest.raises(InputError, match=r"reference\.npz: is lost or damaged, and .*/4 has other parameters than .*/2 had"):
            train(run_of(weights))
    # With the same parameters as before, in any folder, it is the same file.
    train(run_of("checkpoint.weights=%s" % (tmp_path / "first")), Resume(allow=("checkpoint.weights",)))
    assert losses(tmp_path / "run")[1] == pytest.approx(math.log(2), abs=1e-6) and len(losses(tmp_path / "run")) == 4
    train(run_of("checkpoint.weights=%s" % (tmp_path / "first"), f"run.dir={tmp_path / 'whole'}"))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def archive(method=zipfile.ZIP_STORED, **arrays):
    with zipfile.ZipFile(buffer := io.BytesIO(), "w", method) as file:
        for name, array in arrays.items():
            with file.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, array)
    return buffer.getvalue()


def test_no_damaged_or_hostile_file_is_read(tmp_path):
    file, identity = tmp_path / SCORES, np.array("pairs")
    scores = {"train": np.arange(8, dtype=np.float32).reshape(4, 2)}
    whole = seal(SCORES, archive(data=identity, **scores))
    file.write_bytes(whole)
    np.testing.assert_array_equal(_read(file, "pairs")["train"], scores["train"])
    assert _read(file, "other pairs") is None
    for place in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        file.write_bytes(flipped)
        assert _read(file, "pairs") is None
    bomb = archive(zipfile.ZIP_DEFLATED, data=identity, train=np.zeros(1 << 24, np.float32))
    method = bytearray(archive(data=identity, **scores))
    method[method.index(b"PK\1\2") + 10] = 99
    for content in (bomb, bytes(method), archive(**scores), b"", b"PK"):
        file.write_bytes(seal(SCORES, content))
        assert _read(file, "pairs") is None
    file.unlink()
    os.mkfifo(file)
    assert _read(file, "pairs") is None and checksum(file) is None


def test_a_run_keeps_the_model_that_its_reference_came_from(run_of, tmp_path):
    begin_folder(run_of("checkpoint.weights=first"), {})
    (step := tmp_path / "run" / "checkpoints" / "1").mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match=r"checkpoint\.weights: is null, but .* was started with 'first'\. Change it back"):
        check_folder(run_of(), Resume())
    check_folder(run_of(), Resume(allow=("checkpoint.weights",)))


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("data={source: stdlib}", r"train\.loss: dpo needs pairs of answers\. Set data\.source: preferences"),
        ("train.loss=null", r"data\.source: preferences needs a loss of pairs of answers\. Add train\.loss: dpo or orpo"),
        ("data={source: stdlib}; train.loss=orpo", r"train\.loss: orpo needs pairs of answers\. Set data\.source: preferences"),
        ("train.loss=dpa", r"train\.loss: 'dpa' is neither dpo nor orpo nor MODULE:NAME"),
    ],
)
def test_data_and_loss_belong_together(run_of, override, problem):
    with pytest.raises(InputError, match=problem):
        run_of(*override.split("; "))
