"""Step time on finished work: a lap ends when a step is done on the devices."""

from __future__ import annotations

import collections
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

WARMUP_STEPS = 2
STRETCH_SECONDS = 10.0


class Finished(NamedTuple):
    """A result that is done, and when it was first seen to be, by time.perf_counter()."""

    result: Any
    at: float


class InFlight:
    """Bounds how far the host runs ahead of the devices: results (trees of arrays) of at most `limit` steps are waited for later."""

    def __init__(self, limit: int):
        self._results: collections.deque[Any] = collections.deque()
        self._seen: collections.deque[float] = collections.deque()
        self._limit = limit

    def __len__(self) -> int:
        """Those that were not waited for yet."""
        return len(self._results)

    def add(self, result: Any) -> Finished | None:
        """Notes a step's result, and waits for that of the step `limit` steps before; None where there is none."""
        # Where the host is slower than the devices nobody waits: the time of a step is then that of the host.
        while len(self._seen) < len(self._results) and _is_ready(self._results[len(self._seen)]):
            self._seen.append(time.perf_counter())
        self._results.append(result)
        return self.next() if len(self._results) > self._limit else None

    def next(self) -> Finished:
        """Waits for the oldest."""
        result = jax.block_until_ready(self._results.popleft())
        return Finished(result, self._seen.popleft() if self._seen else time.perf_counter())


def steps_ahead(mesh: Mesh | AbstractMesh) -> int:
    """How many steps the host may be ahead of the devices of a mesh.

    None on CPU devices that share a process: the threads that they share are few, and where two programs run at once, each device may
    hold those that another one's collective waits for, for ever.
    """
    here = mesh.local_devices if isinstance(mesh, Mesh) else []
    return 0 if len(here) > 1 and here[0].platform == "cpu" else 2


def _is_ready(result: Any) -> bool:
    return all(x.is_ready() for x in jax.tree.leaves(result) if hasattr(x, "is_ready"))


class StepClock:
    """Seconds a step between laps, pauses left out, from step `done` on; none for the first steps, which also warm up."""

    def __init__(self, done: int = 0) -> None:
        self._last = time.perf_counter()
        self._last_step = self._start = done
        self._paused = 0.0

    def lap(self, step: int, at: float) -> float | None:
        """Seconds a step since the last lap; None while warming up. at: when `step` was done, after all pauses so far."""
        elapsed = at - self._last - self._paused
        steps, warm = step - self._last_step, self._last_step - self._start >= WARMUP_STEPS
        self._last, self._last_step, self._paused = at, step, 0.0
        return elapsed / steps if warm else None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out what happens inside: evaluations and checkpoints."""
        started = time.perf_counter()
        yield
        self._paused += time.perf_counter() - started


class Stretches:
    """Accounts for the time in steps, a stretch of some seconds after another; note(begun, seconds, **details) takes them."""

    def __init__(self, done: int, note: Callable[..., None]):
        self._note = note
        self._begin(done)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Waits for devices inside, in which time the host has nothing to do."""
        started = time.perf_counter()
        yield
        self._waited += time.perf_counter() - started

    def step(self, step: int) -> None:
        """A step is done, as far as the host knows."""
        if time.perf_counter() - self._clock > STRETCH_SECONDS:
            self.end(step)

    def end(self, step: int) -> None:
        """Ends the stretch with this step: something else comes."""
        seconds = time.perf_counter() - self._clock
        if step > self._done:
            busy = round(seconds - self._waited, 4)
            self._note(self._begun, seconds, first=self._done + 1, last=step, steps=step - self._done, busy=busy)
        self._begin(step)

    @contextlib.contextmanager
    def interrupted(self, step: int) -> Iterator[None]:
        """Ends the stretch, and begins the next one after what happens inside."""
        self.end(step)
        yield
        self._begin(step)

    def _begin(self, done: int) -> None:
        self._done, self._begun, self._clock, self._waited = done, time.time(), time.perf_counter(), 0.0


def process_started() -> float:
    """When this process was created, seconds since 1970; where the system does not say, now."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        age = 0.0
    return time.time() - age
