"""The configs of a run that is started with other values."""

import errno
import json
import os
from dataclasses import replace

import pytest

from jgt import document
from train.files.disk import write_whole
from train.run.directory.history import begin_folder, replace_config
from train.run.train import train
from train.settings.code.files import Code, read_code

DATA = {"source": "text", "train_tokens": 100}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_run_keeps_the_config_of_each_start_that_trained(tiny, tmp_path, read_rows, capsys):
    train(tiny("train.steps=2", "optimizer.lr=0.003"))
    first = (tmp_path / "run" / "config.yaml").read_text()
    assert not (tmp_path / "run" / "configs").exists()
    capsys.readouterr()
    # It trains nothing, so it changes nothing.
    train(tiny("train.steps=1", "optimizer.lr=0.5"))
    assert (tmp_path / "run" / "config.yaml").read_text() == first
    assert "Config changes" not in capsys.readouterr().out
    train(tiny("train.steps=3", "optimizer.lr=0.0001"))
    (kept,) = (tmp_path / "run" / "configs").iterdir()
    assert kept.name.startswith("step-2-") and kept.read_text() == first
    assert document.read(tmp_path / "run" / "config.yaml").plain()["optimizer"]["lr"] == 0.0001
    changes = {"optimizer.lr": [0.003, 0.0001], "train.steps": [2, 3]}
    lines = [f"  {key}: {old} -> {new}" for key, (old, new) in changes.items()]
    assert "\n".join(["Config changes at step 2:", *lines, ""]) in capsys.readouterr().out
    (event,) = [event for event in read_rows(tmp_path / "run" / "events.jsonl") if event["phase"] == "config"]
    assert (event["step"], event["changes"], event["kept"]) == (2, changes, f"configs/{kept.name}")


def test_the_same_config_again_keeps_nothing(tiny, tmp_path):
    begin_folder(tiny(), DATA)
    assert replace_config(tiny(), DATA, 5) is None
    assert names(tmp_path / "run") == ["config.yaml", "data.json"]


def test_keys_of_the_users_own_are_compared_one_by_one(tiny, tmp_path):
    begin_folder(tiny("mesh={data: 4, fsdp: 2}"), DATA)
    change = replace_config(tiny("mesh={data: 8}", "train.remat=[a, b]"), DATA, 5)
    assert [c for c in change.changes if c[0].startswith("mesh")] == [("mesh.data", 4, 8), ("mesh.fsdp", 2, None)]
    assert "  mesh.fsdp: 2 -> (none)" in change.text.splitlines()


def test_a_key_that_an_older_file_lacks_has_not_changed(tiny, tmp_path):
    begin_folder(tiny(), DATA)
    path = tmp_path / "run" / "config.yaml"
    old = document.read(path).plain()
    del old["train"]["max_skipped"], old["hooks"]
    path.write_text(document.dump(old))
    assert replace_config(tiny(), DATA, 5) is None
    assert path.read_text() == document.dump(tiny().resolved())


def test_other_data_is_kept_too(tiny, tmp_path):
    begin_folder(tiny(), DATA)
    change = replace_config(tiny(), {**DATA, "train_tokens": 90}, 5)
    assert change.changes == (("data (train_tokens)", 100, 90),)
    (kept,) = (tmp_path / "run" / "configs").glob("*.json")
    assert json.loads(kept.read_text()) == DATA


@pytest.mark.parametrize("times", [3])
def test_no_former_config_is_lost_within_a_second(tiny, tmp_path, times):
    begin_folder(tiny(), DATA)
    for number in range(times):
        replace_config(tiny(f"train.steps={number + 50}"), DATA, 5)
    kept = (tmp_path / "run" / "configs").glob("*.yaml")
    assert sorted(document.read(path).plain()["train"]["steps"] for path in kept) == [20, 50, 51]


@pytest.mark.parametrize("is_link", [False, True])
def test_a_config_that_cannot_be_written_leaves_no_draft_and_follows_no_link(tmp_path, monkeypatch, is_link):
    def fail(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / "victim").write_text("mine")
    if is_link:
        (tmp_path / "config.yaml.new").symlink_to(tmp_path / "victim")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match=f"Input/output error: '{tmp_path / 'config.yaml'}'"):
            write_whole(tmp_path / "config.yaml", "a: 1\n")
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]
    write_whole(tmp_path / "config.yaml", "a: 1\n")
    assert (tmp_path / "victim").read_text() == "mine" and (tmp_path / "config.yaml").read_text() == "a: 1\n"


def test_a_copy_of_code_that_fails_leaves_the_earlier_one(tiny, tmp_path, monkeypatch):
    def fail(code, folder):
        folder.mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    def run_with(text):
        (tmp_path / "own.py").write_text(text)
        return replace(tiny(), code=read_code([tmp_path / "own.py"]))

    begin_folder(run_with("a = 1"), {})
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(Code, "copy", fail)
        begin_folder(run_with("a = 2"), {})
    begin_folder(run_with("a = 3"), {})
    assert [(tmp_path / "run" / name / "own.py").read_text() for name in ("code", "code.1")] == ["a = 3", "a = 1"]
    assert not (tmp_path / "run" / "code.new").exists()


def test_many_changes_are_shown_in_part(tiny, tmp_path):
    begin_folder(tiny("xla.flags={xla_a: 1}"), DATA)
    rules = ", ".join(f"xla_flag_{n}: true" for n in range(20))
    change = replace_config(tiny(f"xla.flags={{{rules}}}", "mesh={" + ", ".join(f"axis{n}: 1" for n in range(20)) + "}"), DATA, 5)
    assert len(change.text.splitlines()) == 14
    assert change.text.splitlines()[-1].startswith("  and ")
    assert all(len(line) <= 150 for line in change.text.splitlines())
