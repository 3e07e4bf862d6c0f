"""Real processes whose data changes under them: a file that is overwritten, cut or extended, and an encoding that is killed."""

import json
import os
import signal

import numpy as np
import pytest
from runs import Processes, flags, free_port, rows, wait_for_path, wait_for_step

from train.checkpoint.steps import FOLDER, Steps

SOON = 60
EVERY = 10
MANY = 100_000
TOKENS = 200_000


def random_ids(seed, below=256):
    return np.random.default_rng(seed).integers(0, below, TOKENS, np.uint16)


def appended(path):
    with path.open("ab") as file:
        file.write(b"\0\0")


def replaced(path):
    new = path.with_suffix(".new")
    random_ids(1).tofile(new)
    new.replace(path)


CHANGES = {
    "ids outside the vocabulary": (lambda path: random_ids(1, 60_000).tofile(path), "was written after the run opened it"),
    "cut": (lambda path: os.truncate(path, 1000), "has 1,000 bytes, but had 400,000 when the run opened it"),
    "other ids": (lambda path: random_ids(1).tofile(path), "was written after the run opened it"),
    "appended": (appended, "has 400,002 bytes, but had 400,000 when the run opened it"),
    "replaced": (replaced, "was written after the run opened it"),
    "removed": (lambda path: path.unlink(), "can no longer be read: No such file or directory"),
}


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens.bin"
    random_ids(0).tofile(path)
    return path


@pytest.fixture
def started(nursery, tiny_file, tokens, tmp_path, pytestconfig):
    """Starts the processes of a run on the token file; its folder is tmp_path / name."""

    def _started(*overrides, name="run", steps=MANY, count=1):
        data = f"data={{source: tokens, path: {tokens}, eval_tokens: 0}}"
        options = [f"run.dir={tmp_path / name}", f"train.steps={steps}", "train.log_every=1", f"checkpoint.every={EVERY}", data]
        port = free_port()
        joined = [flags(port, count, i) if count > 1 else [] for i in range(count)]
        commands = [["--config", str(tiny_file), *options, *overrides, *own] for own in joined]
        return Processes(tmp_path, commands, pytestconfig.rootpath, nursery=nursery)

    return _started


def losses(folder):
    return {row["step"]: row["loss"] for row in rows(folder / "metrics.jsonl")}


@pytest.mark.parametrize("change", [pytest.param(name, marks=[pytest.mark.slow] if number else []) for number, name in enumerate(CHANGES)])
def test_a_file_that_changes_ends_the_run_and_is_in_no_checkpoint(change, started, tokens, tmp_path):
    make, message = CHANGES[change]
    steps = Steps(tmp_path / "run" / FOLDER)
    with started() as processes:
        wait_for_step(tmp_path / "run", 2 * EVERY + 1)
        make(tokens)
        assert processes.wait(0, SOON) == 1
        line = processes.output(0).splitlines()[-1]
    newest = steps.listed()[-1]
    assert f"{tokens}: {message}" in line
    assert f"the newest checkpoint is from step {newest}, in {steps.folder}" in line
    # Of the regular saves only: the end did not save what it had.
    assert newest % EVERY == 0 and all(steps.read(step) for step in steps.listed())
    assert rows(tmp_path / "run" / "events.jsonl")[-1]["why"] == "failed: DataChangedError"


def test_once_the_file_is_back_the_run_ends_as_if_nothing_had_happened(started, tokens, tmp_path):
    with started() as processes:
        wait_for_step(tmp_path / "run", EVERY + 1)
        os.truncate(tokens, 1000)
        assert processes.wait(0, SOON) == 1
        assert f"{tokens}: has 1,000 bytes" in processes.output(0).splitlines()[-1]
    last = Steps(tmp_path / "run" / FOLDER).listed()[-1] + 5
    with started(steps=last) as processes:
        assert processes.wait(0, SOON) == 2
        assert "bytes was 400000, is 1000" in processes.output(0)
    random_ids(0).tofile(tokens)
    for name in ("run", "whole"):
        with started(name=name, steps=last) as processes:
            assert processes.wait(0, SOON) == 0, processes.output(0)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_with_two_processes_no_checkpoint_comes_after_the_change(started, tokens, tmp_path):
    rules = 'rules={axes: {batch: [data]}, signals: {"layers/*": {out: [batch, null, null]}}, default: replicate}'
    with started("mesh={data: -1}", rules, "watchdog={peer_seconds: 4}", "devices.virtual_cpu=1", count=2) as processes:
        wait_for_step(tmp_path / "run", EVERY + 1)
        random_ids(1).tofile(tokens)
        assert set(processes.wait_all(SOON)) <= {1, 4, 134, -signal.SIGABRT}
        assert f"{tokens}: was written after the run opened it" in processes.output(0) + processes.output(1)
    assert all(step % EVERY == 0 for step in Steps(tmp_path / "run" / FOLDER).listed())


# -- encoding ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_a_killed_encoding_leaves_is_removed_by_the_next_start(nursery, tiny_file, tmp_path, pytestconfig):
    texts, folder = tmp_path / "texts.jsonl", tmp_path / "run" / "data"
    texts.write_text("".join(json.dumps({"text": "abcdefgh" * 4}) + "\n" for _ in range(150_000)))
    command = ["--config", str(tiny_file), f"run.dir={folder.parent}", f"data={{source: jsonl, path: {texts}, eval_tokens: 0}}"]

    def started():
        return Processes(tmp_path, [[*command, "train.steps=1"]], pytestconfig.rootpath, nursery=nursery)

    with started() as processes:
        wait_for_path(folder)
        processes.send(0, signal.SIGKILL)
        assert processes.wait(0) == -signal.SIGKILL
    (left,) = folder.glob("*.tmp")
    with started() as processes:
        assert processes.wait(0) == 0, processes.output(0)
    assert not left.exists()
    assert [path.suffix for path in folder.iterdir()] == [".bin"]
