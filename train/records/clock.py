"""Step times, measured on finished work.

JAX dispatches asynchronously: a clock around a step's call would measure how fast Python can enqueue work, and waiting for every step would
let the devices idle while the host prepares the next one. So the host runs a few steps ahead of the devices (`InFlight`), and a step ends
when its result is first seen to be finished. The time between two such ends is the time of the steps between them (`StepClock`).

The host sees the end of a step at once only if it waits for it. If it was busy meanwhile, it finds the step finished, perhaps with several
others: they ended at some moment since the host last looked. So each end comes with the seconds by which it may have been earlier, and a
lap between two ends is only measured if these seconds are few against its length.

`time.perf_counter` measures durations: it never jumps. `time.time` gives the moments in events files, so that the files of several hosts
can be compared. It can be set, and no duration is computed from it.
"""

from __future__ import annotations

import collections
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh

from ..journal.timeline import OTHER, Timeline
from ..step.objective import Arrays

WARMUP_STEPS = 2
"""Steps at a start that are not measured: they fill caches and allocate memory."""
_LENGTHS = ((86400.0, 600.0), (3600.0, 60.0), (0.0, 10.0))
"""The seconds of a stretch by the seconds since the first one, so that a run of a month has a few thousand events and not a million."""
_RECENT_SECONDS = 0.75
"""The least seconds of steps whose times the status has."""
_DOUBT = 0.25
"""A lap is measured if its two ends are uncertain by at most this share of its length."""
_ENDS = 32
"""The ends of steps that a clock remembers."""
_Result = TypeVar("_Result")


class Finished(NamedTuple, Generic[_Result]):
    """A finished result, the time.perf_counter() at which it was first seen to be finished, and by how much earlier it may have been."""

    result: _Result
    at: float
    late: float


class InFlight(Generic[_Result]):
    """The results (trees of arrays) of dispatched steps, oldest first. At most `limit` of them are unfinished while the host continues."""

    def __init__(self, limit: int):
        self._results = collections.deque[_Result]()
        self._ends = collections.deque[tuple[float, float]]()
        """(at, late) of the oldest results, as far as they were seen to be finished."""
        self._limit, self._looked = limit, time.perf_counter()

    def __len__(self) -> int:
        """The number of results that `add` and `next` have not returned yet."""
        return len(self._results)

    def add(self, result: _Result) -> Finished[_Result] | None:
        """Adds the result of a step. If more than `limit` results are then in flight, waits for the oldest and returns it."""
        # If the host is slower than the devices, it never waits for them: the results that finished meanwhile get their time here.
        self._look()
        if len(self._ends) == len(self._results) and _is_ready(result):
            # Small programs run inside the call that dispatches them, which has just returned.
            self._looked = time.perf_counter()
            self._ends.append((self._looked, 0.0))
        self._results.append(result)
        return self.next() if len(self._results) > self._limit else None

    def next(self) -> Finished[_Result]:
        """Waits for the oldest result and returns it."""
        self._look()
        result = jax.block_until_ready(self._results.popleft())
        if self._ends:
            return Finished(result, *self._ends.popleft())
        # The host has waited for this end, and later ones come after it.
        self._looked = time.perf_counter()
        return Finished(result, self._looked, 0.0)

    def _look(self) -> None:
        now = time.perf_counter()
        # Devices finish results in order, so the first unfinished one ends the search.
        while len(self._ends) < len(self._results) and _is_ready(self._results[len(self._ends)]):
            self._ends.append((now, now - self._looked))
        self._looked = now


def steps_ahead(mesh: Mesh | AbstractMesh) -> int:
    """The number of steps by which the host may be ahead of the devices of a mesh.

    0 for several CPU devices in one process. They share a small pool of threads. If two programs ran at once, each could occupy the
    threads that a collective of the other waits for: a deadlock.
    """
    local = mesh.local_devices if isinstance(mesh, Mesh) else []
    # 2: while one step runs, the next is enqueued. More would only delay the logs and the reaction to a bad step.
    return 0 if len(local) > 1 and local[0].platform == "cpu" else 2


def _is_ready(result: object) -> bool:
    # Results may have leaves that are not arrays of JAX; they are ready.
    return all(x.is_ready() for x in jax.tree.leaves(result) if hasattr(x, "is_ready"))


