"""The processes of a run at this moment, from their status files, with the worst first.

Each process replaces its status once a second, so an old one says that the process is not running: it was killed, it is suspended, or its
host or file system does not answer. On its own host the process table tells which. Its clock is compared with the first process's, which
it has measured at its start.

All processes of a step take the same time, since they wait for each other. So the one that holds the others up is found by what it does
meanwhile: it reads data or does other work of the host while they wait for their devices. A process is named if the step would take less
than 1 / 1.2 of its time if this process had no more such work than the others, in both of its last two measurements.
"""

from __future__ import annotations

import math
import socket
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jgt.document import shown

SILENT_SECONDS = 2.5
"""A status that is older says that its process does not run."""
SLOWER = 1.2
_ALMOST = 0.5
"""The share of its limit from which on a step or a phase is worth a note."""
_FULL = 0.97


def clean(value: object, most: int = 60) -> str:
    """Text of a run's file for a terminal: printable ASCII, cut after `most` characters. Empty if it is not text."""
    # A wide character would shift the columns behind it.
    return shown(value, most, quotes=False).encode("ascii", "backslashreplace").decode()[: most + 3] if isinstance(value, str) else ""


def number(value: object) -> float | None:
    """A finite number of a run's file; None if it is anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    # A whole number of JSON may be too large for a float.
    return float(value) if abs(value) < 1e300 and math.isfinite(value) else None


@dataclass(frozen=True, kw_only=True)
class ProcessStatus:
    """A process. Numbers are None where its status does not have them.

    state: `runs`, `ended`, `silent`, or on this host `killed` or `suspended`. age_s: the seconds since its last word. phase, since_s: what
    it does, and for how long; of a step, since it began. idle_s, limit_s: how long it has made no progress, and how long it may.
    windows: for its last measurements, seconds per step in all, of the host's work, and of waiting for data.
    memory: bytes in use and available, by device. slower: by how much it holds up the others; cause: `data` or `host`.
    """

    process: int
    host: str
    state: str
    age_s: float
    phase: str
    since_s: float | None
    step: int | None
    finished: int | None
    total: int | None
    idle_s: float | None
    limit_s: float | None
    windows: tuple[tuple[float, float, float], ...]
    memory: tuple[tuple[float, float], ...]
    power_w: float | None
    slowed: str
    saving: tuple[int, float] | None
    end: str
    slower: float | None = None
    cause: str = ""

    @property
    def shares(self) -> tuple[float, float, float] | None:
        """The shares of data, of other work of the host and of waiting for devices in the time of its last steps."""
        if not self.windows:
            return None
        total, busy, data = map(sum, zip(*self.windows, strict=True))
        return (data / total, max(0.0, busy - data) / total, max(0.0, total - busy) / total) if total else None

    @property
    def notes(self) -> Iterator[str]:
        """Short texts about what is wrong with it, the worst first."""
        if self.state in ("killed", "suspended"):
            yield self.state
        elif self.state == "silent":
            yield f"no word for {self.age_s:.0f} s"
        elif self.end:
            yield f"ended: {self.end}"
        if self.slower is not None:
            yield f"straggler {self.slower:.1f}x: {self.cause}"
        if self.state == "runs" and self.idle_s is not None and self.limit_s and self.idle_s > _ALMOST * self.limit_s:
            yield f"no progress, {self.idle_s:.0f} of {self.limit_s:.0f} s"
        if self.slowed:
            yield f"slowed: {self.slowed}"
        if (fullest := max((used / limit for used, limit in self.memory if limit), default=0.0)) > _FULL:
            yield f"memory {fullest:.0%} full"

    @property
    def severity(self) -> int:
        """0 for the worst."""
        stuck = self.idle_s is not None and self.limit_s is not None and self.idle_s > _ALMOST * self.limit_s
        is_gone = self.state in ("killed", "suspended", "silent")
        return 0 if is_gone else 1 if self.slower is not None else 2 if stuck else 3 if self.slowed else 4


def read_member(status: Mapping[str, object], process: int, now: float, late: float = 0.0) -> ProcessStatus | None:
    """A process by its status, which may be anything. now: seconds since 1970, by the first process's clock. late: as in `Watched`."""
    at = number(status.get("time"))
    if at is None:
        return None
    row, end = status.get("row"), clean(status.get("end"), 40)
    row = row if isinstance(row, dict) else {}
    age = max(0.0, now - at + (number(status.get("clock")) or 0.0) - late)
    begun, spent, idle = number(row.get("time")), number(row.get("seconds")), number(status.get("idle_s"))
    phase = clean(row.get("phase"), 12)
    since = idle if phase == "step" else spent if begun is not None else None
    saving = status.get("saving")
    saved, saved_since = (whole(saving.get("step")), number(saving.get("since"))) if isinstance(saving, dict) else (None, None)
    host = clean(status.get("host"), 40)
    return ProcessStatus(
        process=process,
        host=host,
        state="ended" if end else "runs" if age <= SILENT_SECONDS else _state(host, whole(status.get("pid"))),
        age_s=age,
        phase=phase or "-",
        since_s=None if since is None else since + age,
        step=whole(status.get("begun")),
        finished=whole(status.get("finished")),
        total=whole(status.get("total")),
        idle_s=None if idle is None else idle + age,
        limit_s=number(status.get("limit_s")),
        windows=tuple(_windows(status.get("recent"))),
        memory=tuple(_pairs(status.get("memory"))),
        power_w=number(status.get("power_w")),
        slowed=clean(status.get("slowed"), 30),
        saving=None if saved is None or saved_since is None else (saved, max(0.0, now - saved_since)),
        end=end,
    )


