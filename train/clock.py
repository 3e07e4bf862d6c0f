"""Step time on finished work: a lap ends when a step's results are on the host."""

from __future__ import annotations

import collections
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

WARMUP_STEPS = 2
STRETCH_SECONDS = 10.0


class InFlight:
    """Bounds how far the host runs ahead of the devices: results of at most `limit` steps are waited for later."""

    def __init__(self, limit: int = 2):
        self._results: collections.deque[Any] = collections.deque()
        self._limit = limit

    def add(self, result: Any) -> Any:
        """Notes a step's result (a tree of arrays), waits for that of the step `limit` steps before, and returns it; None before."""
        self._results.append(result)
        return jax.block_until_ready(self._results.popleft()) if len(self._results) > self._limit else None

    def rest(self) -> Iterator[Any]:
        """The results that were not waited for yet."""
        while self._results:
            yield jax.block_until_ready(self._results.popleft())


class StepClock:
    """Seconds a step between laps, pauses left out, from step `done` on; none for the first steps, which also warm up."""

    def __init__(self, done: int = 0) -> None:
        self._last = time.perf_counter()
        self._last_step = self._start = done
        self._paused = 0.0

    def lap(self, step: int) -> float | None:
        """Seconds a step since the last lap; None while warming up. Call it when `step`'s results have arrived."""
        now = time.perf_counter()
        elapsed = now - self._last - self._paused
        steps, warm = step - self._last_step, self._last_step - self._start >= WARMUP_STEPS
        self._last, self._last_step, self._paused = now, step, 0.0
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
