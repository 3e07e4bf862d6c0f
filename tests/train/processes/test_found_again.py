"""Real processes killed at chosen and at random moments: what a start finds again is its own, and the end is that of an unbroken run.

Compared are all rows of metrics.jsonl, the best step and the checkpoints that are kept, and every exported model, bit for bit. A run kills
itself at a chosen place: between the save of a step and its evaluation, in and after the evaluation, before an export is stamped and after
it, and when the reference of preferences is written.
"""

import itertools
import json
import random
import signal
import time
from dataclasses import dataclass, field

import pytest
from runs import rows

from train.checkpoint.steps import Steps

pytestmark = pytest.mark.slow
STEPS = 12
CODE = """
def nothing(now):
    pass


def number(now):
    return {"seen": now.metrics["loss"]}


def distance(now):
    # The best step is the sixth one.
    return {"distance": float(abs(now.step - 6))}
"""
HOOKS = (
    "hooks={a: {call: hk:nothing, at: [start]}, b: {call: hk:number, every: 3}, "
    "c: {call: hk:distance, at: [eval]}, d: {call: hk:nothing, at: [save, end]}}"
)
COMMON = [
    *("checkpoint.every=2", "checkpoint.keep=2", "train.eval_every=2", "train.log_every=1"),
    *("train.batch=4", "sample.tokens=0", "log=[]"),
]
TIMES = {"time", "step_time_s", "tokens_per_s", "samples_per_s", "mfu"}
AT_STEP = """
import os, signal, time
from pathlib import Path
from train.run.hooks.evaluator import Evaluator
from train.run.loop import Loop

plain = {method}

def killed(self, *arguments, **named):
    found = plain(self, *arguments, **named) if {after} else None
    if {at} == {step}:
        while {waits} and not Path({run!r}, "checkpoints", "{step}").exists():
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGKILL)
    return found if {after} else plain(self, *arguments, **named)

{method} = killed
"""
IN_EXPORT = """
import os, signal
from train.export import exports

plain = exports.{function}

def killed(*arguments, **named):
    found = plain(*arguments, **named) if {after} else None
    os.kill(os.getpid(), signal.SIGKILL)
    return found

exports.{function} = killed
"""
IN_REFERENCE = """
import os, signal
from train.evaluate import reference

plain = reference.write_whole

def killed(*arguments):
    plain(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)

reference.write_whole = killed
"""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What runs differ in. options: for the command. last: the step at which it ends. weights: whether it begins from another run."""

    options: list = field(default_factory=list)
    last: int = STEPS
    weights: bool = False


KINDS = {
    "best": Kind(options=["checkpoint.best=distance", f"train.steps={STEPS}", HOOKS, "data.eval_tokens=8000"]),
    "plain": Kind(options=[f"train.steps={STEPS}", "data.eval_tokens=8000"]),
    "stop": Kind(options=["train.stop_early={by: distance, patience: 3}", "train.steps=40", HOOKS, "data.eval_tokens=8000"]),
    "dpo": Kind(
        options=[
            *("checkpoint.best=-eval_loss", f"train.steps={STEPS}", "train.loss=dpo", "model.seq=64"),
            "data={source: preferences, path: PAIRS, eval_tokens: 400}",
        ],
        weights=True,
    ),
}


def at_step(method, *, waits=True, after=False):
    """The code of a kill at a step: by a method of the loop or of the evaluator, when the step is saved, or while it is saved."""
    at = "self.position.step" if method.startswith("Loop.") else "arguments[0]"
    return AT_STEP.replace("{method}", method).replace("{waits}", str(waits)).replace("{after}", str(after)).replace("{at}", at)


CHOSEN = {
    "saved": at_step("Loop._evaluate_if_due"),
    "evaluating": at_step("Evaluator.log"),
    "evaluated": at_step("Evaluator.log", after=True),
    "saving": at_step("Loop._evaluate_if_due", waits=False),
    "stamp": IN_EXPORT.format(function="write_stamp", after=False),
    "exported": IN_EXPORT.format(function="write_export", after=True),
    "reference": IN_REFERENCE,
}
"""The places in a start at which it kills itself."""


def cases():
    """The kills of each test: (place, step), or (None, seconds) for a random moment."""
    chance = random.Random(0)
    for name in ("best", "plain", "stop"):
        yield name, [("saved", 4), ("saved", 6), ("evaluating", 8), ("saved", STEPS)]
        yield name, [("exported", 0), ("evaluated", 6), ("stamp", 0), ("evaluating", STEPS)]
        yield name, [("saving", 2), *((None, chance.uniform(1, 6)) for _ in range(4)), ("saved", 10)]
    yield "dpo", [("reference", 0), ("saved", 2), ("stamp", 0), ("saved", STEPS)]
    yield "dpo", [("evaluating", 4), *((None, chance.uniform(1, 6)) for _ in range(4)), ("exported", 0)]
    yield "best", [(None, chance.uniform(1, 6)) for _ in range(8)]


class Runs:
    """The unbroken runs, and all that a killed one needs to be started with the same command."""

    def __init__(self, nursery, tiny_file, folder):
        self._nursery, self._file, self._folder, self._straight = nursery, tiny_file, folder, set()
        (folder / "hk.py").write_text(CODE)
        pairs = ({"prompt": f"{i} + 1 = ", "chosen": str(i + 1), "rejected": str(i)} for i in range(60))
        (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))

    def start(self, folder, name, first=""):
        """A process of a run in a folder. first: Python code that it runs before."""
        options = [option.replace("PAIRS", str(self._folder / "pairs.jsonl")) for option in KINDS[name].options]
        export = f"checkpoint.export={{every: 4, path: {folder}-exports}}"
        weights = [f"checkpoint.weights={self._base()}"] if KINDS[name].weights else []
        code = ["--code", str(self._folder / "hk.py")] if HOOKS in options else []
        arguments = ["--config", str(self._file), f"run.dir={folder}", *COMMON, export, *options, *weights, *code]
        return self._nursery.start(arguments, folder.with_suffix(".log"), first=first)

    def _base(self):
        folder = self._folder / "base"
        if not folder.exists():
            arguments = ["--config", str(self._file), f"run.dir={folder}", "model.seq=64", "train.steps=2", "log=[]"]
            assert self._nursery.start(arguments, folder.with_suffix(".log")).wait() == 0
        return folder

    def straight(self, name):
        """The folder of the unbroken run."""
        folder = self._folder / f"straight-{name}"
        if name not in self._straight:
            assert self.start(folder, name).wait() == 0, folder.with_suffix(".log").read_text()
            self._straight.add(name)
        return folder


@pytest.fixture(scope="module")
def runs(nursery, tiny_file, tmp_path_factory):
    return Runs(nursery, tiny_file, tmp_path_factory.mktemp("runs"))


def logged(folder):
    """All rows, without what differs from one run to the next."""
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows(folder / "metrics.jsonl")]


def exported(folder):
    """The contents of all files of all exports but their stamps, which name the run."""
    exports = folder.with_name(f"{folder.name}-exports")
    files = (path for path in exports.rglob("*") if path.is_file() and path.name != "export.json")
    return {str(path.relative_to(exports)): path.read_bytes() for path in files}


def said(folder, begin):
    """The lines of the last start that begin so, without their folder."""
    return [line.replace(str(folder), "") for line in folder.with_suffix(".log").read_text().splitlines() if line.startswith(begin)]


def killed(runs, folder, name, place, at):
    """Starts a run and has it killed. Returns whether it was."""
    if place is None:
        child = runs.start(folder, name)
        until = time.monotonic() + at
        while child.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
    else:
        child = runs.start(folder, name, CHOSEN[place].replace("{step}", str(at)).replace("{run!r}", repr(str(folder))))
    code = child.wait()
    assert code in (0, -signal.SIGKILL), folder.with_suffix(".log").read_text()
    return code != 0


@pytest.mark.parametrize(("name", "kills"), [pytest.param(*case, id=f"{case[0]}-{n}") for n, case in enumerate(cases())])
def test_what_a_killed_run_finds_again_is_its_own(name, kills, runs, tmp_path):
    straight, folders = runs.straight(name), (tmp_path / f"broken{n}" for n in itertools.count())
    folder = next(folders)
    for place, at in kills:
        # After its end a run cannot be killed at a step.
        if not killed(runs, folder, name, place, at):
            check(folder, straight, name)
            folder = next(folders)
            assert killed(runs, folder, name, place, at) or place is None
    assert runs.start(folder, name).wait() == 0, folder.with_suffix(".log").read_text()
    check(folder, straight, name)


def check(folder, straight, name):
    """The run in a folder has ended as the unbroken one."""
    assert logged(folder) == logged(straight)
    assert [row["step"] for row in logged(folder) if "eval_loss" in row] == [*range(2, KINDS[name].last + 1, 2)]
    assert exported(folder) == exported(straight) != {}
    assert said(folder, "Best checkpoint") == said(straight, "Best checkpoint")
    # A kill may come before old checkpoints are removed.
    assert {*Steps(straight / "checkpoints").listed()} <= {*Steps(folder / "checkpoints").listed()}
    output = folder.with_suffix(".log").read_text()
    assert "Traceback" not in output and "is not the model" not in output
