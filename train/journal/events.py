"""The events files of a run, read back: lines into events, and events into the starts that wrote them.

A run is often started many times, and every start appends to the same file. A killed process leaves half a line, and lines may be missing
or edited. So every value is checked when it is read, a line that is not an event is counted instead of refused, and missing values of a
`StartSummary` are None. The result guarantees finite numbers, steps from 1 on, text of printable characters only, and at least one event
per start.

`find_stragglers` compares the processes of a start. All processes take the same time for a step, because its collectives wait for the
slowest, so step times cannot show which one is slow. What differs is how a host spends that time: a fast one waits for its devices, a slow
one is busy with its own work, such as reading data and dispatching.

A run of years may have millions of lines, so what exists for each of them is a NamedTuple, which is made faster than a frozen dataclass.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jgt.document import shown

from .rows import read_lines
from .status import events_file, left_open

KILLED = "killed"
"""How a start ended that wrote no `stop`, although another start followed."""
_MAX_COUNT = 2**53
"""Whole numbers below it are exact in JSON. Larger ones are not an event's."""
_MAX_SECONDS = 253_402_300_800
"""The year 10000, in seconds since 1970. Larger numbers are not an event's."""
_LONGEST_TEXT = 300


class Event(NamedTuple):
    """One line of the file. time: when the event began, in seconds since 1970; details: the other keys of the line."""

    phase: str
    time: float
    seconds: float
    details: Mapping[str, object]

    def natural(self, key: str) -> int | None:
        """A detail that is a whole number of at least 0; None if it is absent or anything else."""
        value = self.details.get(key)
        # Not isinstance: True is an int.
        return value if type(value) is int and 0 <= value < _MAX_COUNT else None

    def text(self, key: str) -> str | None:
        """A detail that is text, cut after 300 characters, with escapes for those that are not printable; None if it is anything else."""
        value = self.details.get(key)
        # An escape sequence would move the cursor of the terminal that shows the report, or rename its window.
        return shown(value, _LONGEST_TEXT, quotes=False) if isinstance(value, str) else None


def read_events(path: Path) -> tuple[list[Event], int]:
    """The events of a file, and the number of its lines that could not be read. Raises OSError."""
    events = [as_event(row) for line, row in read_lines(path) if line.strip()]
    return [event for event in events if event is not None], events.count(None)


def read_process(run: Path, process: int) -> tuple[list[Event], int]:
    """As `read_events`, of a process of a run, with the phase that it has not ended. Raises OSError."""
    events, unreadable = read_events(events_file(run, process))
    row = left_open(run, process)
    event = as_event(row)
    return (events if event is None else [*events, event]), unreadable


def _seconds(value: Any) -> float | None:
    # Not isinstance: True is an int. NaN fails the comparison below, and so does infinity.
    return float(value) if type(value) in (float, int) and 0 <= value < _MAX_SECONDS else None


def as_event(row: dict[str, object] | None) -> Event | None:
    """The event in a row of an events file, whose keys it takes; None if it is anything else."""
    if row is None:
        return None
    phase, time, seconds = row.pop("phase", None), _seconds(row.pop("time", None)), _seconds(row.pop("seconds", None))
    if not isinstance(phase, str) or time is None or seconds is None:
        return None
    return Event(phase=phase, time=time, seconds=seconds, details=row)


class Stretch(NamedTuple):
    """Consecutive steps, from `first` to `last`, both included. busy: the seconds in which the host did not wait for devices."""

    first: int
    last: int
    seconds: float
    busy: float | None

    @property
    def steps(self) -> int:
        """The number of steps."""
        return self.last - self.first + 1

    def steps_up_to(self, limit: float) -> int:
        """The number of its steps that are not after step `limit`."""
        return max(0, min(self.steps, int(min(limit, self.last)) - self.first + 1))


@dataclass(frozen=True, kw_only=True)
class StartSummary:
    """The work of one process in one start of the run. A field is None if the events do not say it.

    begin, end: seconds since 1970; the end is the end of the last event.
    resumed: the step that it resumed from, 0 for a fresh start.
    reached: the last step known to be done.
    ended: the `why` of its `stop` event; without one, KILLED if another start followed.
    seconds: the seconds in each phase, without steps.
    """

    begin: float
    end: float
    resumed: int | None
    reached: int | None
    ended: str | None
    processes: int | None
    devices: int | None
    host: str | None
    seconds: Mapping[str, float]
    stretches: tuple[Stretch, ...]

    def to_json(self) -> dict[str, object]:
        """The entry of `starts` in the report's JSON."""
        return {name: getattr(self, name) for name in ("begin", "end", "resumed", "reached", "ended", "processes", "devices", "host")}


