"""A run at this moment, read from the ends of its files: a frame costs the same for a run of a month as for one of an hour.

The status of each process is one small file. Of the metrics and the events only the last part is read, and the events again only if they
have grown, at most every ten seconds. So goodput and the counts of starts are those of the last megabyte, which is the whole run unless it
is of an older version or was started very often.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jgt.document import InputError

from ...files.json_text import read_object_file
from ...journal.accounts import NO_RECORD, account
from ...journal.events import Event, as_event
from ...journal.members import ProcessStatus, clean, number, read_member, whole, with_stragglers
from ...journal.rows import read_tail
from ...journal.status import LAUNCHER, events_file, processes_of, read_status

_METRICS_BYTES, _EVENTS_BYTES, _LANE_BYTES = 1 << 17, 1 << 20, 1 << 13
_EVENTS_SECONDS = 10.0
UPDATE_SECONDS = 10.0
"""The time between two updates of a copy."""
_RATE_ROWS = 200
"""The last logged steps from which the time left follows."""
_SHOWN = (
    "start",
    "stop",
    "fault",
    "nonfinite",
    "spike",
    "save_failed",
    "alert",
    "export",
    "export_failed",
    "write",
    "config",
    "eval",
    "profile",
)
"""The events that are worth a line."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run. members: its processes, the worst first. rows: the last rows of its metrics. events: its last events, oldest first.

    goodput, starts, restarts_after, skipped, causes: as in `train.journal.accounts`. lanes: by process, its last events. signals: the
    table of the last profile; empty without one. restarting_s: the seconds until the launcher starts the processes again, if it is
    about to.
    """

    name: str
    now: float
    members: tuple[ProcessStatus, ...]
    rows: tuple[Mapping[str, object], ...]
    goodput: float | None
    starts: int
    restarts_after: Mapping[str, int]
    skipped: int
    events: tuple[Event, ...]
    lanes: Mapping[int, Sequence[Event]]
    signals: Mapping[str, object] = field(default_factory=dict[str, object])
    restarting_s: float | None = None
    causes: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def step(self) -> int:
        """The last step that is finished."""
        logged = [step for row in self.rows if (step := whole(row.get("step"))) is not None]
        return max([m.finished for m in self.members if m.finished is not None], default=max(logged, default=0))

    @property
    def total(self) -> int | None:
        """The steps of the whole run."""
        return max((m.total for m in self.members if m.total is not None), default=None)

    @property
    def eta_s(self) -> float | None:
        """The seconds that are left, by the wall time of the last logged steps with all that came between them."""
        steps = [(whole(row.get("step")), number(row.get("time"))) for row in self.rows[-_RATE_ROWS:] if "loss" in row]
        known = [(step, at) for step, at in steps if step is not None and at is not None]
        if len(known) < 2 or self.total is None or known[-1][0] <= known[0][0] or known[-1][1] <= known[0][1]:
            return None
        (first, begin), (last, end) = known[0], known[-1]
        return (end - begin) / (last - first) * max(0, self.total - self.step)

    def curve(self, metric: str) -> list[float]:
        """The last values of a metric."""
        return [value for row in self.rows if (value := number(row.get(metric))) is not None]

    def last(self, metric: str) -> float | None:
        """The last value of a metric."""
        return next((value for row in reversed(self.rows) if (value := number(row.get(metric))) is not None), None)

    def to_json(self) -> dict[str, object]:
        """The numbers of a frame as plain values."""
        names = ("loss", "grad_norm", "lr", "tokens_per_s", "samples_per_s", "mfu", "eval_loss", "step_time_s")
        members = [asdict(m) | {"shares": m.shares, "notes": list(m.notes)} for m in self.members]
        last = {name: self.last(name) for name in names}
        known = {
            name: getattr(self, name) for name in ("name", "now", "step", "total", "eta_s", "goodput", "starts", "skipped", "restarting_s")
        }
        return {**known, "restarts_after": dict(self.restarts_after), "last": last, "processes": members}


class Watched:
    """A run that is read again and again. folder: its directory, or a copy of it. Raises InputError if it is not a run directory.

    update: brings a copy up to date, which is then at most `late` seconds older than the run.
    """

    def __init__(self, folder: Path, update: Callable[[], None] | None = None, late: float = 0.0):
        if not any(events_file(folder, 0).parent.glob("events*.jsonl")) and not any(processes_of(folder, "status")):
            why = ": it has no events.jsonl" if folder.is_dir() else ""
            raise InputError([f"{folder}: is not a run directory{why}. Name one, such as runs/quickstart"])
        self.folder, self.update, self._late = folder, update, late
        self._updated = time.monotonic()
        self._accounts: tuple[float, int, dict[str, Any]] = (0.0, -1, {})
        self._tails: dict[Path, tuple[int, list[dict[str, object]]]] = {}
        """The ends of files, with the sizes at which they were read."""

    def read(self, now: float | None = None, lanes: int = 0) -> RunView:
        """The run at this moment. now: seconds since 1970. lanes: of how many processes, the worst first, the last events are read."""
        if self.update is not None and time.monotonic() - self._updated > UPDATE_SECONDS:
            # The store may fail for a while; what is there gets older then.
            with contextlib.suppress(OSError, InputError):
                self.update()
            self._updated = time.monotonic()
        now = time.time() if now is None else now
        read = {process: read_status(self.folder, process) for process in sorted(processes_of(self.folder, "status"))}
        statuses = {process: status for process, status in read.items() if status is not None}
        found = [read_member(status, process, now, self._late) for process, status in statuses.items()]
        members = with_stragglers([member for member in found if member is not None])
        launcher = read_status(self.folder, LAUNCHER) or {}
        return RunView(
            name=clean(self.folder.resolve().name, 40),
            now=now,
            members=tuple(members),
            rows=tuple(self._tail(self.folder / "metrics.jsonl", _METRICS_BYTES)),
            lanes={m.process: self._lane(m.process, statuses[m.process]) for m in members[:lanes]},
            signals=_signals(self.folder / "profile" / "signals.json"),
            restarting_s=_left(launcher, now),
            **self._of_events(now),
        )

    def _lane(self, process: int, status: Mapping[str, object]) -> tuple[Event, ...]:
        """The last events of a process, and the phase that it has not ended."""
        row = status.get("row")
        unfinished = as_event(dict(row)) if isinstance(row, dict) else None
        return (*self._events(process, _LANE_BYTES), *filter(None, [unfinished]))

    def _of_events(self, now: float) -> dict[str, Any]:
        """The fields of `RunView` that follow from the events of the first process."""
        path = events_file(self.folder, 0)
        size = path.stat().st_size if path.is_file() else 0
        at, before, known = self._accounts
        if size == before or abs(now - at) < _EVENTS_SECONDS:
            return known
        events = list(self._events(0, _EVENTS_BYTES))
        accounts = account("", events) if events else None
        known = {
            "goodput": accounts and accounts.goodput,
            "starts": 0 if accounts is None else len(accounts.starts),
            "restarts_after": dict(Counter(clean(s.ended, 20) or NO_RECORD for s in accounts.starts[:-1])) if accounts else {},
            "skipped": sum(accounts.skipped.values()) if accounts else 0,
            "causes": {cause: share.seconds for cause, share in accounts.causes.items()} if accounts else {},
            "events": tuple(event for event in events if event.phase in _SHOWN)[-100:],
        }
        self._accounts = (now, size, known)
        return known

    def _events(self, process: int, size: int) -> Iterator[Event]:
        # Copies, because an event takes the keys of its row.
        rows = self._tail(events_file(self.folder, process), size)
        return (event for row in rows if (event := as_event(dict(row))) is not None)

    def _tail(self, path: Path, size: int) -> list[dict[str, object]]:
        """The rows at the end of a file, which is read again when it has grown."""
        try:
            length = path.stat().st_size
            if self._tails.get(path, (-1, []))[0] != length:
                self._tails[path] = (length, read_tail(path, size))
        except OSError:
            return []
        return self._tails[path][1]


def _signals(path: Path) -> Mapping[str, object]:
    """The table of the last profile; empty if there is none, or one that is not as a run writes it."""
    try:
        return {"time": path.stat().st_mtime, **(read_object_file(path) or {})}
    except OSError:
        return {}


def _left(launcher: Mapping[str, object], now: float) -> float | None:
    """The seconds until the launcher starts its processes again."""
    row, limit = launcher.get("row"), number(launcher.get("limit_s"))
    begun = number(row.get("time")) if isinstance(row, dict) else None
    return None if launcher.get("end") or begun is None or limit is None else max(0.0, begun + limit - now)
