"""Checkpoints that leave the frozen parameters of a published model to its files."""

import json
import shutil

import numpy as np
import pytest
from test_frozen_runs import PUBLISHED, assert_same, flat

import jgt
from jgt import document
from jgt.document import InputError
from train.checkpoint.saved import find_checkpoint
from train.commands.published import export
from train.config import load
from train.run.directory.identity import read_resume
from train.run.train import train
from train.weights.base import base_in
from train.weights.contents import has_identity, identity
from train.weights.safetensors import open_folder
from train.weights.writing import write_folder

TRAIN = "optimizer.train=[layers/attn/**]"
LAYOUTS = {
    "alone": (),
    "fsdp": ("rules=jgt:fsdp", "mesh={fsdp: 8}"),
    "stages": ("rules=jgt:pipeline", "mesh={data: 1, fsdp: 2, stage: 2, tensor: 2}", "pipeline={signal: layers, microbatches: 4}"),
    "replicas": ("rules=jgt:hybrid", "mesh={replica: 2, fsdp: 4}", "sync={axis: replica, every: 2}"),
}


@pytest.fixture
def run(tmp_path):
    """A run that begins from a copy of a tiny published model, and trains its attention."""
    folder, file = tmp_path / "published", tmp_path / "run.yaml"
    shutil.copytree(PUBLISHED, folder)
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(3, 64, 8000, np.uint16))
    sections = {
        "run": {"dir": str(tmp_path / "run")},
        "mesh": {"data": 1},
        "model": {"hf": str(folder), "seq": 16},
        "data": {"source": "tokens", "path": str(tmp_path / "tokens.npy"), "eval_tokens": 0},
        "train": {"batch": 8, "steps": 2},
    }
    file.write_text(json.dumps(sections))
    return lambda *overrides: load(file, [TRAIN, *overrides])


def saved_in(folder):
    return find_checkpoint(folder)[0]


def sha256(folder):
    return base_in(str(folder), {"any": np.zeros(1)}).sha256