def find_starts(events: Sequence[Event]) -> tuple[StartSummary, ...]:
    """The starts in the events of one process, in order. A start begins at its `start` event."""
    groups: list[list[Event]] = []
    for event in events:
        if event.phase == "start" or not groups:
            groups.append([])
        groups[-1].append(event)
    return tuple(_summary(group, is_last=group is groups[-1]) for group in groups)


def _summary(events: Sequence[Event], *, is_last: bool) -> StartSummary:
    by_phase: dict[str, list[Event]] = {}
    for event in events:
        by_phase.setdefault(event.phase, []).append(event)
    stretches = tuple(filter(None, map(stretch_of, by_phase.get("step", ()))))
    resumed = next((e.natural("step") for e in by_phase.get("restore", ())), 0 if "init" in by_phase else None)
    # The events before the steps were lost: the first step says where the start resumed.
    if resumed is None and stretches:
        resumed = stretches[0].first - 1
    stop, opening = by_phase.get("stop", [None])[-1], by_phase.get("start", [None])[0]
    # These events name a step that was done before they began.
    known = [e.natural("step") for name in ("save", "eval", "stop") for e in by_phase.get(name, ())]
    return StartSummary(
        begin=events[0].time,
        # The latest end, which need not be the last line's: the clock may have been set back.
        end=round(max(event.time + event.seconds for event in events), 6),
        resumed=resumed,
        reached=max((step for step in [*known, *(s.last for s in stretches), resumed] if step is not None), default=None),
        ended=stop.text("why") if stop is not None else None if is_last or opening is None else KILLED,
        processes=opening and opening.natural("processes"),
        devices=opening and opening.natural("devices"),
        host=opening and opening.text("host"),
        seconds={name: sum(e.seconds for e in group) for name, group in by_phase.items() if name != "step"},
        stretches=stretches,
    )


def stretch_of(event: Event) -> Stretch | None:
    """The steps of an event of steps; None if it is anything else, which would divide by zero later."""
    first, last = event.natural("first"), event.natural("last")
    if not first or last is None or last < first:
        return None
    return Stretch(first=first, last=last, seconds=event.seconds, busy=_seconds(event.details.get("busy")))


@dataclass(frozen=True, kw_only=True)
class Busy:
    """The seconds per step that the host of a process spends on its own work, instead of waiting for its devices."""

    process: int
    host: str | None
    step_s: float


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """The processes, the busiest first. slowest, host: the busiest one; slowest_s, median_s: seconds of own work per step.

    spread: slowest_s divided by median_s; None if the median is 0.
    """

    processes: tuple[Busy, ...]
    slowest: int
    host: str | None
    slowest_s: float
    median_s: float
    spread: float | None


def find_stragglers(starts: Sequence[StartSummary], others: Mapping[int, Sequence[StartSummary]]) -> Stragglers | None:
    """Compares the processes in the last start of process 0 that has steps. None if only one process has steps in it.

    starts: the starts of process 0. others: the starts of each other process.
    """
    last = next((start for start in reversed(starts) if start.stretches), None)
    if last is None:
        return None
    start_of = {0: last}
    for process, their_starts in others.items():
        # By overlap, because each process begins at another time, by its host's clock. Further processes are of an earlier start.
        overlapping = [start for start in their_starts if start.begin <= last.end and start.end >= last.begin]
        if overlapping and (last.processes is None or process < last.processes):
            start_of[process] = overlapping[-1]
    # Ties go to the lowest process, so that the report is the same each time.
    busy = sorted(filter(None, map(_busy, start_of, start_of.values())), key=lambda busy: (-busy.step_s, busy.process))
    if len(busy) < 2:
        return None
    slowest, median = busy[0], statistics.median(b.step_s for b in busy)
    spread = slowest.step_s / median if median else None
    return Stragglers(
        processes=tuple(busy), slowest=slowest.process, host=slowest.host, slowest_s=slowest.step_s, median_s=median, spread=spread
    )


def _busy(process: int, start: StartSummary) -> Busy | None:
    timed = [(stretch.busy, stretch.steps) for stretch in start.stretches if stretch.busy is not None]
    if not timed:
        return None
    return Busy(process=process, host=start.host, step_s=sum(busy for busy, _ in timed) / sum(steps for _, steps in timed))
