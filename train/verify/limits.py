"""The memory and the CPU time that a comparison may take: a model of any size may be compared, and no laptop may hang."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The CPU-seconds of all threads, and the gigabytes, that a comparison may take."""

    cpu_seconds: int = 600
    gigabytes: int = 8

    def __str__(self) -> str:
        return f"{self.cpu_seconds} CPU-seconds and {self.gigabytes} GB"

    def exceeded(self, begun: float) -> str:
        """The limit that this process has exceeded, in words; empty if it is within both. begun: its CPU-seconds before the comparison."""
        if time.process_time() - begun > self.cpu_seconds:
            return f"more than {self.cpu_seconds} CPU-seconds"
        return f"more than {self.gigabytes} GB" if gigabytes_in_use() > self.gigabytes else ""

    @contextlib.contextmanager
    def watched(self, end: Callable[[str], None]) -> Iterator[None]:
        """Inside, `end` is called, in a thread, when a limit is exceeded. XLA cannot be interrupted, so it has to end the process."""
        # The process may have worked on other things before.
        closed, begun = threading.Event(), time.process_time()

        def watch() -> None:
            while not closed.wait(_SECONDS):
                if too_much := self.exceeded(begun):
                    end(too_much)
                    break

        thread = threading.Thread(target=watch, name="limits", daemon=True)
        thread.start()
        try:
            yield
        finally:
            closed.set()
            thread.join()


def gigabytes_in_use() -> float:
    """The memory of this process, where the system says it; otherwise 0."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9
    return 0.0
