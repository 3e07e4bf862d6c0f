"""Plans of candidates, made in processes of their own, and remembered.

A plan takes seconds and most of a core. Workers (`train/plan/worker.py`) compile side by side, while the searching process imports no JAX
and can answer a Ctrl-C. A worker that dies takes only its plan with it.

A plan is stored by everything that it depends on: the resolved run, the target, the flags, the versions of JAX and the code of jgt.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar, cast

import jgt
from jgt.document import InputError
from jgt.hardware.chip import Target, parse_target

from ..code.files import read_code
from ..compiled import default_folder
from ..config import load

WORKERS = 2
_PLANS, _GROWN = 6, 1e9
"""A worker makes this many plans, or grows to this many bytes, before another takes its place: XLA does not give all memory back."""

_WORKER = "from jgt.trainer import trainer; trainer('plan.worker').serve()"
_T = TypeVar("_T")
_DIED = "the process that planned this layout died; it may have run out of memory"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A run's file with overrides, on a target, as `parse_target` reads it. devices: of the target."""

    config: str
    overrides: tuple[str, ...]
    code: tuple[str, ...]
    target: str
    devices: int
    chip: str | None = None
    changes: tuple[str, ...] = ()

    @classmethod
    def on(cls, target: Target, config: str, overrides: Sequence[str], code: Sequence[str]) -> Question:
        """A run on a target, without a pipeline: what each layout of a search changes."""
        return cls(
            config=config,
            overrides=(*overrides, "pipeline=null", f"devices.virtual_cpu={target.num_devices}"),
            code=tuple(code),
            target=target.text.partition(" ")[0],
            devices=target.num_devices,
            chip=target.file,
            changes=target.changes,
        )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a search needs of a plan. Bytes and seconds are one device's in a step. problems: why there is no plan.

    parameters: their number, on all devices together. activations: what the forward pass leaves for the backward pass. exposed: seconds of
    waiting, by axes. sent: bytes by axes. links: seconds of all collectives, by axes. parts: the seconds by what they are spent on, as in a
    plan's `parts_ms`.
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
    parameters: int = 0
    exposed: dict[str, float] | None = None
    sent: dict[str, int] | None = None
    links: dict[str, float] | None = None
    parts: dict[str, float] | None = None
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
        self._threads = concurrent.futures.ThreadPoolExecutor(self.workers)
        # A worker belongs to the thread that speaks to it.
        self._local = threading.local()
        self._processes: list[subprocess.Popen[str]] = []
        self._is_closed = False
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
        return self._threads.submit(self._made, question, path)

    def close(self) -> None:
        """Ends the workers at once, also in the middle of a plan."""
        self._is_closed = True
        for process in self._processes:
            process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            process.communicate()

    def _made(self, question: Question, path: Path | None) -> Answer:
        process = self._worker()
        assert process.stdin is not None and process.stdout is not None
        try:
            print(json.dumps(asdict(question)), file=process.stdin, flush=True)
            line = process.stdout.readline()
        except (OSError, ValueError):
            line = ""
        if not line:
            process.kill()
            self._local.process = None
            return Answer(problems=(_DIED,))
        values, self._local.peak = json.loads(line)
        found = from_json(Answer, values)
        if path is not None and not found.problems:
            _write(path, found)
        return found

    def _worker(self) -> subprocess.Popen[str]:
        """This thread's worker; a new one after some plans, or if it has grown or died."""
        process = getattr(self._local, "process", None)
        if process is not None and self._local.plans < _PLANS and self._local.peak < _GROWN and process.poll() is None:
            self._local.plans += 1
            return process
        if process is not None:
            process.kill()
        command = [sys.executable, "-c", _WORKER]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._processes.append(process)
        self._local.process, self._local.plans, self._local.peak = process, 1, 0
        if self._is_closed:
            process.kill()
        return process

    def _path(self, question: Question) -> Path | None:
        if self._folder is None:
            return None
        with contextlib.suppress(InputError):
            run = load(question.config, question.overrides, code=read_code(question.code))
            chip = asdict(parse_target(question.target, question.chip, question.changes).chip)
            parts = [run.resolved(), run.code.checksum, question.target, chip, question.devices, _versions()]
            key = json.dumps(parts, sort_keys=True, default=str)
            return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
        return None


def plans_folder() -> Path:
    """The user's folder of stored plans: `$XDG_CACHE_HOME/jgt/plans`, or `~/.cache/jgt/plans`."""
    return _user_cache() / "plans"


def chips_folder() -> Path:
    """The user's folder of measured chips, beside the plans: one for each kind of CPU."""
    return _user_cache() / "chips" / default_folder().name


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jgt"


def _read(path: Path) -> Answer | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        return from_json(Answer, json.loads(path.read_text()))
    return None


def _write(path: Path, found: Answer) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another search may read the file while it is written.
        draft = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        draft.write_text(json.dumps(asdict(found)))
        draft.replace(path)


def from_json(kind: type[_T], values: Mapping[str, Any]) -> _T:
    """A dataclass of plain fields, from JSON that has lists for its tuples."""
    return kind(**{key: tuple(cast("list[Any]", value)) if isinstance(value, list) else value for key, value in values.items()})


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
