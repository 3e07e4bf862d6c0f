"""The status of each process of a run, read back from `status-P.json`, and the event that a process has not written yet.

A process appends an event when a phase ends, and its status has the phase that has not. Whoever reads the events of a process that was
killed, or that still runs, adds this row (`left_open`), so that the events reach up to its last second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.disk import write_whole
from .rows import read_object_file, read_tail

LAUNCHER = "launcher"
REQUEST, REQUESTS = "request.json", ("save", "profile")
"""The file by which anyone who may write in the run directory asks for one of these."""
_TAIL = 1 << 17
_LATE_SECONDS = 3.0
"""Events may be this much later than a status of the same start."""


def events_file(run: Path, process: int | str) -> Path:
    """The events file of a process, or of the launcher."""
    return run / ("events.jsonl" if process == 0 else f"events-{process}.jsonl")


def status_file(run: Path, process: int | str) -> Path:
    """The file with the status of a process, or of the launcher."""
    return run / f"status-{process}.json"


def read_status(run: Path, process: int | str) -> Mapping[str, Any] | None:
    """The last status of a process; None without one that can be read."""
    try:
        return read_object_file(status_file(run, process))
    except OSError:
        return None


def processes_of(run: Path, kind: str = "events") -> Iterator[int]:
    """The processes that have a file of a kind: `events` or `status`. A file of another name, such as someone's copy, is not the run's."""
    if kind == "events" and events_file(run, 0).is_file():
        yield 0
    for path in run.glob(f"{kind}-*.json*"):
        number = path.name.removeprefix(f"{kind}-").removesuffix({"events": ".jsonl", "status": ".json"}[kind])
        if number.isdecimal() and str(int(number)) == number and (kind == "status" or number != "0"):
            yield int(number)


def left_open(run: Path, process: int | str) -> dict[str, Any] | None:
    """The event of the phase that a process had not ended at its last status; None if its events have it, or if it has ended."""
    status = read_status(run, process) or {}
    row, time = status.get("row"), status.get("time")
    if not isinstance(row, dict) or not isinstance(time, float):
        return None
    try:
        times = [event.get("time") for event in read_tail(events_file(run, process), _TAIL)]
    except OSError:
        times = []
    # A status that is older than the events is of an earlier start, whose successor could not write its own.
    is_old = any(isinstance(at, int | float) and at > time + _LATE_SECONDS for at in times)
    return None if is_old or row.get("time") in times else dict(row)


def ask(run: Path, what: str) -> None:
    """Asks the processes of a run to save, or to profile a step: `what` is `save` or `profile`. Raises OSError."""
    write_whole(run / REQUEST, json.dumps({what: True}))


def take_requests(run: Path) -> set[str]:
    """The words of what the run was asked for since the last call."""
    path = run / REQUEST
    try:
        found = read_object_file(path) or {}
        path.unlink()
    except OSError:
        return set()
    return {what for what in REQUESTS if found.get(what) is True}