def changed(folder, tensor):
    """Adds 1 to a byte in the middle of a tensor's files."""
    place = open_folder(folder).tensors[tensor]
    with place.file.open("r+b") as file:
        file.seek(place.offset + place.nbytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_a_checkpoint_has_what_is_trained_and_names_the_rest(run, tmp_path):
    train(run("train.steps=1"))
    saved = saved_in(tmp_path / "run")
    assert not [entry for entry in saved.manifest.arrays if entry.path.startswith("frozen/")]
    base = saved.manifest.base
    assert base.path == str(tmp_path / "published") and base.sha256 == sha256(tmp_path / "published")
    assert all("/attn/" not in entry.path for entry in base.arrays) and len(base.arrays) == 8


@pytest.mark.slow
def test_a_model_whose_folder_was_moved_is_found_by_model_hf(run, tmp_path):
    train(run())
    loaded, published = flat(jgt.load(tmp_path / "run").params), flat(jgt.load(tmp_path / "published").params)
    for path, x in published.items():
        assert (loaded[path] != x).any() == ("/attn/" in path), path
    # On, in another place, under another name, in two files.
    shutil.move(tmp_path / "published", tmp_path / "moved")
    with pytest.raises(InputError, match=r"published: cannot be read: .* model.hf=FOLDER \(to train on, with --allow-change model.hf\)"):
        jgt.load(tmp_path / "run")
    assert_same(jgt.load(tmp_path / "run", [f"model.hf={tmp_path / 'moved'}"]).params, loaded)
    assert export([str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert export([str(tmp_path / "run"), str(tmp_path / "out"), f"model.hf={tmp_path / 'moved'}", "--max-file", "0.02MB"]) == 0
    assert_same(jgt.load(tmp_path / "out", "model.seq=16").params, loaded)


@pytest.mark.slow
def test_other_contents_of_the_folder_are_refused_unless_they_are_allowed(run, tmp_path):
    train(run("train.steps=1"))
    before = saved_in(tmp_path / "run").manifest.base
    changed(tmp_path / "published", "model.layers.1.mlp.up_proj.weight")
    refused = pytest.raises(InputError, match=r"published: its tensors are not those that the run froze\..* --allow-change base")
    with refused:
        train(run())
    with refused:
        jgt.load(tmp_path / "run")
    assert saved_in(tmp_path / "run").manifest.step == 1
    train(run(), read_resume("auto", ["base"], tmp_path / "run"))
    after = saved_in(tmp_path / "run").manifest
    assert after.step == 2 and after.base.arrays == before.arrays and after.base.sha256 != before.sha256
    jgt.load(tmp_path / "run")
    shutil.rmtree(tmp_path / "published")
    with pytest.raises(InputError, match=r"published: cannot be read: .*"):
        train(run("train.steps=3"))


def test_the_identity_does_not_depend_on_names_of_files(run, tmp_path):
    folder = tmp_path / "published"
    run()
    before = sha256(folder)
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    names = dict.fromkeys(open_folder(PUBLISHED).tensors, "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert sha256(folder) == before and base_in(str(folder), {}) is None
    changed(folder, "model.norm.weight")
    assert sha256(folder) != before


def test_the_identity_covers_every_byte_in_the_first_process(tmp_path, monkeypatch):
    """Training of new tokens changes rows at the end of a table."""
    folder, table = tmp_path / "published", np.zeros((256, 1 << 15), np.float32)
    write_folder(folder, {"table": (table.dtype, table.shape)}, [("table", (), table)], files={}, max_file_bytes=1 << 30)
    before = identity(folder)
    with monkeypatch.context() as patch:
        patch.setattr("train.weights.contents.jax.process_index", lambda: 1)
        assert before.startswith(part := identity(folder)) and len(part) == 64 and has_identity(folder, before)
    assert has_identity(folder, before) and has_identity(folder, part)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    # What an earlier version has stored covers the sample alone.
    assert not has_identity(folder, before) and has_identity(folder, part)
    assert not any(has_identity(folder, odd) for odd in ("", "a", before[:63], part[:-1] + "x"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_ends_with_the_bits_of_one_that_stores_everything(run, tmp_path, stopped_at, monkeypatch, layout):
    options = ("model.base_dtype=bf16", "train.ema=0.9", "train.steps=4", "checkpoint.every=2", *LAYOUTS[layout])
    with stopped_at(3):
        train(run(*options))
    train(run(*options))
    with monkeypatch.context() as patch:
        patch.setattr("train.run.start.base_in", lambda folder, frozen: None)
        with stopped_at(3):
            train(run(*options, f"run.dir={tmp_path / 'stored'}"))
    # Checkpoints of earlier versions have all parameters, and so have those that follow them.
    train(run(*options, f"run.dir={tmp_path / 'stored'}"))
    assert saved_in(tmp_path / "stored").manifest.base is None
    for more in ([], ["train.ema=null"]):
        assert_same(jgt.load(tmp_path / "run", more).params, jgt.load(tmp_path / "stored", more).params)
    assert export([str(tmp_path / "run"), str(tmp_path / "a")]) == export([str(tmp_path / "stored"), str(tmp_path / "b")]) == 0
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_checkpoint_resumes_on_any_mesh(run, tmp_path):
    train(run("train.steps=2", *LAYOUTS["fsdp"]))
    before = flat(jgt.load(tmp_path / "run").params)
    for name, layout in LAYOUTS.items():
        moved = tmp_path / name
        shutil.copytree(tmp_path / "run", moved)
        train(run("train.steps=4", f"run.dir={moved}", *layout))
        assert saved_in(moved).manifest.base == saved_in(tmp_path / "run").manifest.base
        for path, x in flat(jgt.load(moved).params).items():
            assert (x == before[path]).all() != ("/attn/" in path), path


@pytest.mark.slow
def test_a_run_that_begins_from_such_a_checkpoint_has_the_same_base_or_stores_all(run, tmp_path):
    train(run("train.steps=1"))
    before, base = flat(jgt.load(tmp_path / "run").params), saved_in(tmp_path / "run").manifest.base
    # Without the key model.hf the model is described in the file.
    model = json.dumps({**document_of(tmp_path / "run")["model"], "hf": None})
    weights = ("train.steps=1", "optimizer.lr=1e-30", f"model={model}", f"checkpoint.weights={tmp_path / 'run'}")
    for name, more, kept in (("same", (), base), ("others", ("optimizer.train=[embedding]",), None)):
        train(run(*weights, *more, f"run.dir={tmp_path / name}"))
        assert saved_in(tmp_path / name).manifest.base == kept
        assert_same(jgt.load(tmp_path / name).params, before)
        train(run(*weights, *more, "train.steps=2", f"run.dir={tmp_path / name}"))
        assert_same(jgt.load(tmp_path / name).params, before)
    # A base of random values is in no folder.
    train(run("train.steps=1", f"model={model}", f"run.dir={tmp_path / 'random'}"))
    assert saved_in(tmp_path / "random").manifest.base is None


def document_of(folder):
    return document.read(folder / "config.yaml").plain()
