"""Runs on samples of the user's own: random changes of them, and evaluations that a pipeline can take."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runs import flags, free_port, rows

from jgt import document
from jgt.document import InputError
from train.config import load
from train.run.check import check_placement
from train.run.directory.identity import Resume, check_places
from train.run.opened import _check_rows, open_run
from train.run.train import train
from train.settings.code.files import read_code

MODULE = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jgt import signal


class Deep(nnx.Module):
    def __init__(self, *, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (4, 8, 8)) / 4)

    def __call__(self, x):
        with signal.context("layers"):
            x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, self.w[...])
        return x


def loss(model, batch, train: bool):
    if not train and batch["x"].shape[0] == ODD:
        raise ValueError("an odd batch")
    return jnp.mean((model(batch["x"]) - 1) ** 2), {"sum": (jnp.sum(jnp.round(100 * batch["x"])), jnp.sum(jnp.ones(len(batch["x"]))))}


def plain(split, held: int = 80):
    return [{"x": np.full(8, i / 100, np.float32)} for i in range(96 if split == "train" else held)]


def flip(sample, rng):
    return {"x": sample["x"] * np.float32(rng.choice([-1, 1]))}


class Flipped(list):
    def __getitem__(self, index):
        return flip(super().__getitem__(index), np.random)


def drawn(split):
    return Flipped(plain(split)) if split == "train" else plain(split)
"""
SECTIONS = {
    "model": {"kind": "mine:Deep"},
    "devices": {"virtual_cpu": 8},
    "mesh": {"data": 8},
    "data": {"source": "mine:plain"},
    "optimizer": {"lr": 0.01, "schedule": "constant"},
    "train": {"loss": "mine:loss", "steps": 12, "batch": 32},
    "checkpoint": {"every": 3},
}
PIPELINE = ["mesh={data: 4, stage: 2}", "pipeline={signal: layers, microbatches: 4}", "rules={axes: {batch: [data]}, default: replicate}"]


@pytest.fixture
def run_of(tmp_path):
    """A run in a folder of this name."""

    def _run_of(name, *overrides, odd=-1):
        (tmp_path / "mine.py").write_text(f"ODD = {odd}\n{MODULE}")
        sections = {**SECTIONS, "run": {"dir": str(tmp_path / name)}}
        return load(sections, overrides, code=read_code([tmp_path / "mine.py"]))

    return _run_of


def logged(folder):
    return [(row["step"], row["sum"], row["loss"]) for row in rows(folder / "metrics.jsonl") if "lr" in row]


# -- random changes ------------------------------------------------------------------------------------------------


def test_a_run_with_random_changes_that_is_killed_ends_as_the_unbroken_one(run_of, tmp_path, stopped_at):
    changed = "data.transform=mine:flip"
    train(run_of("straight", changed))
    for step in (4, 8):
        with stopped_at(step):
            train(run_of("broken", changed))
    train(run_of("broken", changed))
    assert logged(tmp_path / "broken") == logged(tmp_path / "straight") and len(logged(tmp_path / "broken")) == 12
    # In four epochs of three batches no batch comes twice.
    assert len({total for _, total, _ in logged(tmp_path / "straight")}) == 12


