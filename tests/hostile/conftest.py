"""The working directory of every test here: a folder of valid files beside each hostile one."""

import shutil

import numpy as np
import pytest
from hostile import VALID

from jgt import document
from train.checkpoint.contents import file_entries
from train.checkpoint.listing import ArrayEntry, Manifest
from train.checkpoint.steps import Steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files that the valid files refer to."""
    path = tmp_path_factory.mktemp("hostile")
    (path / "a.txt").write_text("some text " * 50)
    np.arange(200, dtype=np.uint16).tofile(path / "a.bin")
    (path / "base.yaml").write_text(document.dump({"train": {"steps": 3}}))
    for name in ("table.csv", "rules.yaml"):
        shutil.copy(VALID / name, path / name)
    return path


@pytest.fixture(autouse=True)
def _in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)


@pytest.fixture
def empty(tmp_path, _in_folder, monkeypatch):
    """An empty folder as the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def steps(tmp_path):
    """A folder of checkpoints with one whole step, 7."""
    steps = Steps(tmp_path / "run" / "checkpoints")
    saving = steps.saving(7)
    (saving / "state").mkdir(parents=True)
    (saving / "state" / "array").write_bytes(b"0123456789" * 10)
    (saving / "state" / "_METADATA").write_text("{}")
    steps.finish(
        Manifest(
            step=7,
            samples=112,
            mesh={"data": 2},
            versions={"jax": "0.10.2"},
            fingerprints={"config": {"run.seed": 1}, "data": {"bytes": 5}},
            arrays=(ArrayEntry(path="params/kernel", shape=(5, 4), dtype="float32"),),
            files=file_entries(saving, sha256=True),
        )
    )
    return steps
