"""Plans of layouts, made in other processes, and remembered.

A plan takes seconds and most of a core. So processes plan side by side, while the searching process can answer a Ctrl-C, and one that dies
takes only its plan with it. What makes a plan is a function that the search is given: this room knows the run and the answer.

A plan is stored by everything that it depends on: the resolved run, the target, the flags, the versions of JAX and the code of jgt.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import hashlib
import json
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from jgt import trainer
from jgt.document import InputError
from jgt.planner import Target

from ...config import Run, load
from ...files.disk import cache_folder, replaced
from ...files.json_text import json_value

WORKERS = 2
_PLANS = 6
"""A process makes this many plans before another takes its place: XLA does not give all memory back."""
_DIED = "the process that planned this layout died; it may have run out of memory"
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """A run's file with overrides of the command line. code: the files of the user's own code."""

    config: str
    overrides: tuple[str, ...] = ()
    code: tuple[str, ...] = ()

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> RunFile:
        """The run that a command line names."""
        return cls(config=arguments.config, overrides=tuple(arguments.overrides), code=tuple(arguments.code))

    def load(self, problems: Sequence[str] = ()) -> Run:
        """The run. Raises InputError with every problem, these included."""
        return load(self.config, self.overrides, code=self.code, problems=problems)

    def adding(self, *overrides: str) -> RunFile:
        """The file with further overrides."""
        return replace(self, overrides=(*self.overrides, *overrides))


@dataclass(frozen=True, kw_only=True)
class PlanFigures:
    """The figures of a plan. Bytes and seconds are one device's in a step. problems: why there is no plan.

    parameters: the number of parameters on all devices together. trained: how many of them have gradients. activations: what the forward
    pass leaves for the backward pass. exposed: seconds of waiting, by axes. parts: the seconds by what they are spent on, as in a plan's
    `parts_ms`.
    """

    seconds: float = 0.0
    peak_bytes: int = 0
    args_bytes: int = 0
    activations: int = 0
    fits: bool = False
    flops: float = 0.0
    model_flops: float = 0.0
    parameter_bytes: int = 0
    parameters: int = 0
    trained: int = 0
    exposed: dict[str, float] | None = None
    parts: dict[str, float] | None = None
    warnings: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> PlanFigures:
        """An answer from JSON, which has lists for tuples. Raises TypeError for other keys."""
        tuples: dict[str, Any] = {key: tuple(values.get(key, ())) for key in ("warnings", "problems")}
        return cls(**{**values, **tuples})

    @property
    def is_usable(self) -> bool:
        """Whether there is a plan, and the step fits."""
        return not self.problems and self.fits


MakePlan = Callable[[RunFile, Target], PlanFigures]
"""Plans a run for a target, in another process. It is a function of a module, by whose name the process finds it."""


class Plans:
    """Plans made by `make`. folder: where they are stored; None stores none."""

    def __init__(self, make: MakePlan, folder: Path | None, workers: int = WORKERS):
        self._make, self._folder = make, folder
        self.workers = max(1, min(workers, os.cpu_count() or 1))
        # Each thread has one process, whose death does not take the other's plan with it. Processes inherit the signals that a
        # thread blocks: Ctrl-C is for the searching process, and a pipe to a process that was killed must not end it.
        block = (signal.SIG_BLOCK, [signal.SIGINT, signal.SIGPIPE])
        self._threads = concurrent.futures.ThreadPoolExecutor(self.workers, initializer=signal.pthread_sigmask, initargs=block)
        self._local = threading.local()
        self._asked: list[concurrent.futures.Future[PlanFigures]] = []
        self._is_closed = False
        self.num_found = 0

    def ask(self, file: RunFile, target: Target) -> concurrent.futures.Future[PlanFigures]:
        """The plan of a run for a target, at once if it is stored. Raises nothing: what is wrong is in the answer."""
        path = self._path(file, target)
        if path is not None and (stored := _read(path)) is not None:
            self.num_found += 1
            done: concurrent.futures.Future[PlanFigures] = concurrent.futures.Future()
            done.set_result(stored)
            return done
        self._asked.append(self._threads.submit(self._plan, file, target, path))
        return self._asked[-1]

    def close(self) -> None:
        """Ends the processes at once, also in the middle of a plan."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        while True:
            for process in multiprocessing.active_children():
                process.kill()
            if all(one.done() for one in self._asked):
                return
            # A thread may have begun a process meanwhile.
            time.sleep(0.05)

    def _plan(self, file: RunFile, target: Target, path: Path | None) -> PlanFigures:
        if self._is_closed:
            return PlanFigures(problems=(_DIED,))
        local = self._local
        if getattr(local, "pool", None) is None or local.count == _PLANS:
            local.pool, local.count = _process(), 0
        local.count += 1
        try:
            found = local.pool.submit(_call, self._make, file, target).result()
        except BrokenProcessPool:
            local.pool = None
            return PlanFigures(problems=(_DIED,))
        if path is not None and not found.problems:
            _write(path, found)
        return found

    def _path(self, file: RunFile, target: Target) -> Path | None:
        if self._folder is None:
            return None
        with contextlib.suppress(InputError):
            run = file.load()
            parts = [run.resolved(), run.code.checksum, target.text, asdict(target.chip), target.num_devices, _versions()]
            key = json.dumps(parts, sort_keys=True, default=str)
            return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
        return None


def in_process(function: Callable[..., _T], *arguments: object) -> _T:
    """Calls a function of a module in a new process. Raises what it raises, and RuntimeError if the process dies."""
    try:
        with _process() as process:
            return process.submit(_call, function, *arguments).result()
    except BrokenProcessPool:
        raise RuntimeError("its process died") from None


def _process() -> concurrent.futures.ProcessPoolExecutor:
    """A process that calls functions of the trainer. It starts afresh, because JAX cannot be forked, and has to find the trainer first."""
    return concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=trainer)


def _call(function: Callable[..., _T], *arguments: object) -> _T:
    """Calls a function whose libraries write what they like to stdout and stderr."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)
    return function(*arguments)


def plans_folder() -> Path:
    """The user's folder of stored plans."""
    return cache_folder("plans")


def _read(path: Path) -> PlanFigures | None:
    # A file of another version, or a damaged one, is not a plan.
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        answer = PlanFigures.of_json(json_value(path.read_text()))
        if 0 <= answer.seconds < math.inf:
            return answer
    return None


def _write(path: Path, found: PlanFigures) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another search may read the file while it is written.
        with replaced(path) as new:
            new.write_text(json.dumps(asdict(found)))


@functools.cache
def _versions() -> list[str]:
    """JAX's versions, and the code of jgt and of the trainer."""
    text = hashlib.sha256()
    # The trainer is installed beside jgt.
    for package in ("jgt", "train"):
        folder = Path(__file__).parents[3] / package
        for file in sorted(file for kind in ("*.py", "*.yaml") for file in folder.rglob(kind)):
            text.update(file.read_bytes())
    return [metadata.version("jax"), metadata.version("jaxlib"), text.hexdigest()]
