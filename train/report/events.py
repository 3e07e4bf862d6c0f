"""The lines of an events file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_COUNT = 2**53
MAX_SECONDS = 253_402_300_800
"""The year 10000. Larger numbers are no event's."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line. time: when it began, seconds since 1970; details: its other keys."""

    phase: str
    time: float
    seconds: float
    details: Mapping[str, Any]

    @property
    def end(self) -> float:
        """When it ended, seconds since 1970."""
        return self.time + self.seconds

    def count(self, key: str) -> int | None:
        """A detail that is a whole number, not negative; None where it is absent or another thing."""
        value = self.details.get(key)
        return value if type(value) is int and 0 <= value < MAX_COUNT else None

    def text(self, key: str) -> str | None:
        """A detail that is text; None where it is absent or another thing."""
        value = self.details.get(key)
        return value if isinstance(value, str) else None


def read_events(path: Path) -> tuple[list[Event], int]:
    """The events of a file, and how many of its lines could not be read. Raises OSError."""
    events: list[Event] = []
    unreadable = 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.strip():
            continue
        event = _event(line)
        if event is None:
            unreadable += 1
            # A killed process cuts its last line short, and the next start goes on behind it, in the same line.
            event = _event(line[max(line.rfind('{"phase"'), 0) :])
        if event is not None:
            events.append(event)
    return events, unreadable


def seconds_of(value: Any) -> float | None:
    """A number of seconds, not negative; None where it is another thing."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if plain and 0 <= value < MAX_SECONDS else None


def _event(line: str) -> Event | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    phase, time, seconds = row.pop("phase", None), seconds_of(row.pop("time", None)), seconds_of(row.pop("seconds", None))
    if not isinstance(phase, str) or time is None or seconds is None:
        return None
    return Event(phase=phase, time=time, seconds=seconds, details=row)
