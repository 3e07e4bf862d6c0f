"""Plans of candidates, made in processes of their own, and remembered.

A plan takes seconds and most of a core. Workers compile side by side, while the searching process imports no JAX and can answer a Ctrl-C. A
worker that dies takes only its plan with it.

A plan is stored by everything that it depends on: the resolved run, the target, the flags, the versions of JAX and the code of jgt.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import json
import multiprocessing
import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import jgt
from jgt.document import InputError
from jgt.hardware.chip import parse_target

from ..code.files import read_code
from ..config import load

WORKERS = 2
_TASKS = 6
"""Plans that a worker makes before another takes its place: XLA does not give all of its memory back."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A run's file with overrides, on a target. devices: the number of CPU devices where there is no target."""

    config: str
    overrides: tuple[str, ...]
    code: tuple[str, ...]
    target: str | None
    devices: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a search needs of a plan. Bytes and seconds are one device's in a step. problems: why there is no plan.

    activations: what the forward pass leaves for the backward pass. exposed: seconds of waiting, by axes. sent: bytes by axes.
    """

    seconds: float = 0.0
    peak_bytes: int = 0
    args_bytes: int = 0
    gradient_bytes: int = 0
    activations: int = 0
    fits: bool = False
    flops: float = 0.0
    model_flops: float = 0.0
    parameter_bytes: int = 0
    exposed: dict[str, float] | None = None
    sent: dict[str, int] | None = None
    warnings: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    took: float = 0.0

    @property
    def is_usable(self) -> bool:
        """Whether there is a plan, and the step fits."""
        return not self.problems and self.fits


class Plans:
    """Plans made by worker processes. folder: where they are stored; None stores none."""

    def __init__(self, folder: Path | None, workers: int = WORKERS):
        self._folder = folder
        self.workers = max(1, min(workers, os.cpu_count() or 1))
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None
        self.num_made = 0
        self.num_found = 0

    def ask(self, question: Question) -> concurrent.futures.Future[Answer]:
        """The plan of a question, at once if it is stored. Raises nothing: what is wrong is in the answer."""
        path = self._path(question)
        if path is not None and (stored := _read(path)) is not None:
            self.num_found += 1
            done: concurrent.futures.Future[Answer] = concurrent.futures.Future()
            done.set_result(stored)
            return done
        self.num_made += 1
        return self._workers().submit(answer, question, path)

    def close(self) -> None:
        """Ends the workers at once, also in the middle of a plan."""
        if self._pool is not None:
            for process in list((getattr(self._pool, "_processes", None) or {}).values()):
                process.terminate()
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _workers(self) -> concurrent.futures.ProcessPoolExecutor:
        if self._pool is None:
            # A forked process would share XLA's threads with this one, if it had any.
            context = multiprocessing.get_context("spawn")
            self._pool = concurrent.futures.ProcessPoolExecutor(
                self.workers, mp_context=context, initializer=_prepare_worker, max_tasks_per_child=_TASKS
            )
        return self._pool

    def _path(self, question: Question) -> Path | None:
        if self._folder is None:
            return None
        with contextlib.suppress(InputError):
            run = load(question.config, question.overrides, code=read_code(question.code))
            key = json.dumps(
                [run.resolved(), run.code.checksum, question.target, question.devices, _versions()], sort_keys=True, default=str
            )
            return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
        return None


def plans_folder() -> Path:
    """The user's folder of stored plans: `$XDG_CACHE_HOME/jgt/plans`, or `~/.cache/jgt/plans`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jgt" / "plans"


def answer(question: Question, path: Path | None = None) -> Answer:
    """Makes a plan in this process, and stores it. What is wrong with the candidate is in the answer's problems."""
    from ..plan.make import make_plan

    try:
        run = load(question.config, question.overrides, code=read_code(question.code))
        target = None if question.target is None else parse_target(question.target)
        plan = make_plan(run, target, question.devices).to_json()
    except InputError as error:
        return Answer(problems=tuple(error.problems))
    except (ValueError, RuntimeError) as error:
        return Answer(problems=(str(error).splitlines()[0][:300],))
    found = _of_plan(plan)
    if path is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Another search may read the file while it is written.
            draft = path.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(asdict(found)))
            draft.replace(path)
    return found


def _of_plan(plan: dict[str, Any]) -> Answer:
    memory, step = plan["memory"], plan["step_time_ms"]
    sent: dict[str, int] = {}
    for row in plan["collectives"]:
        axes = " x ".join(row["axes"])
        sent[axes] = sent.get(axes, 0) + row["total_bytes"]
    return Answer(
        seconds=0.0 if step is None else step / 1e3,
        peak_bytes=memory["peak_bytes"],
        args_bytes=memory["args_bytes"],
        gradient_bytes=memory["gradient_bytes"],
        activations=sum(memory["activations"].values()),
        fits=memory["fits"] is not False,
        flops=plan["flops_per_device"],
        model_flops=plan["model_flops_per_device"],
        parameter_bytes=sum(p["local_bytes"] for p in plan["parameters"]),
        exposed={axes: ms / 1e3 for axes, ms in plan["exposed_ms"].items()},
        sent=sent,
        warnings=tuple(plan["warnings"]),
    )


def _read(path: Path) -> Answer | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        values = cast("dict[str, Any]", json.loads(path.read_text()))
        return Answer(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})
    return None


@functools.cache
def _versions() -> list[str]:
    """JAX's versions, and the code of jgt and of the trainer."""
    text = hashlib.sha256()
    for package in (Path(jgt.__file__).parent, Path(__file__).parents[1]):
        for file in _sources(package):
            text.update(file.read_bytes())
    return [metadata.version("jax"), metadata.version("jaxlib"), text.hexdigest()]


def _sources(package: Path) -> Iterator[Path]:
    yield from sorted(file for kind in ("*.py", "*.yaml") for file in package.rglob(kind))


def _prepare_worker() -> None:
    """Ctrl-C is for the searching process, which ends its workers. What a mesh warns of is in its plan."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
