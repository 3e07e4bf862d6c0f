"""Real processes whose surroundings change or are odd: signals, the run directory, the working directory, the environment."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import ENVIRONMENT, Processes, flags, free_port, rows, wait_for_step

from train.checkpoint.steps import FOLDER, Steps
from train.files.ends import Exit

SOON = 60
MANY = 100_000
OVERRIDES = [f"train.steps={MANY}", "train.log_every=1", "checkpoint.every=1000000"]


@pytest.fixture
def child(nursery, tiny_file, tmp_path):
    """A long run alone, which has logged a few steps. Ended with the test."""
    child = nursery.start(["--config", str(tiny_file), f"run.dir={tmp_path / 'run'}", *OVERRIDES], tmp_path / "log")
    wait_for_step(tmp_path / "run", 3)
    yield child
    child.send_signal(signal.SIGKILL)
    child.wait()


# -- signals -----------------------------------------------------------------------------------------------------


def test_a_hangup_saves_and_stops(child, tmp_path):
    child.send_signal(signal.SIGHUP)
    assert child.wait(SOON) == Exit.DONE
    (step,) = Steps(tmp_path / "run" / FOLDER).listed()
    assert f"Stopped at step {step} of {MANY} by SIGHUP" in (tmp_path / "log").read_text()


def test_a_request_to_save_is_answered_each_time_and_training_goes_on(child, tmp_path):
    for count in (1, 2):
        child.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + SOON
        while len(listed := Steps(tmp_path / "run" / FOLDER).listed()) < count:
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        wait_for_step(tmp_path / "run", listed[-1] + 3)
    child.send_signal(signal.SIGTERM)
    assert child.wait(SOON) == Exit.DONE


def test_a_request_to_save_to_one_of_two_saves_the_same_step_on_both(nursery, tiny_file, tmp_path, pytestconfig):
    port, run = free_port(), tmp_path / "run"
    rules = 'rules={axes: {batch: [data]}, signals: {"layers/*": {out: [batch, null, null]}}, default: replicate}'
    arguments = ["--config", str(tiny_file), f"run.dir={run}", *OVERRIDES, "mesh={data: -1}", rules, "devices.virtual_cpu=2"]
    with Processes(tmp_path, [[*arguments, *flags(port, 2, i)] for i in range(2)], pytestconfig.rootpath, nursery=nursery) as processes:
        wait_for_step(run, 3)
        for process in (1, 0):
            before = Steps(run / FOLDER).listed()
            processes.send(process, signal.SIGUSR1)
            deadline = time.monotonic() + SOON
            while (listed := Steps(run / FOLDER).listed()) == before:
                assert time.monotonic() < deadline, processes.output(0)
                time.sleep(0.05)
            wait_for_step(run, listed[-1] + 2)
        processes.send(0, signal.SIGTERM)
        assert processes.wait_all(SOON) == [Exit.DONE, Exit.DONE]
    # A run that ends while its last save is being written has a second row of it, for the wait.
    saves = [
        [*dict.fromkeys(row["step"] for row in rows(run / name) if row["phase"] == "save")] for name in ("events.jsonl", "events-1.jsonl")
    ]
    assert saves[0] == saves[1] == Steps(run / FOLDER).listed() and len(saves[0]) == 3


def test_the_launcher_passes_both_on(nursery, tiny_file, tmp_path, pytestconfig):
    run, variables = tmp_path / "run", os.environ | ENVIRONMENT | {"PYTHONPATH": str(pytestconfig.rootpath)}
    arguments = ["--config", str(tiny_file), f"run.dir={run}", *OVERRIDES]
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-m", "train.launch", "--processes", "1", "--", *arguments]
        launcher = subprocess.Popen(command, env=variables, cwd=tmp_path, stdout=log, stderr=log)
    try:
        wait_for_step(run, 3)
        launcher.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + SOON
        while not (listed := Steps(run / FOLDER).listed()):
            assert launcher.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        wait_for_step(run, listed[0] + 2)
        launcher.send_signal(signal.SIGHUP)
        assert launcher.wait(SOON) == Exit.DONE
    finally:
        launcher.kill()
    assert len(Steps(run / FOLDER).listed()) == 2


# -- the run directory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", ["lock replaced", "folder renamed", *(pytest.param(how, marks=pytest.mark.slow) for how in ("lock removed", "folder removed"))]
)
def test_a_run_that_has_lost_its_directory_stops_and_writes_nothing_more(how, child, tmp_path):
    run = tmp_path / "run"
    if how == "folder renamed":
        run.rename(tmp_path / "other")
    elif how == "folder removed":
        run.rename(tmp_path / "other")
        shutil.rmtree(tmp_path / "other")
    else:
        (run / "lock").unlink()
        if how == "lock replaced":
            (run / "lock").touch()
    assert child.wait(SOON) == Exit.FAILED
    output = (tmp_path / "log").read_text()
    assert f"jgt: {run / 'lock'} was removed or replaced while this run was using it" in output
    assert "Traceback" not in output
    assert not list(tmp_path.rglob("checkpoints/*"))
    assert all(row["phase"] != "stop" for row in rows(run / "events.jsonl"))


@pytest.mark.slow
def test_a_second_run_may_enter_where_the_lock_was_removed(child, nursery, tiny_file, tmp_path):
    (tmp_path / "run" / "lock").unlink()
    assert child.wait(SOON) == Exit.FAILED
    second = ["--config", str(tiny_file), f"run.dir={tmp_path / 'run'}", "train.steps=3"]
    assert nursery.start(second, tmp_path / "second").wait(SOON) == Exit.DONE


# -- the environment ---------------------------------------------------------------------------------------------


@pytest.fixture
def start(tiny_file, tmp_path, pytestconfig):
    """Starts a process from the beginning, with variables and overrides. Its stderr is a pipe."""
    started = []

    def _start(*overrides, environment=None, cwd=tmp_path, before="true"):
        variables = os.environ | ENVIRONMENT | {"PYTHONPATH": str(pytestconfig.rootpath)} | (environment or {})
        # A shell first runs `before`.
        command = ["sh", "-c", f'{before}; exec "$@"', "sh", sys.executable, "-m", "train", "--config", str(tiny_file)]
        command += [f"run.dir={tmp_path / 'run'}", *overrides]
        started.append(subprocess.Popen(command, env=variables, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield _start
    for process in started:
        process.kill()
        process.communicate()


def test_odd_surroundings_are_one_line(start, tmp_path):
    unknown = start(environment={"JAX_PLATFORMS": "quantum"})
    gone = tmp_path / "gone"
    gone.mkdir()
    homeless = start(cwd=gone, before=f"rmdir '{gone}'")
    assert homeless.communicate(timeout=SOON) == ("", "environment: the working directory is gone. Change to a folder that exists\n")
    assert homeless.returncode == Exit.INPUT
    _, said = unknown.communicate(timeout=SOON)
    assert said.startswith("environment: JAX_PLATFORMS: Unable to initialize backend 'quantum'") and said.count("\n") == 1
    assert unknown.returncode == Exit.INPUT


@pytest.mark.slow
def test_a_sample_is_printed_on_any_terminal(start, tmp_path):
    run = start("train.steps=2", "sample={tokens: 8, prompt: '\u00e9\u4e2d'}", environment={"PYTHONIOENCODING": "ascii"})
    output, said = run.communicate(timeout=SOON)
    assert (run.returncode, said) == (Exit.DONE, "")
    assert "\\xe9\\u4e2d" in output
    assert "\u00e9\u4e2d" in (tmp_path / "run" / "sample.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_imports_is_answered_in_a_line(number, start):
    run = start("--stopped-code", "75")
    deadline = time.monotonic() + SOON
    while "libjax" not in Path(f"/proc/{run.pid}/maps").read_text():
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    run.send_signal(number)
    output, said = run.communicate(timeout=SOON)
    assert (run.returncode, output, said) == (75, "", f"jgt: {number.name}: there is nothing to save\n")
