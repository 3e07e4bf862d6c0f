"""`jgt trace`: the whole of a run as a timeline in the Trace Event format, which Perfetto and chrome://tracing open.

The format is described in https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Each process of the run is a
process there, with a lane for its phases, lanes for what happens beside them, and marks for incidents. A phase is one slice, whose category
is the cause that `jgt report` counts it as, so the slices of a category add up to the report's seconds. Steps that were lost to a restart
are slices of their own. The time between two starts is a slice, too, so that each second is in exactly one.

The moments in events are by the clock of each host. A start has measured by how much its clock is ahead of the first process's, and is
moved by that. Events are read and written one by one: a run may have millions.
"""

from __future__ import annotations

import bisect
import contextlib
import gzip
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from jgt.document import InputError

from ..files.disk import open_file, replaced
from ..files.json_text import read_object
from ..journal.accounts import CAUSE_OF, preserved_steps
from ..journal.events import Event, as_event, stretch_of
from ..journal.rows import read_metrics, read_tail
from ..journal.status import LAUNCHER, events_file, left_open, processes_of
from .devices import DeviceLanes

_BESIDE_PHASES = {"write": 3_000_000, "export": 4_000_000}
"""The lanes of what happens beside the phases, without the number of the process.

Perfetto takes the lane with the number of its process for the main one, and confuses lanes of several processes with one number.
"""
_TITLES = {"write": "background saves", "export": "background exports"}
_INSTANTS = ("stop", "fault", "nonfinite", "spike", "save_failed", "export_failed", "alert", "config", "exit")
_NO_PHASES = frozenset((*_INSTANTS, *_BESIDE_PHASES))
_WRITTEN_AT_ONCE = 1000
_COUNTERS = ("loss", "eval_loss", "grad_norm", "tokens_per_s", "samples_per_s", "memory_bytes")
_LAUNCHER_PID = 999_999
"""The launcher's pid in the trace, above any process number."""
_COLOURS = {"redone": "terrible", "down": "grey", "steps": "good", "save": "rail_load", "compile": "rail_animation"}
_TAIL = _LONGEST_LINE = 1 << 20
_encode = json.JSONEncoder(allow_nan=False, check_circular=False).encode
_GAP = 0.002
"""Seconds between two events that do not count as a gap: times are rounded to milliseconds."""


def write_trace(run: Path, path: Path, last_s: float | None = None, step: int | None = None) -> int:
    """Writes the timeline of a run into a JSON file, compressed if its name ends in .gz. Returns the number of its events.

    last_s: only what ended in this many seconds before the last event. step: only the profile that has this step. Raises InputError without
    events or such a profile, and OSError.
    """
    if not events_file(run, 0).is_file():
        why = ": it has no events.jsonl" if run.is_dir() else ""
        raise InputError([f"{run}: is not a run directory{why}. Name one, such as runs/quickstart"])
    run_trace, count = _RunTrace(run, last_s, step), 0
    with replaced(path) as new, _opened(new, is_compressed=path.suffix == ".gz") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        events = _without_overlaps(run_trace.events())
        while part := list(itertools.islice(events, _WRITTEN_AT_ONCE)):
            file.write(f"{',' if count else ''}\n" + ",\n".join(map(_text, part)))
            count += len(part)
        file.write(f'\n], "otherData": {{"begin": {run_trace.begin}}}}}\n')
    return count


def _opened(path: Path, *, is_compressed: bool) -> IO[str]:
    if is_compressed:
        # The fastest level: timelines repeat so much that the others save little.
        return cast("IO[str]", gzip.open(path, "wt", compresslevel=1, encoding="ascii"))
    return path.open("w", encoding="ascii")


def _text(event: Mapping[str, object]) -> str:
    try:
        return _encode(event)
    except ValueError:
        # JSON has no NaN, but Python reads it.
        return _encode({**event, "args": {}})


def _without_overlaps(events: Iterator[dict[str, Any]]) -> Iterator[dict[str, object]]:
    """The events, where no slice begins before the end of the one before it, as rounded moments may: viewers leave such slices out."""
    ends: dict[tuple[int, int], float] = {}
    for event in events:
        # JSON has no infinity, and a row may have any number.
        if not math.isfinite(event.get("ts", 0.0) + event.get("dur", 0.0)):
            continue
        if event["ph"] == "X":
            lane, begin = (event["pid"], event["tid"]), event["ts"]
            end = round(begin + event["dur"], 1)
            if 0 < (late := ends.get(lane, -math.inf) - begin) <= _GAP * 1e6:
                event |= {"ts": ends[lane], "dur": max(0.0, round(event["dur"] - late, 1))}
            ends[lane] = max(end, event["ts"])
        yield event


