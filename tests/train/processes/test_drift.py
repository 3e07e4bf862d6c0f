"""Two groups of `sync: {every: H}`, one process each: what happens to one of them does not hold up the other inside a phase.

The inner program has no collective over the axis, and nothing else between two exchanges may wait for another process either: metrics, the
guard, records, the input. So a process whose peer is suspended comes to the end of the phase, and not one step further. A process that is
killed takes the other one along, but the launcher continues with one group from the last exchange, and later with both.
"""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from runs import SECONDS, Processes, flags, free_port, rows, wait_for_step

from train.checkpoint.saved import find_checkpoint
from train.checkpoint.steps import FOLDER, Steps
from train.files.ends import Exit

RULES = f"rules={Path(__file__).parents[3] / 'configs' / 'rules' / 'hybrid.yaml'}"
EVERY = 150
AT, LAST = EVERY + 10, 2 * EVERY - 1
"""In the second phase, which both begin together: a process is suspended after the first of these steps. The other must come to LAST."""


def mark(step):
    """A fault that does nothing in a run without checkpoints, except that the process logs the time at which it reaches this step."""
    return f"{{at_step: {step}, kind: corrupt, process: 1}}"


@pytest.fixture
def command(tiny_file, tmp_path):
    """The arguments of a run of groups with one device each."""

    def _command(*overrides):
        constant = ["mesh={replica: -1, fsdp: 1}", RULES, "devices.virtual_cpu=1", "train.log_every=1", f"run.dir={tmp_path / 'run'}"]
        return ["--config", str(tiny_file), *constant, *overrides]

    return _command


def times(run):
    """When the first process finished each step."""
    return {row["step"]: row["time"] for row in rows(run / "metrics.jsonl") if "loss" in row}


def marks(run):
    """When the second process came to the steps with a mark."""
    return {row["step"]: row["time"] for row in rows(run / "events-1.jsonl") if row["phase"] == "fault"}


def saved_steps(run):
    return Steps(run / FOLDER).listed()


def pid(run, process):
    """The number that the system gave to a process of the run."""
    return next(row["pid"] for row in rows(run / f"events-{process}.jsonl") if row["phase"] == "start")


def wait(reached):
    deadline = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("suspended", [1, 0])
def test_a_suspended_process_holds_up_the_other_one_only_at_the_exchange(suspended, command, nursery, tmp_path, pytestconfig):
    run, port = tmp_path / "run", free_port()
    faults = ", ".join(map(mark, (AT, LAST, LAST + 5)))
    arguments = command(f"sync={{axis: replica, every: {EVERY}}}", f"train.steps={LAST + 6}", f"debug.faults=[{faults}]")
    both = [[*arguments, *flags(port, 2, i)] for i in range(2)]
    with Processes(tmp_path, both, pytestconfig.rootpath, nursery=nursery) as processes:
        wait(lambda: AT in marks(run) and AT in times(run))
        processes.send(suspended, signal.SIGSTOP)
        # The other one comes to the end of the phase by itself, and no further.
        reached = [times, marks] if suspended == 1 else [marks, times]
        wait(lambda: LAST in reached[0](run))
        time.sleep(0.5)
        assert max(reached[1](run)) < LAST and max(reached[0](run)) <= LAST + 1
        processes.send(suspended, signal.SIGCONT)
        assert processes.wait_all() == [Exit.DONE, Exit.DONE]


@pytest.mark.slow
def test_when_a_group_is_lost_the_other_continues_from_the_last_exchange(command, tmp_path, pytestconfig):
    run = tmp_path / "run"
    launch = ["-m", "train.launch", "--processes", "2", "--min-processes", "1", "--grace", "3", "--"]
    # The second fault ends the group that continues alone, and the next start has both again.
    faults = "debug.faults=[{at_step: 9, kind: kill, process: 1}, {at_step: 14, kind: raise, process: 0}]"
    sync = "sync={axis: replica, every: 4, outer: {lr: 0.9, momentum: 0.5}}"
    more = [*command(faults, sync, "checkpoint.every=4", "train.steps=18"), "watchdog.peer_seconds=4"]
    with Processes(tmp_path, [[*launch, *more]], pytestconfig.rootpath) as processes:
        assert processes.wait(0) == Exit.DONE, processes.output(0)
        output = processes.output(0)
    starts = [row["processes"] for row in rows(run / "events.jsonl") if row["phase"] == "start"]
    assert starts == [2, 1, 2], output
    # A save that the kill has cut short does not count.
    assert [int(step) % 4 for step in re.findall(r"Resumed from step (\d+)", output)] == [0, 0]
    assert "Sync: one replica along replica, since the launcher has lost the others. It continues alone" in output
    assert sorted(times(run)) == list(range(1, 19))


@pytest.mark.slow
def test_a_checkpoint_inside_a_phase_of_the_lost_group_is_set_aside(command, tmp_path, pytestconfig):
    run = tmp_path / "run"
    launch = ["-m", "train.launch", "--processes", "2", "--min-processes", "1", "--grace", "3", "--"]
    more = [*command("sync={axis: replica, every: 200}", "checkpoint.every=200", "train.steps=600"), "watchdog.peer_seconds=4"]
    with Processes(tmp_path, [[*launch, *more]], pytestconfig.rootpath) as processes:
        wait_for_step(run, 210)
        processes.send(0, signal.SIGUSR1)
        wait(lambda: any(200 < step < 400 for step in saved_steps(run)))
        os.kill(pid(run, 1), signal.SIGKILL)
        assert processes.wait(0) == Exit.DONE, processes.output(0)
        output = processes.output(0)
    assert "is in the middle of a phase, " in output
    assert "with 2 replicas, but there are 1 now; it is not used, and was renamed to " in output
    assert "Resumed from step 200" in output
    assert find_checkpoint(run)[0].manifest.step == 600
