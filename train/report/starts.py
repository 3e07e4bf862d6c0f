"""The starts of a run: what one process did from its creation to its last event."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from train.report.events import Event, seconds_of

KILLED = "killed"


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Steps one after another, first and last included. busy: the seconds of them that the host spent on its own work."""

    first: int
    last: int
    seconds: float
    busy: float | None

    @property
    def steps(self) -> int:
        """How many."""
        return self.last - self.first + 1

    def kept(self, limit: float) -> int:
        """How many of its steps are not after `limit`."""
        return max(0, min(self.steps, int(min(limit, self.last)) - self.first + 1))


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start, as far as its events tell; what they do not tell is None.

    begin, end: seconds since 1970; the end is that of the last event. resumed: the step it went on from; reached: the last
    step known to be done. ended: the `why` of its `stop`; without one `killed` if another start followed. seconds: by phase,
    steps left out.
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

    def to_json(self) -> dict[str, Any]:
        """What a report says of it."""
        return {name: getattr(self, name) for name in ("begin", "end", "resumed", "reached", "ended", "processes", "devices", "host")}


def find_starts(events: Sequence[Event]) -> tuple[Start, ...]:
    """The starts in the events of one process, in their order."""
    groups = list(_groups(events))
    return tuple(_start(group, last=group is groups[-1]) for group in groups)


def _groups(events: Sequence[Event]) -> Iterator[list[Event]]:
    """A start begins at `start`; in older files, and where that line was lost, at `verify`."""
    group: list[Event] = []
    for event in events:
        if group and (event.phase == "start" or (event.phase == "verify" and any(e.phase == "verify" for e in group))):
            yield group
            group = []
        group.append(event)
    if group:
        yield group


def _start(events: Sequence[Event], *, last: bool) -> Start:
    by_phase: dict[str, list[Event]] = {}
    for event in events:
        by_phase.setdefault(event.phase, []).append(event)
    resumed = next((e.count("step") for e in by_phase.get("restore", ())), 0 if "init" in by_phase else None)
    stretches = tuple(_stretches(by_phase.get("step", ()), resumed or 0))
    if resumed is None and stretches:
        resumed = stretches[0].first - 1
    stop, opening = by_phase.get("stop", [None])[-1], by_phase.get("start", [None])[0]
    known = [e.count("step") for name in ("save", "eval", "stop") for e in by_phase.get(name, ())]
    return Start(
        begin=events[0].time,
        end=round(max(event.end for event in events), 6),
        resumed=resumed,
        reached=max((step for step in [*known, *(s.last for s in stretches), resumed] if step is not None), default=None),
        ended=stop.text("why") if stop is not None else None if last or opening is None else KILLED,
        processes=opening.count("processes") if opening is not None else None,
        devices=opening.count("devices") if opening is not None else None,
        host=opening.text("host") if opening is not None else None,
        seconds={name: sum(e.seconds for e in found) for name, found in by_phase.items() if name != "step"},
        stretches=stretches,
    )


def _stretches(events: Sequence[Event], done: int) -> Iterator[Stretch]:
    """Older files have one for all steps of a start, with their number only."""
    for event in events:
        first, last, steps = (event.count(key) for key in ("first", "last", "steps"))
        first = done + 1 if first is None else first
        last = first + (steps or 0) - 1 if last is None else last
        if first >= 1 and last >= first:
            busy = seconds_of(event.details.get("busy"))
            yield Stretch(first=first, last=last, seconds=event.seconds, busy=busy)
            done = last
