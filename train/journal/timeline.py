"""The phase that a process is in: exactly one at each moment. The events of a run and the status of a process both follow from it.

An event is written when its phase ends, so its beginning is the end of the one before it, and no second of a process is in none. What has
no name of its own is the phase `other`. The phase that has not ended is the row of `open_row`. Once a second, the process's status
(`status.py`) stores this row on disk. A process that is killed leaves it there; its next start adds it to the events, and a reader
of the run does so until then.

Imports no JAX: the launcher has phases too.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

OTHER = "other"
"""The phase between two that have names."""
_SHORTEST = 0.001
"""Seconds of `other` that are worth an event. The launcher's and the steps' own phases are longer."""

Details = Callable[[float], Mapping[str, object] | None]
"""From the seconds of a phase to the other keys of its event; None if it was nothing but `other`."""


class _Phase(NamedTuple):
    name: str
    details: Details
    since: float
    clock: float
    """`since` is the moment in the event, by time.time(), and `clock` measures its length, by time.perf_counter()."""


class Timeline:
    """The phases of one process. write(row) appends an event. name, begun: the first phase, and when it began, in seconds since 1970.

    The training thread begins phases. Any thread may read the open one, and end the last one.
    """

    def __init__(self, write: Callable[[dict[str, object]], None], name: str = OTHER, begun: float | None = None):
        self._write, self._lock = write, threading.Lock()
        now = time.time()
        self._phase: _Phase | None = _Phase(name, _none, begun or now, time.perf_counter() - (now - (begun or now)))
        self.figures: dict[str, Any] = {}
        """The status has these too: the steps, the times of the last ones, a save that is being written."""

    def begin(self, name: str, details: Details | None = None) -> None:
        """Ends the phase, and begins another."""
        self._change(_Phase(name, details or _none, time.time(), time.perf_counter()))

    def end(self) -> None:
        """Ends the last phase. What follows is not recorded."""
        self._change(None)

    @contextlib.contextmanager
    def phase(self, name: str, **details: object) -> Iterator[None]:
        """The phase inside. Afterwards follows `other`. The time of one that fails is `other` too, since nothing was restored or saved."""
        self.begin(name, lambda seconds: details)
        try:
            yield
        except BaseException:
            self._phase = self._phase and self._phase._replace(name=OTHER, details=lambda seconds: {"what": name, "failed": True})
            raise
        finally:
            self.begin(OTHER)

    def open_row(self) -> dict[str, object] | None:
        """The event that the present phase would be if it ended now; None after the last one."""
        with self._lock:
            return None if self._phase is None else _row(self._phase, time.perf_counter())

    def _change(self, phase: _Phase | None) -> None:
        with self._lock:
            before = self._phase
            if before is None:
                return
            row = _row(before, time.perf_counter())
            is_short = row["phase"] == OTHER and row["seconds"] < _SHORTEST
            # Thousands of lost moments would be missing from the sum of a run's events, so the phase that follows has them.
            self._phase = phase._replace(since=before.since, clock=before.clock) if is_short and phase is not None else phase
        if not is_short:
            self._write(row)


def _none(seconds: float) -> Mapping[str, object]:
    return {}


def _row(phase: _Phase, clock: float) -> dict[str, Any]:
    seconds = clock - phase.clock
    details = phase.details(seconds)
    name = OTHER if details is None else phase.name
    return {"phase": name, "time": round(phase.since, 6), "seconds": round(seconds, 6), **(details or {})}
