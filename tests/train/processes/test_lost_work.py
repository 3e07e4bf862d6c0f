"""Real processes that end in any way with the default settings of checkpoints: what they have trained is not lost.

After each end the same command resumes the run, which then has the losses of an unbroken one, bit for bit.
"""

import contextlib
import itertools
import signal
import time

import pytest
from runs import Processes, flags, free_port, rows, wait_for_step

from train.checkpoint.steps import FOLDER, Steps
from train.files.ends import Exit

STEPS, BAD = 60, 20
RULES = "rules={axes: {batch: [data]}, default: replicate}"
DATA_FAILS = f"""
import pathlib
from train.setup.feed import Feed

plain, mark = Feed.train, pathlib.Path("MARK")

def batches(self, samples):
    for step, batch in enumerate(plain(self, samples), samples // 16 + 1):
        if step == {BAD} and not mark.exists():
            mark.touch()
            raise ZeroDivisionError("a bad sample")
        yield batch

Feed.train = batches
"""
EVALUATION_FAILS = f"""
import pathlib
from train.run.hooks.evaluator import Evaluator

plain, mark = Evaluator.evaluate, pathlib.Path("MARK")

def evaluate(self, state, step, metrics):
    if step == {BAD} and not mark.exists():
        mark.touch()
        raise OSError("a bad sample")
    plain(self, state, step, metrics)

Evaluator.evaluate = evaluate
"""


@pytest.fixture
def start(nursery, tiny_file, tmp_path, pytestconfig):
    """Starts the processes of a run. first: Python code that each of them runs before."""

    def _start(*overrides, name="run", folder=tmp_path, count=1, steps=STEPS, first=""):
        port, options = free_port(), ["mesh={data: -1}", RULES, f"devices.virtual_cpu={4 // count}", "data.eval_tokens=1000"]
        run = [f"run.dir={folder / name}", f"train.steps={steps}", f"train.eval_every={BAD}", *options, *overrides]
        commands = [["--config", str(tiny_file), *run, *(flags(port, count, i) if count > 1 else ())] for i in range(count)]
        code = dict.fromkeys(range(count), first.replace("MARK", str(tmp_path / "mark")))
        return Processes(tmp_path, commands, pytestconfig.rootpath, nursery=nursery, first=code)

    return _start


def losses(run):
    return {row["step"]: row["loss"] for row in rows(run / "metrics.jsonl") if row.get("loss") is not None}


def resumed(start, run, **options):
    """Resumes a run to its end, and compares it with an unbroken one."""
    saved = Steps(run / FOLDER).newest()
    with start(folder=run.parent, **options) as processes:
        codes = processes.wait_all()
        assert set(codes) == {Exit.DONE}, processes.output(0)
        assert f"Resumed from step {saved} " in processes.output(0)
    options.pop("first", None)
    with start(name="unbroken", **options) as processes:
        assert set(processes.wait_all()) == {Exit.DONE}
    assert losses(run) == losses(processes.logs[0].parent / "unbroken")


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_an_update_that_is_not_finite(start, tmp_path, count):
    with start(f"debug.faults=[{{at_step: {BAD}, kind: nan}}]", count=count) as processes:
        codes = processes.wait_all()
        assert Exit.FAILED in codes and set(codes) <= {Exit.FAILED, Exit.PEER}, processes.output(0)
        assert f"jgt: the run failed; the newest checkpoint is from step {BAD - 1}, in " in processes.output(0)
    assert Steps(tmp_path / "run" / FOLDER).listed() == [BAD - 1]
    resumed(start, tmp_path / "run", count=count)


@pytest.mark.parametrize(
    ("first", "step"), [(DATA_FAILS, BAD - 1), pytest.param(EVALUATION_FAILS, BAD, marks=pytest.mark.slow)], ids=["data", "evaluation"]
)
def test_data_or_an_evaluation_that_fails(start, tmp_path, first, step):
    with start(first=first) as processes:
        assert processes.wait(0) == Exit.FAILED
        assert f"jgt: the run failed; the newest checkpoint is from step {step}, in " in processes.output(0)
        assert "a bad sample" in processes.output(0)
    assert Steps(tmp_path / "run" / FOLDER).listed() == [step]
    resumed(start, tmp_path / "run", first=first)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal(start, tmp_path, number):
    with start() as processes:
        wait_for_step(tmp_path / "run", 5)
        processes.send(0, number)
        assert processes.wait(0) == Exit.DONE
    assert Steps(tmp_path / "run" / FOLDER).listed() == [max(losses(tmp_path / "run"))]
    resumed(start, tmp_path / "run")


@pytest.mark.slow
def test_a_disk_that_is_full_when_the_run_ends(start, tmp_path, small_disk):
    run, ballast = small_disk / "run", small_disk / "ballast"
    with start(folder=small_disk, steps=100_000) as processes:
        wait_for_step(run, 100)
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        processes.send(0, signal.SIGINT)
        deadline = time.monotonic() + 60
        while "It is the last one, and is tried again in 1 s" not in processes.output(0):
            assert time.monotonic() < deadline, processes.output(0)
            time.sleep(0.05)
        ballast.unlink()
        assert processes.wait(0) in (Exit.DONE, Exit.LOST)
        step = max(losses(run))
        assert f"Stopped at step {step} of 100000 by SIGINT; the same command resumes from there" in processes.output(0)
    assert Steps(run / FOLDER).listed() == [step]


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_run_loses_the_work_since_the_last_checkpoint_by_time(start, tmp_path, count):
    run, second = tmp_path / "run", "checkpoint.minutes=0.0167"
    with start(second, count=count, steps=100_000) as processes:
        while len(Steps(run / FOLDER).listed()) < 2:
            time.sleep(0.1)
        wait_for_step(run, Steps(run / FOLDER).newest() + 5)
        processes.send(count - 1, signal.SIGKILL)
        for process in range(count):
            processes.wait(process)
    saved = [row["time"] for row in rows(run / "events.jsonl") if row["phase"] == "save"]
    last = max(row["time"] for row in rows(run / "metrics.jsonl"))
    # A busy machine delays a save. The default of ten minutes is far above what it delays.
    assert last - saved[-1] < 30
    assert all(30 > later - earlier > 0.9 for earlier, later in itertools.pairwise(saved))
    resumed(start, run, count=count, steps=max(losses(run)) + 5)