class _RunTrace:
    """The timeline of a run. begin: the moment 0, in seconds since 1970, by the first process's clock: the first event of any process."""

    def __init__(self, run: Path, last_s: float | None, step: int | None):
        self._run, begins, resumed = run, list[float](), list[float]()
        for line in _lines(events_file(run, 0)):
            # As a start's summary has it: the first of these events says where it resumed. All others are not read twice.
            if begins and resumed[-1] < math.inf and b'"start"' not in line:
                continue
            if (event := as_event(read_object(line))) is None:
                continue
            if event.phase == "start" or not begins:
                begins.append(event.time)
                resumed.append(math.inf)
            resumed[-1] = min(resumed[-1], _resumed(event))
        firsts = (next(_aligned(_events(run, process)), None) for process in (*processes_of(run), LAUNCHER))
        self.begin = min((first[0].time for first in firsts if first is not None), default=0.0)
        self._begins, self._limits = begins, preserved_steps(resumed)
        last = [event for row in (*read_tail(events_file(run, 0), _TAIL), left_open(run, 0)) if (event := as_event(row)) is not None]
        end = max((event.time + event.seconds for event in last), default=math.inf)
        self._since, self._until = -math.inf if last_s is None else end - last_s, math.inf
        if step is not None:
            profile = DeviceLanes(run, 0)
            if not profile.first <= step <= profile.last:
                known = (
                    f"has steps {profile.first} to {profile.last}"
                    if profile.last
                    else "does not exist: ask for one by --profile or jgt top"
                )
                raise InputError([f"{run}: --step: {step}: the profile {known}"])
            self._since, self._until = profile.begin, profile.end

    def events(self) -> Iterator[dict[str, object]]:
        """All events, process by process."""
        for process in sorted(processes_of(self._run)):
            yield from self._process(process, process)
        yield from DeviceLanes(self._run, 0).planned(self.begin)
        yield from self._process(LAUNCHER, _LAUNCHER_PID)
        with contextlib.suppress(OSError):
            for row in read_metrics(self._run / "metrics.jsonl"):
                at = row.get("time")
                for name in _COUNTERS:
                    if isinstance(at, float) and self._since <= at <= self._until and isinstance(value := row.get(name), int | float):
                        yield {"ph": "C", "name": name, "pid": 0, "ts": self._us(at), "args": {name: value}}

    def _process(self, process: int | str, pid: int) -> Iterator[dict[str, object]]:
        name, end, last, saves, ahead = str(process), None, -math.inf, dict[int | None, float](), 0.0
        for event, by in _aligned(_events(self._run, process)):
            ahead, finish = by, event.time + event.seconds
            if event.time > self._until:
                break
            if event.phase == "start":
                name = f"process {process} ({event.text('host') or ''})"
                yield from self._between(end, last, event.time, pid)
            last = max(last, finish)
            if event.phase == "write":
                saves[event.natural("step")] = finish
            if event.phase in _NO_PHASES:
                yield from [self._beside(event, pid)] if finish >= self._since else []
                continue
            if finish >= self._since:
                yield from self._phase(event, pid)
            if event.phase == "restore" and (step := event.natural("step")) in saves:
                yield from self._flow(saves[step], event.time, step, pid)
            end = max(finish, end or finish)
        yield from self._between(end, last, last, pid)
        if end is not None:
            yield from _names(name, pid)
            yield from DeviceLanes(self._run, process).events(pid, self.begin + ahead)

    def _between(self, end: float | None, last: float, begin: float, pid: int) -> Iterator[dict[str, object]]:
        """The slices from the end of the last phase of a start to the last event of it, and from there to the next start."""
        if end is None:
            return
        last = max(end, min(last, begin))
        for name, cause, since, until in (("other", "other", end, last), ("between two starts", "down", last, begin)):
            if until > max(since + _GAP, self._since) and since <= self._until:
                yield self._slice(name, cause, since, until - since, pid)

    def _phase(self, event: Event, pid: int) -> Iterator[dict[str, object]]:
        """The slice of a phase; of steps of which some were lost, two."""
        stretch = stretch_of(event) if event.phase == "step" else None
        if stretch is None:
            what = event.text("what") or event.text("hook")
            name = event.phase if what is None else f"{event.phase}: {what}"
            yield self._slice(name, CAUSE_OF.get(event.phase, "other"), event.time, event.seconds, pid, event.details)
            return
        start = max(0, bisect.bisect_right(self._begins, event.time + _GAP) - 1)
        kept = stretch.steps_up_to(self._limits[start]) if self._limits else stretch.steps
        seconds = event.seconds * kept / stretch.steps
        if kept:
            name = f"steps {stretch.first} to {stretch.first + kept - 1}"
            yield self._slice(name, "steps", event.time, seconds, pid, event.details)
        if kept < stretch.steps:
            name = f"lost steps {stretch.first + kept} to {stretch.last}"
            yield self._slice(name, "redone", event.time + seconds, event.seconds - seconds, pid, event.details)

    def _slice(
        self, name: str, cause: str, begin: float, seconds: float, pid: int, args: Mapping[str, object] | None = None
    ) -> dict[str, object]:
        shown = {"cname": _COLOURS[cause]} if cause in _COLOURS else {}
        where = {"pid": pid, "tid": pid, "ts": self._us(begin), "dur": round(seconds * 1e6, 1)}
        return {"ph": "X", "name": name, "cat": cause, **where, **shown, "args": args or {}}

    def _beside(self, event: Event, pid: int) -> dict[str, object]:
        step, args = event.natural("step"), dict(event.details)
        name = event.phase if step is None else f"{event.phase} {step}"
        if event.phase in _INSTANTS:
            return {
                "ph": "i",
                "s": "p",
                "name": name,
                "cat": event.phase,
                "pid": pid,
                "tid": pid,
                "ts": self._us(event.time),
                "args": args,
            }
        took = event.details.get("took")
        # An export is noted when it ends.
        seconds = took if event.phase == "export" and isinstance(took, int | float) and 0 <= took < 1e9 else event.seconds
        begin = event.time - seconds if event.phase == "export" else event.time
        where = {"pid": pid, "tid": _BESIDE_PHASES[event.phase] + pid, "ts": self._us(begin), "dur": round(seconds * 1e6, 1)}
        return {"ph": "X", "name": name, "cat": "beside", **where, "args": args}

    def _flow(self, saved: float, restored: float, step: int | None, pid: int) -> Iterator[dict[str, object]]:
        """An arrow from the end of a save to the restart that used it."""
        number = f"{step}-{restored}"
        common = {"name": f"checkpoint {step}", "cat": "checkpoint", "id": number, "pid": pid}
        yield {"ph": "s", **common, "tid": _BESIDE_PHASES["write"] + pid, "ts": self._us(saved) - 1}
        yield {"ph": "f", "bp": "e", **common, "tid": pid, "ts": self._us(restored) + 1}

    def _us(self, at: float) -> float:
        """Microseconds since the beginning of the run."""
        return round((at - self.begin) * 1e6, 1)


