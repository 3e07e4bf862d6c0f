"""The messages of a run's processes while they train: that they live, why they failed, and after which step they stop or save.

When a process dies or is stopped, all others wait inside a collective that never ends. So each process has a thread that twice a second
writes one text to the shared store and reads a few (`Peers`). The first process lists which processes have not changed their text for too
long and writes their names to the store, so that every process learns of a death from one place and with the same words.

The second purpose is a stop that loses nothing (`Agreement`). A signal reaches one process, at any moment, but all processes must stop
after the same step: a process that begins a step alone waits in its first collective for ever. The host runs ahead of its devices, so
processes have begun different numbers of steps. The protocol: (1) a process that wants to stop, or that sees another's report, reports
the last step it has begun; (2) after its report it begins no step until every process has reported; (3) the largest reported step is the
last one for all. Each process can reach it, because the one that reported it has already begun it. The invariant: between a process's
report and the agreement, the step it reported stays the last one it has begun.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable

from .processes import Store

_BEFORE_FIRST_STEP = -1
_ROUND_SECONDS = 0.5
_PROCESSES_PER_SECOND = 512
"""The number of processes that the coordinator can serve in a second; in larger runs each process asks less often."""
_DONE = "done"


class Agreement:
    """An agreement of `count` processes on the last step before a stop or a save; `store` is None if this process is the only one.

    topic: the agreement's name in the store. `may_begin` belongs to the training thread, everything else to the threads beside it.
    """

    def __init__(self, store: Store | None, process: int = 0, count: int = 1, topic: str = "stop"):
        self._store, self._process, self._count, self._topic = store, process, count, topic
        self._changed = threading.Condition()
        self._begun = _BEFORE_FIRST_STEP
        self._is_wanted = self._has_reported = False
        self._last_step: int | None = None
        self.words: frozenset[str] = frozenset()
        """The words of this process, and after the agreement those of all processes."""

    @property
    def is_before_first_step(self) -> bool:
        """Whether the processes agreed to stop before any of them has begun a step."""
        return self._last_step == _BEFORE_FIRST_STEP

    def may_begin(self, step: int) -> bool:
        """Whether to begin this step; False means to stop before it. After this process's report, waits for the reports of the others."""
        with self._changed:
            while self._has_reported and self._last_step is None:
                self._changed.wait()
            if self._last_step is not None and step > self._last_step:
                return False
            # Under the lock, so that a report never names a step older than the newest one begun.
            self._begun = step
            return True

    def request_stop(self, word: str = "") -> bool:
        """Asks all processes to stop, and returns at once: whether the others will hear the word, which is too late after the report."""
        with self._changed:
            if word and self._has_reported:
                return word in self.words
            self.words |= {word} if word else set()
        self._is_wanted = True
        if self._store is None:
            self._agree(self._report(), self.words)
        return True

    def exchange_reports(self) -> None:
        """Reports this process's step if any process wants to stop, and reads the reports of the others.

        Must be called again and again, always from the same thread, which must not be the training thread.
        """
        if self._store is None or self._last_step is not None:
            return
        reports = self._store.below(self._topic)
        if (reports or self._is_wanted) and not self._has_reported:
            self._store.set(f"{self._topic}/{self._process}", " ".join([str(self._report()), *sorted(self.words)]))
        if len(reports) == self._count:
            told = [report.split() for report in reports.values()]
            self._agree(max(int(step) for step, *_ in told), frozenset(word for _, *words in told for word in words))

    def _report(self) -> int:
        with self._changed:
            self._has_reported = True
            return self._begun

    def _agree(self, last_step: int, words: frozenset[str]) -> None:
        with self._changed:
            self._last_step, self.words = last_step, words
            self._changed.notify_all()


class Requests:
    """The requests that one process makes to all: to stop after a common step, or to save or to profile before one and continue.

    A stop is agreed on once. The others may be asked for again and again, so they have agreements with numbers, each with the words of what
    is asked for. A process takes up the next number when it begins the step after the agreed one. All processes pass that step, so all
    of them count alike. `due` and `stop.may_begin` belong to the training thread, everything else to the threads beside it.
    """

    def __init__(self, store: Store | None, process: int = 0, count: int = 1):
        self.stop = Agreement(store, process, count)
        """After which step the run stops."""
        self._all = (Agreement(store, process, count, f"asked-{number}") for number in itertools.count(1))
        self._asked, self._later = next(self._all), set[str]()

    def request(self, what: str) -> None:
        """Asks all processes to save or to profile after a common step, and returns at once."""
        if not self._asked.request_stop(what):
            self._later.add(what)

    def due(self, step: int) -> frozenset[str]:
        """The words of what all processes do before this step."""
        if self._asked.may_begin(step):
            return frozenset()
        words, self._asked = self._asked.words, next(self._all)
        # The step is not begun yet, but will be, unless the run ends before it.
        self._asked.may_begin(step)
        while self._later:
            self._asked.request_stop(self._later.pop())
        return words

    def exchange_reports(self) -> None:
        """As `Agreement.exchange_reports`, for all requests."""
        self.stop.exchange_reports()
        self._asked.exchange_reports()


