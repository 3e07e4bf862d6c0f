"""Alerts: a line, an event and a command of the user's for what a person should look at while a run trains (the section `alerts:`).

The first process watches for the whole run, in a thread of its own: the metrics reach it as they reach a logger, and the statuses and the
disk are read now and then. Each kind of alert is reported once when its reason begins, and again only if the reason goes away and returns.
The command runs in this thread, never longer than `alerts.seconds`, so that neither a slow nor a failing one delays a step.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import queue
import shutil
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...files.streams import say
from ...journal.members import ProcessStatus, read_member, with_stragglers
from ...journal.sink import Sink
from ...journal.status import processes_of, read_status
from ...records.loggers import Logger
from ...settings.sections import AlertsConfig

_SECONDS = 10.0
"""The time between two looks at processes and disk."""
_LAST_SECONDS = 5.0
"""A run that ends waits so long for its last alert."""
_SILENT_SECONDS = 60.0
"""A process that says nothing counts as one with at most this limit."""
_USUAL, _FEWEST = 50, 5
"""Logged steps that a value is compared with: at most, and at least."""
_SPEEDS = ("tokens_per_s", "samples_per_s")


class Alerts(Logger):
    """The alerts of a run. Call `begin` with a function that records an event, and `close` it."""

    def __init__(self, config: AlertsConfig, folder: Path):
        # The logger loses no record of the run, so it reports no loss.
        super().__init__(Sink("alerts", lambda record: None))
        self._config, self._folder = config, folder
        self._rows = queue.SimpleQueue[tuple[int, Mapping[str, Any]] | None]()
        self._before = {name: collections.deque[float](maxlen=_USUAL) for name in ("loss", *_SPEEDS)}
        self._active, self._slow, self._step, self._has_failed = set[str](), set[int](), 0, False
        self._event: Callable[..., None] | None = None
        self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)

    def begin(self, event: Callable[..., None]) -> None:
        """Begins to watch. event: `Records.event`."""
        self._event = event
        # If the system allows no further thread, the run has no alerts.
        with contextlib.suppress(RuntimeError):
            self._thread.start()

    def add(self, step: int, values: Mapping[str, object]) -> None:
        """Looks at the metrics of a step, in the thread of the alerts."""
        self._rows.put((step, values))

    def alert(self, kind: str, message: str) -> None:
        """Reports something that the run has found itself, in the thread of the alerts."""
        self._rows.put((0, {kind: message}))

    def close(self) -> None:
        """Waits a moment for the last alert."""
        self._rows.put(None)
        if self._thread.is_alive():
            self._thread.join(_LAST_SECONDS)

    def _run(self) -> None:
        looked = time.monotonic()
        while True:
            row: tuple[int, Mapping[str, Any]] | None = (0, {})
            with contextlib.suppress(queue.Empty):
                row = self._rows.get(timeout=_SECONDS)
            if row is None:
                return
            if row[0]:
                self._step = row[0]
                self._judge(("loss", "throughput"), dict(self.of_metrics(row[1])))
            elif row[1]:
                self._judge((*row[1],), row[1])
            if time.monotonic() - looked >= _SECONDS:
                # A run directory that somebody removes, or a file system that fails, is not a reason to stop looking.
                with contextlib.suppress(OSError):
                    self._judge(("straggler", "progress", "disk"), dict(self.of_run()))
                looked = time.monotonic()

    def of_metrics(self, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """The alerts of a step's metrics, by their kind."""
        # An evaluation has no loss of training.
        loss = values.get("loss")
        if loss is None and "loss" in values:
            yield "loss", "the loss is not finite"
        elif loss is not None and self._is_beyond("loss", loss, lambda usual: usual + (self._config.spike or 0) * abs(usual)):
            yield "loss", f"the loss is {loss:.4g}, and was {statistics.median(self._before['loss']):.4g}"
        for name in _SPEEDS:
            speed, share = values.get(name), self._config.throughput
            if speed is not None and share is not None and len(self._before[name]) >= _FEWEST:
                usual = statistics.median(self._before[name])
                if speed < share * usual:
                    yield "throughput", f"{speed:,.0f} {name.partition('_')[0]} per second, and it was {usual:,.0f}"
        for name, before in self._before.items():
            if values.get(name) is not None:
                before.append(values[name])

    def of_run(self) -> Iterator[tuple[str, str]]:
        """The alerts of the processes and of the disk, by their kind."""
        config, now = self._config, time.time()
        found = ((p, read_status(self._folder, p)) for p in sorted(processes_of(self._folder, "status")))
        members = with_stragglers([m for p, status in found if status is not None and (m := read_member(status, p, now)) is not None])
        # Twice in a row: anything may slow a host for a second.
        slow = {m.process for m in members if config.straggler is not None and (m.slower or 0.0) >= config.straggler}
        slow, self._slow = slow & self._slow, slow
        for member in members:
            if member.process in slow:
                yield "straggler", f"process {member.process} on {member.host} holds up the others: {next(member.notes)}"
            quiet, limit = _quiet(member)
            if config.progress is not None and quiet > config.progress * limit:
                yield "progress", f"process {member.process} on {member.host} has made no progress for {quiet:.0f} s: {member.phase}"
        disk = shutil.disk_usage(self._folder)
        if config.disk is not None and disk.free < config.disk * disk.total:
            yield "disk", f"the disk of {self._folder} has {disk.free / 1e9:.1f} of {disk.total / 1e9:.1f} GB left"

    def _is_beyond(self, name: str, value: float, limit: Callable[[float], float]) -> bool:
        before = self._before[name]
        return self._config.spike is not None and len(before) >= _FEWEST and value > limit(statistics.median(before))

    def _judge(self, kinds: tuple[str, ...], found: Mapping[str, str]) -> None:
        """Reports the alerts of these kinds that have begun."""
        for kind, text in found.items():
            if kind not in self._active:
                say(f"alert: {text}")
                if self._event is not None:
                    self._event("alert", time.time(), 0.0, kind=kind, message=text, step=self._step)
                self._call({"JGT_ALERT": kind, "JGT_MESSAGE": text, "JGT_STEP": str(self._step), "JGT_RUN": str(self._folder)})
        self._active = (self._active - {*kinds}) | found.keys()

    def _call(self, facts: Mapping[str, str]) -> None:
        """Runs the user's command, and says the first time that it fails."""
        if not self._config.command:
            return
        try:
            why = self._ended(facts)
        except (OSError, ValueError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        if why and not self._has_failed:
            self._has_failed = True
            say(f"alerts.command failed: {why}. Training continues")

    def _ended(self, facts: Mapping[str, str]) -> str:
        """Runs the command, with its children. Returns what is wrong with it, or nothing."""
        none = subprocess.DEVNULL
        process = subprocess.Popen(
            self._config.command, env=os.environ | facts, start_new_session=True, stdin=none, stdout=none, stderr=none
        )
        try:
            code = process.wait(self._config.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"it took more than {self._config.seconds:g} s"
        return f"it ended with exit code {code}" if code else ""


def _quiet(member: ProcessStatus) -> tuple[float, float]:
    """The seconds since a process has made progress, and those after which its watch ends it; infinite if it may take any time."""
    if member.state == "runs":
        return member.idle_s or 0.0, member.limit_s or math.inf
    # One that writes no status may be gone, with its watch.
    return member.age_s, math.inf if member.state == "ended" else min(member.limit_s or _SILENT_SECONDS, _SILENT_SECONDS)
