"""Hostile checkpoints: a step with a damaged manifest, or with files that its manifest does not list, counts as broken and is set aside."""

import contextlib
import json
import os
import pickle
from pathlib import Path

import jax.numpy as jnp
import pytest
from checkpoints import newest_of
from hostile import Trap, assert_lines, content, diagonal, make_socket, read_step, table, watched

from train.checkpoint import manifest
from train.checkpoint.checkpoint import Checkpoints
from train.checkpoint.config import CheckpointConfig
from train.checkpoint.saved import find_checkpoint
from train.checkpoint.steps import Steps
from train.step.state import State

TEN_THOUSAND_FILES = [{"path": f"{i}", "size": 1, "crc32": 1} for i in range(10_000)]
MANIFESTS = table("manifests") | {
    "a pickle": {"bytes": pickle.dumps(Trap()), "message": "manifest.json is damaged"},
    "a long format": {"change": ["format"], "to": "x" * 5_000, "message": "format 'xxx"},
    "samples of 10^300": {"change": ["samples"], "to": 10**300, "message": "is not a whole number from 0 to 2^62"},
    "a long path": {"change": ["files", 0, "path"], "to": "a/" * 1_000 + "a", "message": "leads outside, or is too long"},
    "ten thousand files": {"change": ["files"], "to": TEN_THOUSAND_FILES, "message": "and 9997 more problems"},
}


def hostile_manifest(case, whole):
    """The manifest of a case, made from the text of a complete one."""
    if "change" not in case:
        return content(case)
    *path, last = case["change"]
    values = inner = json.loads(whole)
    for key in path:
        inner = inner[key]
    inner[last] = case["to"]
    return json.dumps(manifest.sealed(values)).encode()


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_step_with_a_hostile_manifest_is_broken(steps, name):
    path = steps.path(7) / manifest.NAME
    path.write_bytes(hostile_manifest(MANIFESTS[name], path.read_text()))
    reason = read_step(steps)
    assert MANIFESTS[name]["message"] in reason
    # The reason is one line of a report, which names the folder too.
    assert len(reason) < 2_000
    assert steps.set_aside(7).name == "7.broken" and steps.listed() == []


INTRUDERS = {
    "a pickle": lambda path: path.write_bytes(pickle.dumps(Trap())),
    "a pipe": os.mkfifo,
    "a socket": make_socket,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link outside": lambda path: path.symlink_to("/"),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link back": lambda path: path.symlink_to("."),
    "a folder with a file": lambda path: (path.mkdir(), (path / "a").touch()),
    "a name with a line end": lambda path: path.with_name("a\nb").touch(),
    "a name that is not UTF-8": lambda path: path.with_name("\udcff").touch(),
    "deep folders": lambda path: (path / "/".join("a" * 300)).mkdir(parents=True) or (path / "/".join("a" * 301)).touch(),
}


@pytest.mark.parametrize("where", ["", "state"])
@pytest.mark.parametrize("name", INTRUDERS)
def test_a_step_with_anything_that_is_not_listed_is_broken(steps, monkeypatch, name, where):
    monkeypatch.chdir(steps.folder)
    INTRUDERS[name](steps.path(7) / where / "odd.pkl")
    assert read_step(steps)
    assert not Path("canary").exists()


@pytest.mark.parametrize("name", ["a pipe", "a socket", "a link to a device"])
def test_a_step_is_broken_if_a_listed_file_is_not_regular(steps, name):
    array = steps.path(7) / "state" / "array"
    array.unlink()
    INTRUDERS[name](array)
    path = steps.path(7) / manifest.NAME
    values = json.loads(path.read_text())
    next(entry for entry in values["files"] if entry["path"] == "state/array").update(size=0, crc32=0, sha256=None)
    path.write_text(json.dumps(manifest.sealed(values)))
    assert "state/array " in read_step(steps)


@pytest.mark.parametrize("name", ["a pipe", "a link to a device", "a link outside", "a link back"])
def test_a_step_is_broken_if_its_manifest_is_not_a_regular_file(steps, name):
    path = steps.path(7) / manifest.NAME
    path.unlink()
    INTRUDERS[name](path)
    assert read_step(steps)


ODD_NAMES = ["0", "007", "-1", "1.0", "1e3", "\u0667", "\u00b2", "7 ", "9" * 200, "99999999999", "7.broken", "7.saving", "trash", "a\nb"]


@pytest.mark.parametrize(("name", "kind"), diagonal(ODD_NAMES, ["folder", "file", "pipe", "link"], 2))
def test_odd_names_among_the_steps_are_ignored(steps, tmp_path, name, kind):
    """They are not steps. The remains of an interrupted save are removed, but never the target of a link."""
    path, outside = steps.folder / name, tmp_path / "run" / "outside"
    (outside / "8").mkdir(parents=True)
    {"folder": Path.mkdir, "file": Path.touch, "pipe": os.mkfifo, "link": lambda path: path.symlink_to(outside)}[kind](path)
    with watched(tmp_path):
        assert steps.listed() == [7]
        steps.clear()
        steps.retire(1)
        assert steps.listed() == [7]
        steps.set_aside(7)
    assert (outside / "8").is_dir()
    assert os.path.lexists(path) == (name not in ("7.saving", "trash"))


def test_a_checkpoint_folder_that_is_not_a_folder_has_no_steps(tmp_path):
    for make in (Path.touch, os.mkfifo, lambda path: path.symlink_to(path.name)):
        path = tmp_path / "checkpoints"
        make(path)
        with watched(tmp_path):
            assert Steps(path).listed() == []
            Steps(path).clear()
        path.unlink()


def test_a_checkpoint_with_pickles_is_set_aside(empty):
    state = State(jnp.asarray(3), {"kernel": jnp.ones((4, 4))}, {"mu": jnp.ones((4, 4))})
    with contextlib.closing(Checkpoints(empty / "checkpoints", CheckpointConfig())) as checkpoints:
        for number in (1, 2):
            checkpoints.save(state, number, samples=number)
        checkpoints.wait()
        for name in ("evil.pkl", "state/checkpoint", "state/_CHECKPOINT_METADATA.pkl"):
            (empty / "checkpoints" / "2" / name).write_bytes(pickle.dumps(Trap()))
        found, reports = newest_of(checkpoints)
        assert found.manifest.step == 1
        assert_lines(reports)
        assert find_checkpoint(empty / "nowhere") == find_checkpoint(Path("a" * 5_000)) == find_checkpoint(Path("a\0b")) == (None, [])
    assert not (empty / "canary").exists()
