"""Starts a group of processes again when it fails, until it is done or restarts no longer help.

A restart helps if the failure was an accident, and only progress shows that: a newer checkpoint than before. Restarts are therefore
counted in a row, and the row begins again with each newer checkpoint, so a run of weeks may fail any number of times and a run that
always fails at the same step ends after a few. Pauses double in a row, because a machine that is ill needs time.

A process that a signal has killed may be gone for good, with its memory or its device. So the next start leaves it out, if it may, and the
following start takes it in again. If all together then bring no newer checkpoint, the number that did bring one is used again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from jgt.document import InputError

from ..checkpoint.steps import open_steps
from ..config import Run
from ..files.disk import describe, open_file
from ..files.ends import Exit
from ..files.streams import say_lines
from ..journal.sink import AppendedFile
from ..journal.status import LAUNCHER, Status, events_file
from ..journal.timeline import OTHER, Timeline
from ..run.directory.folder import LOGS, earlier_files, lock_folder
from .group import End, Group, environments, log_of, report

_LAST_LINES, _LAST_BYTES = 20, 1 << 14
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_LONGEST_DELAY_SECONDS = 60.0
# 2 ** 6 seconds is more than the longest delay. Without the bound the power would overflow after a thousand restarts.
_DOUBLINGS = 6


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The limits of restarts. restarts: the number in a row without a newer checkpoint. min_processes: the fewest after losses."""

    processes: int
    restarts: int
    min_processes: int


class _Processes:
    """The number of processes of each start. count: the number in the present one."""

    def __init__(self, policy: Policy):
        self._policy, self.count = policy, policy.processes
        self._known: int | None = None
        """The number to return to if the present start, which has all processes again, brings nothing."""

    def next(self, *, lost: bool, progress: bool) -> None:
        """Decides about the next start. lost: a process was lost, or their number did not fit; progress: there is a newer checkpoint."""
        fewer = max(self.count - lost, self._policy.min_processes)
        if self._known is not None and not progress:
            self.count, self._known = self._known, None
        elif progress and self.count < self._policy.processes:
            self.count, self._known = self._policy.processes, fewer
        else:
            self.count, self._known = fewer, None


class Launcher:
    """Runs the groups of one run, one after another. It passes signals on to them. After one that stops the run, nothing restarts.

    fewer: groups may have different numbers of processes.
    """

    def __init__(self, arguments: list[str], run: Run, *, grace_seconds: float, fewer: bool = False):
        self._arguments, self._fewer = arguments, fewer
        self._virtual = run.config.devices.virtual_cpu is not None
        self._folder = run.config.run.path
        self._logs, self._steps = self._folder / LOGS, open_steps(run.config.run.checkpoints)
        # Empty without `--resume never`: an earlier run then stays and continues.
        self._earlier = frozenset() if _without_never(arguments) == arguments else earlier_files(self._folder)
        self._grace_seconds = grace_seconds
        self._group: Group | None = None
        self._stopped = threading.Event()
        self._passed_on = False
        self._events = AppendedFile(events_file(self._folder, LAUNCHER))
        self._timeline = Timeline(self._note)

    def __enter__(self) -> Launcher:
        # nohup ignores SIGHUP for what it starts, and that is to stay so.
        passed_on = [number for number in _PASSED_ON if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._pass_on) for number in passed_on}
        return self

    def __exit__(self, *_: object) -> None:
        self._timeline.end()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, processes: int, *, again: bool) -> End:
        """Starts a group and waits for its end. Prints the last lines of the process that failed first, if it writes to a file.

        Raises InUseError if another run is using the directory: a restart would not help.
        """
        # What is wrong with the directory, the processes report.
        with contextlib.suppress(InputError), lock_folder(self._folder):
            pass
        variables = environments(processes, virtual=self._virtual, fewer=self._fewer)
        self._timeline.begin("run", lambda seconds: {"processes": processes})
        try:
            # `--resume never` would discard what the first start saved; but not before that start has moved the earlier run away.
            arguments = _without_never(self._arguments) if again and not self._is_to_be_moved() else self._arguments
            self._group = Group(arguments, variables, self._logs)
        except OSError as error:
            report(f"the processes cannot be started: {describe(error, self._folder)}")
            return End(codes=(Exit.FAILED,), first=0)
        # A signal that came while the group was being started found no group to pass it on to.
        if self._stopped.is_set() and not self._passed_on:
            self._group.send(signal.SIGTERM)
        end = self._group.wait(self._grace_seconds)
        self._timeline.begin(OTHER)
        self._note({"phase": "exit", "time": round(time.time(), 3), "seconds": 0.0, "codes": end.codes, "first": end.first})
        # A signal that comes from now on is for the next group.
        self._group = None
        # Not for the first process (0), whose output is on the terminal already.
        if end.first:
            log = log_of(self._logs, end.first)
            say_lines([f"--- the end of {log}", *_last_lines(log), "---"])
        return end

    def newest_step(self) -> int:
        """The step of the newest checkpoint; 0 if there is none, or if the disk cannot be read."""
        try:
            return 0 if self._is_to_be_moved() else self._steps.newest()
        except OSError:
            return 0

    @property
    def is_stopped(self) -> bool:
        """Whether a signal asked the launcher to end the run."""
        return self._stopped.is_set()

    def pause(self, seconds: float) -> bool:
        """Waits. Returns whether to continue: a signal ends the wait."""
        with self._timeline.phase("pause"):
            self._timeline.figures = {"limit_s": seconds}
            # Only now: before a start there is nothing to tell, and the first process would take the file for an earlier run's.
            status = Status(self._folder, LAUNCHER, self._timeline)
            is_over = not self._stopped.wait(seconds)
            status.close()
            return is_over

    def _note(self, row: dict[str, object]) -> None:
        # A restart is worth more than its record.
        with contextlib.suppress(OSError):
            self._events.write(json.dumps(row).encode() + b"\n")

    def _is_to_be_moved(self) -> bool:
        """Whether `--resume never` has still to move an earlier run away."""
        return not self._earlier.isdisjoint(earlier_files(self._folder))

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        is_stop = number != signal.SIGUSR1
        if is_stop:
            self._stopped.set()
        if self._group is not None:
            self._passed_on |= is_stop
            # SIGTERM also for Ctrl-C and SIGHUP: the processes stop after a step and save it.
            self._group.send(signal.SIGTERM if is_stop else number)


