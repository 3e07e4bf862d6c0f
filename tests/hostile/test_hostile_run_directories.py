"""Run directories with hostile names, odd entries or damaged files: nothing is written outside of them, and no file is trusted."""

import pytest
from hostile import PLACES, argument, assert_lines, content, diagonal, refused, table, watched

from jgt.document import InputError
from train.config import load
from train.records.records import Records
from train.run.directory import identity
from train.run.directory.history import begin_folder
from train.run.directory.identity import Resume, check_data, check_folder

DIRECTORIES = table("run_directories")
DAMAGED = table("damaged_files")
ENTRIES = [
    "config.yaml",
    "data.json",
    "metrics.jsonl",
    "events.jsonl",
    "config.yaml.new",
    "metrics.jsonl.new",
    "sample.txt",
    "checkpoints",
    "data",
    "tensorboard",
]


@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_hostile_run_directory_is_refused(folder, name):
    problems = refused(folder, "--config", "base.yaml", argument(DIRECTORIES[name]["argument"]))
    assert any(DIRECTORIES[name]["message"] in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("entry", "place"), diagonal(ENTRIES, ["pipe", "link to nothing", "link to a device", "link outside", "the other kind"], 3)
)
def test_an_entry_that_is_not_what_a_run_writes_is_refused(folder, tmp_path, entry, place):
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    (outside / "17").mkdir(parents=True)
    if place == "link outside":
        (run / entry).symlink_to(outside)
    elif place != "the other kind":
        PLACES[place](run / entry)
    elif "." in entry:
        (run / entry).mkdir()
    else:
        (run / entry).touch()
    (problem,) = refused(tmp_path, "--config", str(folder / "base.yaml"), f"run.dir={run}")
    assert f"run.dir: {run}/{entry} is not a " in problem
    assert [path.name for path in outside.rglob("*")] == ["17"]


@pytest.mark.parametrize(("name", "entry"), diagonal(DAMAGED, ["config.yaml", "data.json"], 2))
def test_a_run_does_not_resume_from_a_damaged_file(folder, tmp_path, monkeypatch, name, entry):
    run = load(folder / "base.yaml", [f"run.dir={tmp_path / 'run'}"])
    begin_folder(run, {"files": 1})
    # A start without a checkpoint has nothing to go on with.
    monkeypatch.setattr(identity, "_has_saved", lambda run: True)
    (tmp_path / "run" / entry).write_bytes(content(DAMAGED[name]))
    with watched(tmp_path), pytest.raises(InputError) as caught:
        check_folder(run, Resume())
        check_data(run, {"files": 1}, Resume())
    assert_lines(caught.value.problems)
    assert all(str(tmp_path / "run" / entry) in problem for problem in caught.value.problems)


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_metrics_are_dropped(folder, tmp_path, name):
    begin_folder(load(folder / "base.yaml", [f"run.dir={tmp_path / 'run'}"]), {"files": 1})
    (tmp_path / "run" / "metrics.jsonl").write_bytes(content(DAMAGED[name]))
    records = Records(tmp_path / "run")
    with watched(tmp_path):
        records.forget_after(5)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == b""
