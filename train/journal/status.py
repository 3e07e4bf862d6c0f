"""The status of each process of a run, `status-P.json`, which the process replaces once a second.

Its readers (`jgt top`, `jgt report`, the next start) tell by it what a process does that has not ended: how long it has been compiling, the
step that hangs, and where a killed process was. Its writer has a thread of its own. A disk that does not answer delays this thread, and
neither the one that trains nor the watch, which has to end what hangs. A process that is suspended writes nothing, so an old file says that
too.

A process appends an event when a phase ends, and its status has the phase that has not. Whoever reads the events of a process that was
killed, or that still runs, adds this row (`left_open`), so that the events reach up to its last second.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ..files.disk import replaced, write_whole
from ..files.json_text import read_object_file
from ..files.worker import Worker
from .rows import read_tail
from .sink import Sink
from .timeline import Timeline

LAUNCHER = "launcher"
REQUEST, REQUESTS = "request.json", ("save", "profile")
"""The file by which anyone who may write in the run directory asks for one of these."""
_TAIL = 1 << 17
_SECONDS = 1.0
_LAST_SECONDS = 1.0
"""How long a process that ends waits for its last status."""
_LATE_SECONDS = 3.0
"""Events may be this much later than a status of the same start."""


def events_file(run: Path, process: int | str) -> Path:
    """The events file of a process, or of the launcher."""
    return run / ("events.jsonl" if process == 0 else f"events-{process}.jsonl")


def status_file(run: Path, process: int | str) -> Path:
    """The file with the status of a process, or of the launcher."""
    return run / f"status-{process}.json"


def read_status(run: Path, process: int | str) -> Mapping[str, object] | None:
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


def left_open(run: Path, process: int | str) -> dict[str, object] | None:
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


class Status:
    """Writes the status of a process until it is closed. process: its number, or `launcher`. now(): what else the status says.

    is_ours(): whether the run directory still belongs to this run; if not, nothing is written. asked(what) is called for what the run is
    asked for by a file; of all processes, one has it.
    """

    def __init__(
        self,
        folder: Path,
        process: int | str,
        timeline: Timeline,
        now: Callable[[], Mapping[str, object]] = dict,
        is_ours: Callable[[], bool] = lambda: True,
        asked: Callable[[str], object] | None = None,
    ):
        self._path, self._timeline, self._now, self._is_ours = status_file(folder, process), timeline, now, is_ours
        self._fixed = {"process": process, "host": socket.gethostname(), "pid": os.getpid()}
        self._asked = asked
        self._sink = Sink(self._path.name, self._replace)
        # A request that is there before the run is for its first steps, however few these are.
        self._take()
        self._worker = Worker("status", _SECONDS, self._tick)
        self._worker.wake()
        # The system may allow no further thread; then the run has no status.
        with contextlib.suppress(RuntimeError):
            self._worker.start()

    def close(self) -> None:
        """Writes the last status, with why the process ended, and returns; within a second, also if the disk does not answer."""
        self._timeline.figures.setdefault("end", "ended")
        self._worker.close(_LAST_SECONDS)

    def _tick(self, is_last: bool) -> None:
        if self._is_ours():
            self.write()
        if not is_last:
            self._take()

    def _take(self) -> None:
        if self._asked is not None:
            for what in take_requests(self._path.parent):
                self._asked(what)

    def write(self) -> None:
        """Writes the status as it is now, or says once that this fails."""
        now = dict[str, object]()
        # A device that fails may not say how much memory it has.
        with contextlib.suppress(Exception):
            now.update(self._now())
        fixed = {**self._fixed, "time": round(time.time(), 3)}
        self._sink.put(json.dumps({**fixed, **self._timeline.figures, **now, "row": self._timeline.open_row()}, default=str))

    def _replace(self, text: str) -> None:
        with replaced(self._path, is_of_run=True) as new, new.open("x") as file:
            file.write(text)
