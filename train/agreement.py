"""At which step to stop: one that every process can still reach.

A process that is asked to stop tells the others. Each reports the last step it has begun, and begins none until all have
reported; the largest is where all of them stop. Reports and answers are a background thread's work: a training thread may be
waiting for devices that wait for another process's step.
"""

from __future__ import annotations

import threading

from train.processes import Store

_BEFORE_ANY = -1


class Agreement:
    """The stop of one process among `count`; `store` is None for a process alone."""

    def __init__(self, store: Store | None, process: int = 0, count: int = 1):
        self._store, self._process, self._count = store, process, count
        self._changed = threading.Condition()
        self._begun = _BEFORE_ANY
        self._wanted = self._reported = False
        self._agreed: int | None = None

    @property
    def before_any(self) -> bool:
        """Whether all agreed to stop before any of them began to train."""
        return self._agreed == _BEFORE_ANY

    def may_begin(self, step: int) -> bool:
        """Whether to begin a step, or to stop before it; once this process has reported, waits for the others' reports."""
        with self._changed:
            while self._reported and self._agreed is None:
                self._changed.wait()
            if self._agreed is not None and step > self._agreed:
                return False
            self._begun = step
            return True

    def ask(self) -> None:
        """Asks all processes to stop; does not wait for anything."""
        self._wanted = True
        if self._store is None:
            self._report()
            self._settle(self._begun)

    def look(self) -> None:
        """Tells the others and hears of them. Call it again and again, from one thread that is not the training thread."""
        if self._store is None or self._agreed is not None:
            return
        reports = self._store.below("stop")
        if (reports or self._wanted) and not self._reported:
            self._store.set(f"stop/{self._process}", str(self._report()))
        if len(reports) == self._count:
            self._settle(max(int(step) for step in reports.values()))

    def _report(self) -> int:
        with self._changed:
            self._reported = True
            return self._begun

    def _settle(self, step: int) -> None:
        with self._changed:
            self._agreed = step
            self._changed.notify_all()
