"""Real processes that are asked to stop, die, hang or fail: the reaction of the others, and the resumed run."""

import signal
import time

import pytest
from runs import Processes, flags, free_port, rows, wait_for_path, wait_for_step

from train.checkpoint.steps import FOLDER, Steps
from train.config import load
from train.files.ends import Exit
from train.processes.config import WatchdogConfig
from train.processes.watch import Watch
from train.run.train import train

SOON = 60
"""Seconds in which all have to be gone."""
WATCHDOG = "watchdog={peer_seconds: 4, step_seconds: 5}"
RULES = 'rules={axes: {batch: [data]}, signals: {"layers/*": {out: [batch, null, null]}}, default: replicate}'
MANY = 100_000


@pytest.fixture
def command(tiny_file, tmp_path):
    """The arguments of a run of two processes with two devices each."""

    def _command(*overrides, steps=MANY):
        constant = ["mesh={data: -1}", RULES, "devices.virtual_cpu=2", WATCHDOG, f"train.steps={steps}", f"run.dir={tmp_path / 'run'}"]
        return ["--config", str(tiny_file), *constant, *overrides]

    return _command


@pytest.fixture
def two(command, nursery, tmp_path, pytestconfig):
    """Starts both processes of a run."""

    def _two(*overrides, **options):
        port = free_port()
        both = [[*command(*overrides, **options), *flags(port, 2, i)] for i in range(2)]
        return Processes(tmp_path, both, pytestconfig.rootpath, nursery=nursery)

    return _two


def losses(path):
    return {row["step"]: row["loss"] for row in rows(path / "metrics.jsonl") if "loss" in row}


def events(path, phase, process=0):
    return [row for row in rows(path / ("events.jsonl" if process == 0 else f"events-{process}.jsonl")) if row["phase"] == phase]


LATE = """
import time
from train.run import opened
from train.setup.setup import Setup

def late(function):
    return lambda *args, **options: (time.sleep(33), function(*args, **options))[1]

opened.open_data, Setup.compile_train_step = late(opened.open_data), late(Setup.compile_train_step)
"""


@pytest.mark.slow
def test_a_process_may_open_and_compile_later_than_gloo_waits(command, nursery, tmp_path, pytestconfig):
    port = free_port()
    both = [[*command(steps=2), *flags(port, 2, i)] for i in range(2)]
    with Processes(tmp_path, both, pytestconfig.rootpath, nursery=nursery, first={1: LATE}) as processes:
        assert processes.wait_all() == [Exit.DONE, Exit.DONE]


@pytest.mark.slow
def test_both_of_two_load_what_they_compiled_before(two, tmp_path):
    stored = []
    for steps in (2, 4):
        with two(f"xla.cache={tmp_path / 'cache'}", steps=steps) as processes:
            assert processes.wait_all() == [Exit.DONE, Exit.DONE]
        stored.append(sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "cache").glob("jit_train_step-*")))
    assert len(stored[0]) == 2 and stored[1] == stored[0]
    assert [event["seconds"] < 2 for event in events(tmp_path / "run", "compile", 1)][-1]


# -- stopping ----------------------------------------------------------------------------------------------------


def test_a_signal_to_one_of_two_stops_both_at_a_step_that_both_save(two, tmp_path):
    with two("checkpoint.every=1000000", "--stopped-code", "75") as processes:
        wait_for_step(tmp_path / "run", 4)
        processes.send(1, signal.SIGTERM)
        assert processes.wait_all(SOON) == [75, 75]
        (step,) = Steps(tmp_path / "run" / FOLDER).listed()
        assert f"Stopped at step {step} of {MANY} by a signal to another process; the same command resumes from there" in processes.output(
            0
        )
        assert "jgt: SIGTERM: the steps under way are finished and saved" in processes.output(1)
    stops = [events(tmp_path / "run", "stop", process)[-1] for process in (0, 1)]
    assert [(stop["step"], stop["why"]) for stop in stops] == [(step, "peer"), (step, "SIGTERM")]
    assert max(losses(tmp_path / "run")) == step
    with two("--stopped-code", "75", steps=step + 3) as processes:
        assert processes.wait_all() == [Exit.DONE, Exit.DONE]
        assert f"Resumed from step {step}" in processes.output(0)
    assert max(losses(tmp_path / "run")) == step + 3


def test_ctrl_c_stops_a_run_alone_and_a_second_one_at_once(nursery, tiny_file, tmp_path, pytestconfig):
    alone = [["--config", str(tiny_file), f"train.steps={MANY}", f"run.dir={tmp_path / 'run'}"]]
    with Processes(tmp_path, alone, pytestconfig.rootpath, nursery=nursery) as processes:
        wait_for_step(tmp_path / "run", 3)
        processes.send(0, signal.SIGINT)
        assert processes.wait(0, SOON) == Exit.DONE
        (step,) = Steps(tmp_path / "run" / FOLDER).listed()
        assert f"Stopped at step {step} of {MANY} by SIGINT" in processes.output(0)
    faults = [[*alone[0], f"debug.faults=[{{at_step: {step + 5}, kind: hang}}]"]]
    with Processes(tmp_path, faults, pytestconfig.rootpath, nursery=nursery) as processes:
        wait_for_path(tmp_path / "run" / "faults" / "0")
        for _ in range(2):
            processes.send(0, signal.SIGTERM)
            time.sleep(1)
        assert processes.wait(0, 10) == 128 + signal.SIGTERM
        assert "jgt: second signal (SIGTERM): stopping at once" in processes.output(0)