def _names(name: str, pid: int) -> Iterator[dict[str, object]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": -1 if pid == _LAUNCHER_PID else pid}}
    for lane, title in (pid, "phases"), *((_BESIDE_PHASES[phase] + pid, title) for phase, title in _TITLES.items()):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": lane, "args": {"name": title}}


def _aligned(events: Iterator[Event]) -> Iterator[tuple[Event, float]]:
    """The events by the first process's clock, with which each start has compared its own, and by how much its own is ahead."""
    ahead = 0.0
    for event in events:
        if event.phase == "start":
            clock = event.details.get("clock")
            ahead = float(clock) if isinstance(clock, float) and abs(clock) < 1e9 else 0.0
        yield Event(event.phase, event.time - ahead, event.seconds, event.details) if ahead else event, ahead


def _events(run: Path, process: int | str) -> Iterator[Event]:
    row = left_open(run, process)
    for found in itertools.chain(map(read_object, _lines(events_file(run, process))), [row]):
        if (event := as_event(found)) is not None:
            yield event


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file; none if there is no file."""
    if path.is_file():
        with open_file(path) as file:
            yield from iter(lambda: file.readline(_LONGEST_LINE), b"")


def _resumed(event: Event) -> float:
    """The step that a start resumed from, if this event of it says so; otherwise infinity."""
    if event.phase == "init":
        return 0.0
    step = event.natural("step") if event.phase == "restore" else None
    stretch = stretch_of(event) if event.phase == "step" else None
    return float(step) if step is not None else math.inf if stretch is None else float(stretch.first - 1)
