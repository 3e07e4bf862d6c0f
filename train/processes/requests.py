"""What a signal to one process asks of all: to stop after a common step, or to save one and continue.

Both need the same agreement (`train.processes.peers.Agreement`), because a checkpoint is written by all processes together: a process that
saved another step than the others would wait for them in a collective. A stop is agreed on once. Saves may be asked for again and again, so
each has an agreement of its own, with a number. A process takes up the next number when it begins the step after the agreed one. All
processes pass that step, so all of them count alike.
"""

from __future__ import annotations

from .peers import Agreement
from .processes import Store


class Requests:
    """The requests of a run, as one of `count` processes; `store` is None if it is the only one.

    `must_save` and `stop.may_begin` belong to the training thread, everything else to the threads beside it.
    """

    def __init__(self, store: Store | None, process: int = 0, count: int = 1):
        self._store, self._process, self._count = store, process, count
        self.stop = Agreement(store, process, count)
        """After which step the run stops."""
        self._number = 0
        self._save = self._next_save()

    def request_save(self) -> None:
        """Asks all processes to save after a common step, and returns at once."""
        self._save.request_stop()

    def must_save(self, step: int) -> bool:
        """Whether to save before this step."""
        if self._save.may_begin(step):
            return False
        self._save = self._next_save()
        # The step is not begun yet, but will be, unless the run ends before it.
        self._save.may_begin(step)
        return True

    def exchange_reports(self) -> None:
        """As `Agreement.exchange_reports`, for all requests."""
        self.stop.exchange_reports()
        self._save.exchange_reports()

    def _next_save(self) -> Agreement:
        self._number += 1
        return Agreement(self._store, self._process, self._count, f"save-{self._number}")
