"""Starts a group of processes again when it fails, until it is done or restarts no longer help.

A restart helps if the failure was an accident, and only progress shows that: a newer checkpoint than before. Restarts are therefore
counted in a row, and the row begins again with each newer checkpoint, so a run of weeks may fail any number of times and a run that
always fails at the same step ends after a few. Pauses double in a row, because a machine that is ill needs time.

A process that a signal has killed may be gone for good, with its memory or its device. So the next start leaves it out, if it may, and the
start after that one takes it in again. If all together then bring no newer checkpoint, the number that did bring one is used again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..command_line import Exit
from .group import End

_FIRST_DELAY_SECONDS = 1.0
_LONGEST_DELAY_SECONDS = 60.0
# 2 ** 6 seconds is more than the longest delay. Without the bound the power would overflow after a thousand restarts.
_DOUBLINGS = 6


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How often and on how many processes to start.

    restarts: how many in a row without a newer checkpoint. min_processes: after a process is lost to a signal, the next start has one
    process less, but at least this many, and the one after it has all of them again.
    """

    processes: int
    restarts: int
    min_processes: int


class _Processes:
    """The number of processes of each start. count: of the present one."""

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


class GroupRunner(Protocol):
    """What `supervise` acts on: it runs groups of processes, and knows the run's checkpoints."""

    def run(self, processes: int, *, again: bool) -> End:
        """Starts a group and waits for its end. again: this is a restart."""
        ...

    def newest_step(self) -> int:
        """The step of the newest checkpoint; 0 if there is none."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Whether a signal asked the launcher to end the run."""
        ...

    def pause(self, seconds: float) -> bool:
        """Waits. Returns whether to continue afterwards."""
        ...


def supervise(policy: Policy, runner: GroupRunner, say: Callable[[str], None]) -> int:
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
            say(f"not restarting: {_why_not(policy.restarts)}. The same command resumes from the newest checkpoint")
            return end.code
        # A process that failed with an error is not lost.
        processes.next(lost=end.code == Exit.INPUT or end.codes[end.first] < 0, progress=after > before)
        delay = min(_FIRST_DELAY_SECONDS * 2 ** min(in_a_row - 1, _DOUBLINGS), _LONGEST_DELAY_SECONDS)
        count = f"{processes.count} process{'es' if processes.count > 1 else ''}"
        say(f"restarting on {count} in {delay:.0f} s (restart {in_a_row} of at most {policy.restarts} without a newer checkpoint)")
        again = True
        if not runner.pause(delay):
            return end.code


def _why_not(restarts: int) -> str:
    return f"{restarts} in a row brought no newer checkpoint (--restarts {restarts})" if restarts else "--restarts is 0"


def _describe(code: int) -> str:
    if code < 0:
        return f"signal {-code}"
    return f"exit code {code} ({Exit(code).name.lower()})" if code in set(map(int, Exit)) else f"exit code {code}"
