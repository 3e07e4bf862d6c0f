"""Runs of published models and adapters that are objects of a store."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from test_frozen_runs import PUBLISHED, assert_same

import jgt
from jgt.document import InputError
from train.checkpoint.saved import find_checkpoint
from train.commands.published import export
from train.config import load
from train.run.check import check_placement
from train.run.directory.identity import Resume, check_folder
from train.run.train import train

GOLDENS = PUBLISHED.parents[1]


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A folder with a model, its tokenizer and an adapter, and the copies of objects somewhere else than this user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(PUBLISHED, tmp_path / "store" / "model")
    shutil.copytree(GOLDENS / "adapters" / "qwen3", tmp_path / "store" / "adapter")
    for file in (GOLDENS / "tokenizers" / "byte_level").iterdir():
        shutil.copy(file, tmp_path / "store" / "model")
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(3, 64, 8000, np.uint16))
    return tmp_path / "store"


def run_of(store, place, name, *overrides):
    sections = {
        "run": {"dir": f"{store}/{name}"},
        "model": {"hf": f"{place}/model", "seq": 16, "vocab": 64},
        "lora": {"hf": f"{place}/adapter"},
        "data": {"source": "tokens", "path": f"{store.parent}/tokens.npy", "eval_tokens": 0},
        "train": {"batch": 8, "steps": 4},
        "checkpoint": {"every": 2},
    }
    file = store.parent / f"{name}.yaml"
    file.write_text(json.dumps(sections))
    return load(file, overrides)


def test_a_run_of_objects_ends_as_one_of_files(store, stopped_at, monkeypatch):
    url = f"file://{store}"
    run = run_of(store, url, "objects")
    assert run.config.data.tokenizer == f"{url}/model/tokenizer.json"
    check_placement(run)
    with stopped_at(3):
        train(run)
    # Another machine has no copies yet.
    monkeypatch.setenv("XDG_CACHE_HOME", str(store.parent / "other"))
    run = load(store / "objects" / "config.yaml")
    check_folder(run, Resume())
    train(run)
    train(run_of(store, store, "files"))
    assert_same(jgt.load(store / "objects").params, jgt.load(store / "files").params)
    base = find_checkpoint(store / "objects")[0].manifest.base
    assert base.path == f"{url}/model" and (store / "objects" / "origin" / "tokenizer.json").is_file()
    for name in ("objects", "files"):
        assert export([str(store / name), str(store / f"{name}-out"), "--merge"]) == 0
    assert (store / "objects-out" / "model.safetensors").read_bytes() == (store / "files-out" / "model.safetensors").read_bytes()


def test_what_is_missing_below_a_url_is_named(store, tmp_path):
    for key, needed in (("model", "config.json"), ("adapter", "adapter_config.json")):
        file = store / key / needed
        file.rename(tmp_path / needed)
        with pytest.raises(InputError, match=rf"run.yaml:1: .*hf: file://.*/{key}: is not a folder of Hugging Face: {needed} is missing"):
            run_of(store, f"file://{store}", "run")
        (tmp_path / needed).rename(file)
    with pytest.raises(InputError, match=r"model.hf: 'http://models/qwen3' is not supported"):
        run_of(store, "http://models", "run", "model.hf=http://models/qwen3")


def test_a_base_whose_objects_are_gone_is_named(store):
    train(run_of(store, f"file://{store}", "run", "train.steps=1", "checkpoint.every=1"))
    Path(store / "model" / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"has neither model.safetensors nor"):
        jgt.load(store / "run")
