"""Errors of the disk while a run looks for its checkpoint: nothing is set aside, no log is cut, and no run begins at step 0."""

import errno
import os
import random
import shutil
import signal
import time

import pytest
from disk import variables
from runs import Processes, flags, free_port, rows

from train.files.ends import Exit

# Each test shares processes that take long to start.
pytestmark = pytest.mark.slow

STEPS = 4
READS = 220
"""More reads than a start has."""
SOON = 40
RULES = 'rules={axes: {batch: [data]}, signals: {"layers/*": {out: [batch, null, null]}}, default: replicate}'


@pytest.fixture(scope="module")
def finished(nursery, tiny_file, tmp_path_factory):
    """The folder of a finished run with two checkpoints."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    arguments = ["--config", str(tiny_file), f"run.dir={folder}", f"train.steps={STEPS}", "checkpoint={every: 2, keep: 2}"]
    assert nursery.start(arguments, folder.with_suffix(".log")).wait() == 0
    return folder


@pytest.fixture
def again(disk_nursery, tiny_file, finished, tmp_path):
    """Starts a copy of the finished run again, with a disk. Returns its exit code and its output, after a check that all is there."""

    def _again(*options, **disk):
        folder = tmp_path / "run"
        shutil.copytree(finished, folder, dirs_exist_ok=True)
        log = (folder / "metrics.jsonl").read_bytes()
        arguments = ["--config", str(tiny_file), f"run.dir={folder}", f"train.steps={STEPS}", "checkpoint={every: 2, keep: 2}", *options]
        code = disk_nursery.start(arguments, tmp_path / "log", variables(**disk)).wait()
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["2", "4"]
        assert (folder / "metrics.jsonl").read_bytes() == log
        assert [row["loss"] for row in rows(folder / "metrics.jsonl") if row["step"] == STEPS] != []
        return code, (tmp_path / "log").read_text()

    return _again


def numbers():
    """All numbers of reads; two of them are not slow tests."""
    always = random.Random(1).sample(range(1, 60), 2)
    return [pytest.param(number, marks=() if number in always else pytest.mark.slow) for number in range(1, READS + 1)]


@pytest.mark.parametrize("number", numbers())
def test_a_read_that_fails_once_is_repeated(again, tmp_path, number):
    (tmp_path / "count").touch()
    code, output = again(fail=number, error=errno.EIO, count=tmp_path / "count")
    assert code == Exit.DONE, output
    assert f"Already at step {STEPS} of {STEPS}" in output
    assert "Traceback" not in output, output
    happened = (tmp_path / "count").stat().st_size >= number
    assert ("Input/output error. Trying again in 0.5 s" in output) == happened, output


def test_the_numbers_cover_all_reads_of_a_start(again, tmp_path):
    assert again(fail=0, count=tmp_path / "count")[0] == Exit.DONE
    assert 20 < (tmp_path / "count").stat().st_size < READS


@pytest.mark.parametrize(
    ("number", "error"),
    [(10, errno.EIO), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, errno.EIO), (3, errno.EACCES), (60, errno.ESTALE)))],
)
def test_a_disk_that_is_away_ends_the_start(again, number, error):
    code, output = again(fail=-number, error=error)
    assert code == Exit.FAILED, output
    *_, last = output.splitlines()
    assert last.startswith("jgt: /") and f"{os.strerror(error)}. No checkpoint was changed" in last
    assert "Traceback" not in output and "Trying again in 2 s" in output


@pytest.mark.slow
def test_a_process_whose_disk_is_away_ends_both(disk_nursery, finished, tiny_file, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    port, children = free_port(), []
    for process in range(2):
        arguments = ["--config", str(tiny_file), f"run.dir={tmp_path / 'run'}", "train.steps=6", "mesh={data: 2}", RULES]
        disk = variables(fail=-20, error=errno.EIO) if process == 1 else {}
        children.append(disk_nursery.start([*arguments, *flags(port, 2, process)], tmp_path / f"{process}.log", disk))
    assert [child.wait() for child in children] == [Exit.FAILED] * 2
    assert "another process cannot read its part of" in (tmp_path / "0.log").read_text()
    assert "Input/output error. No checkpoint was changed" in (tmp_path / "1.log").read_text()
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["2", "4"]


@pytest.mark.slow
def test_a_process_whose_save_failed_early_ends_when_it_is_asked_to(tiny_file, disk_library, tmp_path, pytestconfig):
    """Orbax's threads wait ten minutes for the folder that could not be made."""
    (tmp_path / "refuse").touch()
    disk = variables(refuse=tmp_path / "refuse", error=errno.EACCES) | {"LD_PRELOAD": str(disk_library)}
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    command = ["-m", "train", "--config", str(tiny_file), f"run.dir={tmp_path / 'run'}", "train.steps=1000000", "checkpoint.every=5"]
    with Processes(tmp_path, [command], pytestconfig.rootpath, environment=disk) as processes:
        deadline = time.monotonic() + 90
        while "a checkpoint could not be saved" not in processes.output(0):
            assert time.monotonic() < deadline, processes.output(0)
            time.sleep(0.1)
        (tmp_path / "refuse").unlink()
        processes.send(0, signal.SIGTERM)
        assert processes.wait(0, SOON) == Exit.DONE
        assert "the same command resumes from there" in processes.output(0)
    assert [path for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdecimal()]