def _last_lines(log: Path) -> list[str]:
    """The last lines of a log, or why there are none."""
    try:
        with open_file(log) as file:
            file.seek(-min(_LAST_BYTES, os.fstat(file.fileno()).st_size), os.SEEK_END)
            return file.read(_LAST_BYTES).decode(errors="replace").splitlines()[-_LAST_LINES:]
    except OSError as error:
        return [describe(error, log)]


def _without_never(arguments: list[str]) -> list[str]:
    """The arguments without `--resume never`."""
    # Joined by NUL, which no argument can contain, so that the pattern covers both `--resume never` and `--resume=never`.
    return re.sub(r"\0--resume[\0=]never(?=\0)", "", "\0".join(["", *arguments, ""])).split("\0")[1:-1]


def supervise(policy: Policy, runner: Launcher, say: Callable[[str], None]) -> int:
    """Runs groups until one ends well (DONE or LOST), the input is wrong, or restarts no longer help. Returns the exit code."""
    processes, in_a_row, again = _Processes(policy), 0, False
    while True:
        before = runner.newest_step()
        end = runner.run(processes.count, again=again)
        if end.first is None:
            return end.code
        # After a lost process, a smaller number may simply not fit mesh or batch. That is an invitation to try the next smaller one.
        if end.code == Exit.INPUT and not (again and processes.count > policy.min_processes):
            return Exit.INPUT
        after = runner.newest_step()
        in_a_row = 1 if after > before else in_a_row + 1
        newest = f"the newest checkpoint is from step {after}" if after else "no checkpoint was saved"
        say(f"process {end.first} ended with {_describe(end.codes[end.first])}; {newest}")
        # After a signal to the launcher this end was asked for, whatever its code (--stopped-code may choose any).
        if runner.is_stopped:
            return end.code
        if in_a_row > policy.restarts:
            row = f"{policy.restarts} in a row brought no newer checkpoint (--restarts {policy.restarts})"
            why = row if policy.restarts else "--restarts is 0"
            say(f"not restarting: {why}. The same command resumes from the newest checkpoint")
            return end.code
        # A process that failed with an error is not lost.
        processes.next(lost=end.code == Exit.INPUT or end.codes[end.first] < 0, progress=after > before)
        delay = min(2.0 ** min(in_a_row - 1, _DOUBLINGS), _LONGEST_DELAY_SECONDS)
        count = f"{processes.count} process{'es' if processes.count > 1 else ''}"
        say(f"restarting on {count} in {delay:.0f} s (restart {in_a_row} of at most {policy.restarts} without a newer checkpoint)")
        again = True
        if not runner.pause(delay):
            return end.code


def _describe(code: int) -> str:
    names = {int(code): f" ({code.name.lower()})" for code in Exit}
    return f"signal {-code}" if code < 0 else f"exit code {code}{names.get(code, '')}"