def test_a_run_on_samples_that_draw_by_themselves_resumes_and_says_what_is_not_repeated(run_of, tmp_path, capsys):
    train(run_of("run", "data.source=mine:drawn", "train.steps=3"))
    train(run_of("run", "data.source=mine:drawn", "train.steps=6"))
    assert [step for step, *_ in logged(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    lines = [line for line in capsys.readouterr().out.splitlines() if "The run does not repeat these draws" in line]
    place = (tmp_path / "mine.py").read_text().splitlines().index("class Flipped(list):") + 2
    assert len(lines) == 2 and lines[0].startswith(f"mine:drawn: {tmp_path / 'mine.py'}:{place}: samples have other values each time")


def test_processes_that_share_rows_are_refused_where_each_would_draw_other_values(run_of, monkeypatch):
    run = run_of("run", "data.source=mine:drawn")
    setup, data = open_run(run)
    _check_rows(run, data, setup)

    # Of the batch of 32, each of two processes has a half, or all.
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr("train.run.opened.local_rows", lambda sharding, shape: range(shape[0] // 2))
    _check_rows(run, data, setup)
    monkeypatch.setattr("train.run.opened.local_rows", lambda sharding, shape: range(shape[0]))
    _check_rows(run, replace(data, fingerprint={}), setup)
    with pytest.raises(InputError, match=r"data.source: samples have other values .* several processes read the same rows"):
        _check_rows(run, data, setup)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["plain", "drawn"])
def test_random_changes_are_the_same_on_every_number_of_processes(source, nursery, tmp_path):
    (tmp_path / "mine.py").write_text(f"ODD = -1\n{MODULE}")
    data = {"source": f"mine:{source}"} | ({"transform": "mine:flip"} if source == "plain" else {})
    (tmp_path / "run.yaml").write_text(document.dump({**SECTIONS, "data": data, "devices": {"virtual_cpu": 1}, "mesh": {"data": -1}}))
    found = {}
    for processes in (1, 2, 4):
        port, folder = free_port(), tmp_path / f"on{processes}"
        arguments = ["--config", str(tmp_path / "run.yaml"), "--code", str(tmp_path / "mine.py"), f"run.dir={folder}"]
        joined = [flags(port, processes, i) if processes > 1 else [] for i in range(processes)]
        children = [nursery.start([*arguments, *more], folder.with_suffix(f".{i}.log")) for i, more in enumerate(joined)]
        assert [child.wait() for child in children] == [0] * processes, Path(folder.with_suffix(".0.log")).read_text()
        found[processes] = np.array(logged(folder))
    if source == "plain":
        # Sums of whole numbers are exact in any order.
        for processes in (2, 4):
            np.testing.assert_array_equal(found[1][:, 1], found[processes][:, 1])
            np.testing.assert_allclose(found[1], found[processes], rtol=1e-5)
    assert [len(values) for values in found.values()] == [12] * 3


# -- evaluations ---------------------------------------------------------------------------------------------------


def test_an_evaluation_reads_batches_that_the_pipeline_divides(run_of, tmp_path, capsys):
    train(run_of("run", *PIPELINE, "train.steps=1"))
    assert "An evaluation reads 80 samples in batches of 16" in capsys.readouterr().out
    piped = rows(tmp_path / "run" / "metrics.jsonl")[-1]["eval_loss"]
    train(run_of("plain", "train.steps=1"))
    plain = rows(tmp_path / "plain" / "metrics.jsonl")[-1]["eval_loss"]
    np.testing.assert_allclose(piped, plain, rtol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "odd", "problem"),
    [
        ([*PIPELINE, "data.held=6"], -1, "6 held-out samples are fewer than 16, the devices that split a batch times the microbatches"),
        (["data.held=1"], -1, "1 held-out samples are fewer than 8, the devices that split a batch. Hold out more, or none"),
        (["data.held=60"], 24, "mine.py:20: ValueError: an odd batch"),
        (["data.held=60", "checkpoint.best=eval_lss"], -1, "no evaluation has the metric 'eval_lss'. Did you mean 'eval_loss'?"),
    ],
)
def test_an_evaluation_that_would_fail_is_found_before_the_first_step(overrides, odd, problem, run_of, tmp_path):
    for open_it in (check_placement, train):
        with pytest.raises(InputError) as caught:
            open_it(run_of("run", *overrides, odd=odd))
        assert problem in str(caught.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# -- rules for any model -------------------------------------------------------------------------------------------


def test_the_rules_for_any_model_store_it_in_parts_and_change_no_number(run_of, tmp_path):
    train(run_of("one", "mesh={data: 1}", "train.steps=2"))
    train(run_of("parts", "mesh={fsdp: 8}", "rules=jgt:any", "train.steps=2"))
    # Its parameter is too small to be worth a message.
    setup = check_placement(run_of("again", "mesh={fsdp: 8}", "rules=jgt:any"))
    assert setup.run.rules.is_chosen and setup.storage.placement.parameters[0].bytes_per_device(setup.mesh) == 4 * 8 * 8 * 4
    one, parts = (np.array(logged(tmp_path / name)) for name in ("one", "parts"))
    np.testing.assert_allclose(one, parts, rtol=1e-5)
    evaluations = [rows(tmp_path / name / "metrics.jsonl")[-1]["eval_loss"] for name in ("one", "parts")]
    np.testing.assert_allclose(*evaluations, rtol=1e-5)


def test_a_run_keeps_the_rules_that_were_chosen_and_takes_them_again(run_of, tmp_path):
    def params(*overrides):
        return [rule.spec for rule in open_run(run_of("run", "rules=jgt:fsdp", "train.steps=1", *overrides))[0].run.rules.params]

    train(run_of("run", "mesh={fsdp: 8}", "rules=jgt:fsdp", "train.steps=1"))
    file = tmp_path / "run" / "config.yaml"
    kept = document.read(file).plain()
    assert kept["rules"] == {"inputs": {"**": ["fsdp", "..."]}, "reads": "whole", "default": "replicate"}
    # As if that choice had been another one.
    file.write_text(document.dump({**kept, "rules": {**kept["rules"], "params": {"w": ["fsdp", None]}}}))
    assert params("mesh={fsdp: 8}") == [(("fsdp",), ())]
    # One that does not fit this mesh is not taken.
    file.write_text(document.dump({**kept, "rules": {**kept["rules"], "params": {"w": ["data", None]}}}))
    assert params("mesh={fsdp: 8}") == []
    # Nor is one of another rules file: jgt:fsdp_tensor splits over tensor, too, and jgt:zero1 splits no parameter.
    file.write_text(document.dump({**kept, "rules": {**kept["rules"], "params": {"w": ["fsdp", None]}}}))
    assert params("mesh={fsdp: 4, tensor: 2}", "rules=jgt:fsdp_tensor") == []
    assert params("mesh={fsdp: 8}", "rules=jgt:fsdp_tensor") == [(("fsdp",), ())]
    whole = {"inputs": {"**": ["data", "..."]}, "reads": "whole", "default": "replicate", "params": {"w": ["data", None]}}
    file.write_text(document.dump({**kept, "rules": whole}))
    assert params("mesh={data: 8}", "rules=jgt:zero1") == []


def test_shipped_rules_for_other_models_are_one_line(run_of):
    with pytest.raises(InputError) as caught:
        check_placement(run_of("run", "mesh={data: 2, seq: 4}", "rules=jgt:context"))
    (problem,) = caught.value.problems
    assert problem.startswith(
        "command line: rules=jgt:context: rules: jgt:context: 5 of its rules name parts of jgt's own models that mine:Deep"
    )
    assert problem.endswith("Use jgt:any, which fits every model, or write others (docs/rules.md)")


# -- what a start that saved nothing leaves ------------------------------------------------------------------------


def test_a_start_that_saved_nothing_freezes_no_config(run_of, tmp_path, stopped_at):
    run = run_of("run", "train.steps=4")
    with stopped_at(1):
        train(run)
    assert (tmp_path / "run" / "config.yaml").exists() and not list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))
    changed = run_of("run", "train.steps=4", "data.transform=mine:flip", "run.seed=1")
    check_places(changed, Resume())
    train(changed)
    with pytest.raises(InputError, match=r"run.seed: is 0, but .* was started with 1"):
        check_places(run, Resume())


def test_a_comment_in_own_code_is_no_other_code(run_of, tmp_path):
    train(run_of("run", "train.steps=3"))
    same = run_of("run", "train.steps=4")
    file = tmp_path / "mine.py"
    file.write_text("# A comment.\n" + file.read_text().replace("x @ w), None)", "x @ w),   None)"))
    check_places(load_again(same, file), Resume())
    file.write_text(file.read_text().replace("- 1) ** 2", "- 2) ** 2"))
    with pytest.raises(InputError, match="code: is other code"):
        check_places(load_again(same, file), Resume())


def load_again(run, file):
    return replace(run, code=read_code([file]))


# -- settings without an effect ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["train.eval_every=2", "data.held=0"], "train.eval_every: 2 has no effect, because no data is held out"),
        (
            ["optimizer.warmup=100"],
            "optimizer.warmup: 100 steps are not over when the run ends at step 1, so the learning rate never reaches",
        ),
    ],
)
def test_a_setting_without_an_effect_is_said(overrides, line, run_of, capsys):
    train(run_of("run", "train.steps=1", *overrides))
    assert line in capsys.readouterr().out
