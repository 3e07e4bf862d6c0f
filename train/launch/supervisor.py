"""Starts a group again when it fails, from the newest checkpoint, until it is done or makes no progress any more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from train.exits import Exit
from train.launch.group import End

_FIRST_DELAY_SECONDS = 1.0
_LONGEST_DELAY_SECONDS = 60.0
_DOUBLINGS = 6
"""After so many the longest delay is reached."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How often and on how many processes to start.

    restarts: so many in a row without a newer checkpoint; one with a newer checkpoint begins a new row. min_processes: after a
    process is lost the next start has one less, down to so many.
    """

    processes: int
    restarts: int
    min_processes: int


class Surroundings(Protocol):
    """What a supervisor acts on."""

    def run(self, processes: int, *, again: bool) -> End:
        """Starts a group and waits for its end."""
        ...

    def newest_step(self) -> int:
        """The step of the newest checkpoint, 0 for none."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Whether a signal asked for the end."""
        ...

    def pause(self, seconds: float) -> bool:
        """Waits; whether to go on then."""
        ...


def supervise(policy: Policy, surroundings: Surroundings, say: Callable[[str], None]) -> int:
    """Runs groups until one ends well, the input is wrong, or restarts are of no use; the exit code."""
    processes, in_a_row, again = policy.processes, 0, False
    while True:
        before = surroundings.newest_step()
        end = surroundings.run(processes, again=again)
        if end.first is None:
            return Exit.DONE
        if end.code == Exit.INPUT and not (again and processes > policy.min_processes):
            return Exit.INPUT
        after = surroundings.newest_step()
        in_a_row = 1 if after > before else in_a_row + 1
        say(f"process {end.first} ended with {_describe(end.codes[end.first])}; the newest checkpoint is that of step {after}")
        if surroundings.is_stopped:
            return end.code
        if in_a_row > policy.restarts:
            say(f"no restart: {_tried(policy.restarts)}")
            return end.code
        if (end.code == Exit.INPUT or end.codes[end.first] < 0) and processes > policy.min_processes:
            processes -= 1
        delay = min(_FIRST_DELAY_SECONDS * 2 ** min(in_a_row - 1, _DOUBLINGS), _LONGEST_DELAY_SECONDS)
        say(f"starts again on {processes} process{'es' if processes > 1 else ''} in {delay:.0f} s (restart {in_a_row} of {policy.restarts} in a row)")
        again = True
        if not surroundings.pause(delay):
            return end.code


def _tried(restarts: int) -> str:
    return f"{restarts} brought no newer checkpoint (--restarts)" if restarts else "none was asked for (--restarts)"


def _describe(code: int) -> str:
    if code < 0:
        return f"signal {-code}"
    return f"exit code {code} ({Exit(code).name.lower()})" if code in set(map(int, Exit)) else f"exit code {code}"
