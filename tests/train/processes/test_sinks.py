"""Real processes that cannot write about themselves: the run goes on, ends with the same bits, and says what was lost."""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from runs import ENVIRONMENT, Nursery, rows, wait_for_step

from train.checkpoint.restore import restore
from train.checkpoint.saved import find_checkpoint
from train.checkpoint.steps import FOLDER, Steps
from train.config import load
from train.files.ends import Exit
from train.setup import prepare

STEPS = 6
EVER = 10**9
OVERRIDES = [f"train.steps={STEPS}", "train.log_every=1"]
SINKS = {"metrics.jsonl": STEPS, "events.jsonl": 9, "tensorboard/": STEPS, "fd:1": 11}
"""Where writes fail, and how many a run makes there at least."""
ERRORS = ("ENOSPC", "EIO", "EPIPE", "EFBIG")
LONG = 60
"""Seconds within which a run of a few steps has to end."""


@pytest.fixture(scope="module")
def failing_nursery(tmp_path_factory, pytestconfig):
    """A nursery whose runs can be told to fail at a write."""
    folder = tmp_path_factory.mktemp("failing")
    library = folder / "failing.so"
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler is installed")
    source = pytestconfig.rootpath / "tests" / "helpers" / "failing.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    with Nursery(folder / "compiled", pytestconfig.rootpath, {"LD_PRELOAD": str(library)}) as nursery:
        yield nursery


@pytest.fixture
def command(tiny_file, tmp_path):
    """The arguments of a short run in a folder of this name."""
    return lambda name, *more: ["--config", str(tiny_file), f"run.dir={tmp_path / name}", *OVERRIDES, *more]


@pytest.fixture(scope="module")
def unbroken(failing_nursery, tiny_file, tmp_path_factory):
    """The state at the end of an unbroken run, and the loss of each step."""
    folder = tmp_path_factory.mktemp("unbroken")
    arguments = ["--config", str(tiny_file), f"run.dir={folder / 'run'}", *OVERRIDES]
    assert failing_nursery.start(arguments, folder / "log").wait() == Exit.DONE
    return outcome(tiny_file, folder / "run")


def outcome(tiny_file, run):
    """The arrays of the last checkpoint, and the losses in metrics.jsonl, every line of which is whole."""
    setup = prepare(load(tiny_file, OVERRIDES))
    found, reports = find_checkpoint(run)
    assert reports == [] and found.manifest.step == STEPS
    state = jax.device_get(restore(found, setup.shapes, setup.shardings))
    return jax.tree.leaves(state), {row["step"]: row["loss"] for row in whole_rows(run / "metrics.jsonl")}


def whole_rows(path):
    """The rows of a .jsonl file, of which every line has to be whole."""
    text = path.read_text() if path.exists() else ""
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def assert_same(found, expected):
    """The same arrays bit for bit, and no other losses."""
    for array, other in zip(found[0], expected[0], strict=True):
        np.testing.assert_array_equal(array, other)
    assert found[1].items() <= expected[1].items()


def failing(at, first, last, error):
    """The environment of a run in which these writes fail."""
    return {"FAIL_AT": at, "FAIL_FIRST": str(first), "FAIL_LAST": str(last), "FAIL_ERRNO": str(getattr(errno, error))}


def check_failing(failing_nursery, tiny_file, unbroken, folder, arguments, at, environment):
    """Runs with failing writes, and checks its end. Returns how many records it lost at this place."""
    code, output = failing_nursery.start(arguments, folder / "log", environment).wait(LONG), (folder / "log").read_text()
    assert code == Exit.LOST, output
    assert_same(outcome(tiny_file, folder / "run"), unbroken)
    name = {"fd:1": "stdout", "tensorboard/": "tensorboard"}.get(at, at)
    assert output.count("cannot be written") == 1 and "Traceback" not in output
    assert f"jgt: {name} cannot be written: {os.strerror(int(environment['FAIL_ERRNO']))}. Training continues" in output
    return int(re.search(rf"jgt: lost: (\d+) records? of {name}$", output, re.MULTILINE)[1])


@pytest.mark.parametrize(
    ("at", "first", "last", "error"),
    [
        ("metrics.jsonl", 3, 3, "ENOSPC"),
        ("events.jsonl", 7, 8, "EFBIG"),
        ("tensorboard/", 2, 4, "EIO"),
        *(pytest.param(at, 1, EVER, error, marks=pytest.mark.slow) for at in SINKS for error in ERRORS),
    ],
)
def test_a_run_that_cannot_write_about_itself_ends_with_the_same_bits(
    at, first, last, error, failing_nursery, tiny_file, tmp_path, command, unbroken
):
    orders = failing(at, first, last, error)
    lost = check_failing(failing_nursery, tiny_file, unbroken, tmp_path, command("run"), at, orders)
    metrics, events = (whole_rows(tmp_path / "run" / f"{name}.jsonl") for name in ("metrics", "events"))
    if at == "metrics.jsonl":
        assert lost == STEPS - len(metrics) == min(last, STEPS) - first + 1
    if last == EVER:
        assert at != "events.jsonl" or events == []
        return
    assert lost == last - first + 1
    assert events[-1]["phase"] == "stop" and events[-1]["lost"] == {at.strip("/"): lost}