def test_a_run_stopped_before_its_first_step_ends_with_the_code_asked_for(tmp_path, monkeypatch, capsys):
    codes = []
    monkeypatch.setattr("train.processes.watch.os._exit", codes.append)
    for code in ({}, {"stopped_code": 75}):
        watch = Watch(WatchdogConfig(), tmp_path, None, **code)
        watch._handle_signal(signal.SIGTERM)
        watch._check_limits(time.monotonic())
    assert codes == [Exit.DONE, 75]
    assert "before the first step: there is nothing to save" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_replay_a_step(two, tmp_path):
    for options in ((), ("--replay", "3")):
        with two("checkpoint.every=2", *options, steps=4) as processes:
            assert processes.wait_all() == [Exit.DONE, Exit.DONE]
    assert "none: step 3 came out as it was logged, bit for bit" in processes.output(0)


# -- one of two is gone ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_process_ends_the_other(two, tmp_path):
    with two() as processes:
        wait_for_step(tmp_path / "run", 3)
        processes.send(1, signal.SIGKILL)
        assert processes.wait(0, SOON) == Exit.PEER
        assert "jgt: process 0 stops, because process 1 has been silent for 4 s" in processes.output(0)
    stacks = (tmp_path / "run" / "stacks-0.txt").read_text()
    assert "process 1 has been silent for 4 s" in stacks and "(most recent call first)" in stacks


def test_the_first_process_killed_ends_the_other(two, tmp_path):
    with two() as processes:
        wait_for_step(tmp_path / "run", 3)
        processes.send(0, signal.SIGKILL)
        # JAX's coordination service was in it: its client aborts, unless the watch is quicker.
        assert processes.wait(1, SOON) in (-signal.SIGABRT, Exit.PEER)
        assert "most recent call first" in processes.output(1)


def test_a_stopped_process_ends_the_other_and_itself_when_it_goes_on(two, tmp_path):
    with two() as processes:
        wait_for_step(tmp_path / "run", 3)
        processes.send(1, signal.SIGSTOP)
        assert processes.wait(0, SOON) in (Exit.PEER, Exit.HUNG)
        processes.send(1, signal.SIGCONT)
        assert processes.wait(1, SOON) in (-signal.SIGABRT, Exit.PEER, Exit.HUNG)
        assert "in _steps" in (tmp_path / "run" / "stacks-0.txt").read_text()


def test_a_failing_process_ends_the_other(two, tmp_path):
    with two("debug.faults=[{at_step: 4, kind: raise, process: 1}]") as processes:
        assert processes.wait_all(SOON) == [Exit.PEER, Exit.FAILED]
        assert "process 1 failed: InjectedError: debug.faults: raise at step 4" in processes.output(0)
        assert "train.run.faults.InjectedError" in processes.output(1)
    assert "in _steps" in (tmp_path / "run" / "stacks-0.txt").read_text()


def test_a_hanging_process_ends_the_other(two, tmp_path):
    with two("debug.faults=[{at_step: 8, kind: hang, process: 1}]") as processes:
        codes = processes.wait_all(SOON)
        assert Exit.HUNG in codes and set(codes) <= {Exit.HUNG, Exit.PEER}
        assert any("hangs: step 8 has taken more than" in processes.output(i) for i in range(2))
    assert any("in _cause" in path.read_text() for path in (tmp_path / "run").glob("stacks-*.txt"))


# -- the launcher ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["kill", pytest.param("hang", marks=pytest.mark.slow), pytest.param("raise", marks=pytest.mark.slow)])
def test_a_launched_run_goes_on_by_itself(fault, command, tiny_file, tmp_path, pytestconfig):
    faults = f"debug.faults=[{{at_step: 5, kind: {fault}, process: 1}}]"
    launch = ["-m", "train.launch", "--processes", "2", "--grace", "3", "--", *command(faults, "checkpoint.every=2", steps=8)]
    with Processes(tmp_path, [launch], pytestconfig.rootpath) as processes:
        assert processes.wait(0) == Exit.DONE
        assert "restarting on 2 processes in 1 s (restart 1 of at most 3 without a newer checkpoint)" in processes.output(0)
        assert "Resumed from step " in processes.output(0)
    starts = events(tmp_path / "run", "start")
    assert [start["processes"] for start in starts] == [2, 2]
    straight = load(tiny_file, [f"run.dir={tmp_path / 'straight'}", "mesh={data: 8}", RULES, "train.steps=8"])
    train(straight)
    expected = losses(tmp_path / "straight")
    assert losses(tmp_path / "run") == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_a_launched_run_goes_on_with_fewer_processes(command, tmp_path, pytestconfig):
    faults = "debug.faults=[{at_step: 5, kind: kill, process: 1}]"
    launch = ["-m", "train.launch", "--processes", "2", "--min-processes", "1", "--grace", "3", "--"]
    with Processes(tmp_path, [[*launch, *command(faults, "checkpoint.every=2", steps=8)]], pytestconfig.rootpath) as processes:
        assert processes.wait(0) == Exit.DONE
    assert [(start["processes"], start["devices"]) for start in events(tmp_path / "run", "start")] == [(2, 4), (1, 2)]
    assert max(losses(tmp_path / "run")) == 8
