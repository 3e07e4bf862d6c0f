"""Step time on finished work: a lap ends when a step's results are on the host."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import jax

WARMUP_STEPS = 2


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
        self.total = 0.0
        """Seconds in steps so far, warm-up included, pauses left out."""

    def lap(self, step: int) -> float | None:
        """Seconds a step since the last lap; None while warming up. Call it when `step`'s results have arrived."""
        now = time.perf_counter()
        elapsed = now - self._last - self._paused
        steps, warm = step - self._last_step, self._last_step - self._start >= WARMUP_STEPS
        self._last, self._last_step, self._paused = now, step, 0.0
        self.total += elapsed
        return elapsed / steps if warm else None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out what happens inside: evaluations and checkpoints."""
        started = time.perf_counter()
        yield
        self._paused += time.perf_counter() - started