class StepClock:
    """Measures the seconds per step between laps, without pauses. `done` is the number of steps before the first one measured."""

    def __init__(self, done: int = 0) -> None:
        self._warm, self._paused = done + WARMUP_STEPS, 0.0
        self._ends = collections.deque[tuple[int, float, float]](maxlen=_ENDS)
        """The step, the time without pauses, and the uncertainty of each end."""

    def lap(self, step: int, at: float, late: float = 0.0) -> float | None:
        """Seconds per step since the last lap that is long enough to be measured; None if there is none, as in the warm-up steps.

        at: when `step` was finished, by time.perf_counter(), and not before the end of a pause.
        late: the seconds by which it may have been finished earlier.
        """
        at -= self._paused
        laps = (
            (at - begin) / (step - before) for before, begin, early in reversed(self._ends) if late + early <= _DOUBT * (at - begin) > 0
        )
        seconds = next(laps, None)
        if step >= self._warm:
            self._ends.append((step, at, late))
        return seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out the time inside, for evaluations and checkpoints."""
        started = time.perf_counter()
        yield
        self._paused += time.perf_counter() - started


class Stretches:
    """Makes the time spent in steps events, one for each stretch: of about ten seconds in the first hour, and longer ones later.

    An event per step would fill the disk of a fast run. done: the steps before the first stretch. The status of the process has the stretch
    that has not ended, and the figures of the latest seconds as `recent`, oldest first.
    """

    def __init__(self, done: int, timeline: Timeline):
        self._timeline, self._begun = timeline, time.perf_counter()
        self._begin(done)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside as waiting for devices. The rest of a stretch is the host's own work, `busy` in the event."""
        started = time.perf_counter()
        yield
        self._stretch.waited += time.perf_counter() - started

    def reading(self, batches: Iterator[Arrays]) -> Iterator[Arrays]:
        """The batches. Counts the time until each is there as `data` in the event, a part of the host's work."""
        while True:
            started = time.perf_counter()
            batch = next(batches, None)
            self._stretch.data += time.perf_counter() - started
            if batch is None:
                return
            yield batch

    def step(self, step: int) -> None:
        """The host has finished a step. Ends the stretch if it is long enough."""
        stretch, now = self._stretch, time.perf_counter()
        stretch.last = step
        if now - self._recent[0] > _RECENT_SECONDS:
            figures = (now, step, stretch.waited, stretch.data)
            seconds, steps, waited, data = (after - before for after, before in zip(figures, self._recent, strict=True))
            window = {"seconds": seconds, "steps": steps, "busy": seconds - waited, "data": data}
            # Two, so that one pause of the host can be told from a host that is always slow.
            self._timeline.figures["recent"] = [*self._timeline.figures.get("recent", [])[-1:], window]
            self._recent = figures
        age = now - self._begun
        if now - stretch.clock > next(length for begin, length in _LENGTHS if age >= begin):
            self._begin(step)

    def end(self, step: int) -> None:
        """Ends the stretch with this step. No step follows, until the end of `interrupted`."""
        self._stretch.last = step
        self._timeline.begin(OTHER)

    @contextlib.contextmanager
    def interrupted(self, step: int) -> Iterator[None]:
        """Ends the stretch with this step, and begins the next one after the time inside."""
        self.end(step)
        yield
        self._begin(step)

    def _begin(self, done: int) -> None:
        self._stretch = _Stretch(done)
        self._recent = (self._stretch.clock, done, 0.0, 0.0)
        self._timeline.begin("step", self._stretch.details)


class _Stretch:
    """A stretch of steps after the first `done`. waited, data: seconds."""

    def __init__(self, done: int):
        self.done = self.last = done
        self.clock, self.waited, self.data = time.perf_counter(), 0.0, 0.0

    def details(self, seconds: float) -> dict[str, object] | None:
        """The keys of its event; None without a step, as between two evaluations."""
        if self.last <= self.done:
            return None
        busy, steps = round(max(0.0, seconds - self.waited), 4), self.last - self.done
        return {"first": self.done + 1, "last": self.last, "steps": steps, "busy": busy, "data": round(self.data, 4)}


def process_started() -> float:
    """When this process was created, in seconds since 1970. On a system without /proc: now."""
    try:
        # Field 22 of stat, counted behind the command's name in parentheses, which may contain spaces: clock ticks since boot.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        age = 0.0
    return time.time() - age
