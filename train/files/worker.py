"""A thread that does the same thing again and again beside the run, and once more at its end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable


class Worker:
    """Calls `tick(is_last)` every `period` seconds and when it is woken, in a daemon thread of this name, until it is closed.

    What happens between `close` and the last call is seen by that call. tick must not raise.
    """

    def __init__(self, name: str, period: float, tick: Callable[[bool], object]):
        self._period, self._tick = period, tick
        self._wake, self._is_closed = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread. Raises RuntimeError if the system allows no further one."""
        self._thread.start()

    def wake(self) -> None:
        """Has `tick` called soon, without waiting for it."""
        self._wake.set()

    def close(self, seconds: float | None = None) -> None:
        """Calls `tick` for the last time, and waits for it; seconds: at most so long."""
        self._is_closed = True
        self._wake.set()
        with contextlib.suppress(RuntimeError):
            self._thread.join(seconds)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._wake.wait(self._period)
            self._wake.clear()
            # Asked before the call: what happens during one that is under way needs another one.
            is_last = self._is_closed
            self._tick(is_last)