def test_a_run_that_can_write_nothing_at_all_ends_with_the_same_bits(failing_nursery, tiny_file, tmp_path, command, unbroken):
    assert failing_nursery.start(command("run"), tmp_path / "log", failing("records", 1, EVER, "EIO")).wait(LONG) == Exit.LOST
    assert_same(outcome(tiny_file, tmp_path / "run"), unbroken)
    assert outcome(tiny_file, tmp_path / "run")[1] == {}
    lost = (tmp_path / "log").read_text().splitlines()[-1]
    assert re.search(
        rf"jgt: lost: \d+ records of stdout, {STEPS} records of metrics.jsonl, \d+ records of events.jsonl, {STEPS} .* tensorboard$",
        lost,
    )


@pytest.mark.slow
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("at", SINKS)
def test_wherever_one_write_fails_the_bits_are_the_same(at, error, failing_nursery, tiny_file, tmp_path, command, unbroken):
    number = 0
    while True:
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        arguments, orders = command(f"{number}/run"), failing(at, number, number, error)
        if number > SINKS[at]:
            # The run may have fewer writes than this one.
            assert failing_nursery.start(arguments, folder / "log", orders).wait(LONG) in (Exit.DONE, Exit.LOST)
            if "cannot be written" not in (folder / "log").read_text():
                return
            shutil.rmtree(folder / "run")
        assert check_failing(failing_nursery, tiny_file, unbroken, folder, arguments, at, orders) == 1


def test_a_reader_that_dies_or_sleeps_stops_nobody(tmp_path, command, pytestconfig):
    variables = os.environ | ENVIRONMENT | {"PYTHONPATH": str(pytestconfig.rootpath)}
    runs = {}
    with contextlib.ExitStack() as closing:
        for name in ("dead", "asleep"):
            reading, writing = os.pipe()
            if name == "asleep":
                # A pipe without room for a table.
                os.write(writing, bytes(fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096) - 100))
                closing.callback(os.close, reading)
            arguments = [sys.executable, "-m", "train", *command(name, "sample={tokens: 4}")]
            log = closing.enter_context((tmp_path / f"{name}.log").open("w"))
            runs[name] = subprocess.Popen(arguments, cwd=tmp_path, env=variables, stdout=writing, stderr=log)
            closing.callback(runs[name].kill)
            os.close(writing)
            if name == "dead":
                os.close(reading)
        for name, run in runs.items():
            code, output = run.wait(LONG), (tmp_path / f"{name}.log").read_text()
            assert code == Exit.LOST, output
            assert "jgt: stdout cannot be written: " in output and "Traceback" not in output
            assert [row["step"] for row in whole_rows(tmp_path / name / "metrics.jsonl")] == list(range(1, STEPS + 1))
            assert Steps(tmp_path / name / FOLDER).listed() == [STEPS]


def test_a_disk_without_a_byte_stops_nobody_and_is_written_again_when_there_is_room(nursery, tiny_file, tmp_path, small_disk):
    run, ballast, steps = small_disk / "run", small_disk / "ballast", 4000
    overrides = [f"run.dir={run}", f"train.steps={steps}", "train.log_every=1", "checkpoint.every=100000"]
    child = nursery.start(["--config", str(tiny_file), *overrides], tmp_path / "log")
    wait_for_step(run, 3)
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    deadline = time.monotonic() + LONG
    while "cannot be written" not in (tmp_path / "log").read_text():
        assert child.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.05)
    time.sleep(0.5)
    ballast.unlink()
    before = whole_or_open_rows(run)
    while whole_or_open_rows(run) < before + 5:
        assert child.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    assert child.wait(LONG) == Exit.LOST, (tmp_path / "log").read_text()
    found = [row["step"] for row in whole_rows(run / "metrics.jsonl")]
    (step,) = Steps(run / FOLDER).listed()
    assert found[-1] == step and len(set(found)) == len(found) < step
    lost = re.search(r"^jgt: lost: .*?(\d+) records? of metrics.jsonl", (tmp_path / "log").read_text(), re.MULTILINE)
    assert step - len(found) == int(lost[1])
    assert whole_rows(run / "events.jsonl")[-1]["phase"] == "stop"


def whole_or_open_rows(run):
    return len(rows(run / "metrics.jsonl"))