def whole(value: object) -> int | None:
    """A whole number of at least 0 of a run's file; None if it is anything else."""
    return value if type(value) is int and 0 <= value < 2**53 else None


def _state(host: str, pid: int | None) -> str:
    """The state of a process without a recent status. Another process may have its number by now, so that one that is there is silent."""
    if pid is None or host != socket.gethostname() or not Path("/proc/self/stat").exists():
        return "silent"
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "killed"
    return {"T": "suspended", "t": "suspended", "Z": "killed", "X": "killed"}.get(state, "silent")


def _windows(value: object) -> Iterator[tuple[float, float, float]]:
    for window in value[-2:] if isinstance(value, list) else ():
        if isinstance(window, dict):
            seconds, steps, busy, data = (number(window.get(name)) for name in ("seconds", "steps", "busy", "data"))
            if seconds and steps and seconds > 0 and steps > 0 and busy is not None and data is not None:
                yield seconds / steps, busy / steps, data / steps


def _pairs(value: object) -> Iterator[tuple[float, float]]:
    for pair in value[:64] if isinstance(value, list) else ():
        if isinstance(pair, list) and len(pair) == 2 and (used := number(pair[0])) is not None:
            yield used, number(pair[1]) or 0.0


def with_stragglers(members: Sequence[ProcessStatus]) -> list[ProcessStatus]:
    """The processes, the worst first, with those named that hold up the others."""
    steps = [m for m in members if m.state == "runs" and m.phase == "step" and len(m.windows) == 2]
    found = dict[int, tuple[float, str]]()
    if len(steps) > 1:
        usual = [tuple(statistics.median_low(m.windows[n][part] for m in steps) for part in range(3)) for n in range(2)]
        for member in steps:
            ratios = [_ratio(window, median) for window, median in zip(member.windows, usual, strict=True)]
            if min(ratios)[0] >= SLOWER:
                found[member.process] = min(ratios)
    judged = [replace(m, slower=found[m.process][0], cause=found[m.process][1]) if m.process in found else m for m in members]
    return sorted(judged, key=lambda m: (m.severity, -(m.slower or 0.0), m.process))


def _ratio(window: Sequence[float], usual: Sequence[float]) -> tuple[float, str]:
    """The factor by which a process makes the step longer by work that the others do not have, and the kind of the larger part of it."""
    step, busy, data = window
    more = busy - usual[1]
    # The others could not have waited for more than the whole step.
    without = max(step - more, 0.01 * step)
    return step / without, "data" if data - usual[2] >= more / 2 else "host"