class Peers:
    """The thread that exchanges a text with the other processes twice a second.

    on_loss(why) is called when another process has failed or is gone. Training cannot continue without it, so on_loss may not return.
    """

    def __init__(
        self, store: Store, process: int, count: int, agreement: Agreement | Requests, *, seconds: float, on_loss: Callable[[str], None]
    ):
        self._store, self._process, self._agreement = store, process, agreement
        self._seconds, self._on_loss = seconds, on_loss
        self._round_seconds = max(_ROUND_SECONDS, count / _PROCESSES_PER_SECOND)
        # By process: its last text, and when it changed. A process that never writes is lost after the same time.
        self._last_texts: dict[str, tuple[str, float]] = {str(i): ("", time.monotonic()) for i in range(count) if i != process}
        self._closed = threading.Event()
        self._has_failed = False
        # A daemon, because a call to a coordinator that is gone may never return; it must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        self.doing = "starting"
        """The work of this process, for the messages of the others."""
        self.answered = time.monotonic()
        """When the coordinator last answered; later by the time in which this process was suspended since."""
        self._looked = self.answered

    def start(self) -> None:
        """Starts the exchange."""
        self._thread.start()

    def close(self, *, done: bool) -> None:
        """Ends the exchange. done: this process has finished, so its silence from now on is not a failure."""
        self._closed.set()
        self._thread.join(timeout=5)
        if done:
            self._try_set(f"alive/{self._process}", _DONE)

    def forgive(self, seconds: float) -> None:
        """Does not count this long against the coordinator, because this process was suspended."""
        self.answered = min(time.monotonic(), self.answered + seconds)

    def report_failure(self, why: str) -> None:
        """Tells the others that this process fails. Gives up after two seconds."""
        self._has_failed = True
        # In a thread, because the coordinator may be what failed, and then the call never returns.
        reporter = threading.Thread(target=self._try_set, args=(f"failed/{self._process}", why), daemon=True)
        # Without a further thread, the others find this process silent.
        with contextlib.suppress(RuntimeError):
            reporter.start()
            reporter.join(timeout=2)

    def describe_others(self) -> str:
        """The last words of each other process about its work. Only the first process knows them; empty on all others."""
        return ", ".join(f"process {name}: {text.partition(' ')[2]}" for name, (text, _) in self._last_texts.items() if text)

    def _run(self) -> None:
        for number in itertools.count(1):
            if self._closed.wait(self._round_seconds):
                return
            # A coordinator that does not answer is the watch's to judge, by `answered`. Here the next round simply tries again.
            with contextlib.suppress(Exception):
                self._round(number)

    def _round(self, number: int) -> None:
        # The number changes every round: an unchanged text means that the process was not running.
        self._store.set(f"alive/{self._process}", f"{number} {self.doing}")
        # A process that fails on its own exits with its own code; the failure of another must not overtake it.
        if (failures := self._store.below("failed")) and not self._has_failed:
            self._on_loss("; ".join(f"process {name} {why}" for name, why in failures.items()))
        self._agreement.exchange_reports()
        if self._process == 0:
            self._find_silent(self._store.below("alive"))
        self.answered = time.monotonic()

    def _find_silent(self, alive: dict[str, str]) -> None:
        now = time.monotonic()
        # If this process was suspended itself, every other process seems silent. They get a full period again.
        was_suspended, self._looked = now - self._looked > self._seconds / 2, now
        for name, (text, since) in self._last_texts.items():
            latest = alive.get(name, text)
            self._last_texts[name] = latest, now if was_suspended or latest != text else since
        for name, (text, since) in self._last_texts.items():
            if text != _DONE and now - since > self._seconds:
                why = f"has been silent for {self._seconds:.0f} s"
                # First to the store: on_loss does not return, and the others learn of it only from there.
                self._store.set(f"failed/{name}", why)
                self._on_loss(f"process {name} {why}")

    def _try_set(self, name: str, text: str) -> None:
        with contextlib.suppress(Exception):
            self._store.set(name, text)
