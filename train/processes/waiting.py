"""The time that processes have to find each other: when it is over, when to say something, and how this process ends.

Most of a wait is in loops of our own, which look at `Patience`. The rest is in calls that no thread can interrupt (the resolution of a
host's name, JAX's own connection), and those end with the process: `ends_after` is a thread that waits beside the call.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from ..command_line import EndError, Exit
from ..sink import say

_LINE_SECONDS = 10.0
_MAX_NAMED = 16


class JoinError(EndError):
    """The processes of the run have not found each other; the message says which one is missing, or what is in the way."""

    code = Exit.UNJOINED


class Patience:
    """A wait of so many seconds that begins now, with a line to print every ten seconds."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._begun = time.monotonic()
        self._lines = 0

    def __str__(self) -> str:
        return f"{time.monotonic() - self._begun:.0f} of {self.seconds:.0f} s"

    @property
    def deadline(self) -> float:
        """When the wait is over, on the monotonic clock."""
        return self._begun + self.seconds

    @property
    def left(self) -> float:
        """The seconds that are left; 0 if the wait is over."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return self.left == 0

    @property
    def is_time_to_speak(self) -> bool:
        """True once in ten seconds, for the first time after ten."""
        number = int((time.monotonic() - self._begun) / _LINE_SECONDS)
        speaks, self._lines = number > self._lines, max(number, self._lines)
        return speaks


def named(processes: Sequence[int]) -> str:
    """`process 1`, `processes 1, 2`, or the first of them and the number of the others."""
    numbers = ", ".join(map(str, processes[:_MAX_NAMED]))
    more = f" and {len(processes) - _MAX_NAMED:,} more" if len(processes) > _MAX_NAMED else ""
    return f"process{'es' if len(processes) > 1 else ''} {numbers}{more}"


@contextlib.contextmanager
def ends_after(seconds: float, what: str) -> Iterator[None]:
    """Inside, ends this process with the stacks of its threads if `what` takes longer. The code is `Exit.UNJOINED`."""
    timer = threading.Timer(seconds, _end, (f"{what} has taken more than {seconds:.0f} s",))
    # A regular exit does not wait for it.
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(why: str) -> None:
    say(f"{why}. Stacks of all threads follow")
    # stderr may not be a file, or may be closed.
    with contextlib.suppress(OSError, ValueError):
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
    # sys.exit would end only this thread.
    os._exit(Exit.UNJOINED)
