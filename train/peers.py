"""The other processes of a run: whether they live, what they fail of, at which step all stop."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from train.agreement import Agreement
from train.processes import Store

_ROUND_SECONDS = 0.5
_PROCESSES_PER_SECOND = 512
"""How many processes the coordinator serves in a second: with more of them each asks less often."""
_DONE = "done"


class Peers:
    """Exchanges a word with the other processes twice a second, in a thread of its own.

    Each process says what it does; the first one notes who says nothing any more and tells the others. lost(why) is called when
    another process has failed or is gone, after which it does not matter what this one does.
    """

    def __init__(self, store: Store, process: int, count: int, agreement: Agreement, *, seconds: float, lost: Callable[[str], None]):
        self._store, self._process, self._agreement = store, process, agreement
        self._seconds, self._lost = seconds, lost
        self._round_seconds = max(_ROUND_SECONDS, count / _PROCESSES_PER_SECOND)
        self._heard: dict[str, tuple[str, float]] = {str(i): ("", time.monotonic()) for i in range(count) if i != process}
        self._closed = threading.Event()
        self._told = False
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        self.doing = "starting"
        self.answered = time.monotonic()
        """When the coordinator last answered."""

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def close(self, *, done: bool) -> None:
        """Ends the exchange; done: silence from now on is no failure."""
        self._closed.set()
        self._thread.join(timeout=5)
        if done:
            self._set(f"alive/{self._process}", _DONE)

    def tell(self, why: str) -> None:
        """Tells the others that this process fails; gives up on it after two seconds."""
        self._told = True
        teller = threading.Thread(target=self._set, args=(f"failed/{self._process}", why), daemon=True)
        teller.start()
        teller.join(timeout=2)

    def others(self) -> str:
        """What the others said last, as far as this process knows."""
        return ", ".join(f"process {name}: {text.partition(' ')[2]}" for name, (text, _) in self._heard.items() if text)

    def _run(self) -> None:
        number = 0
        while not self._closed.wait(self._round_seconds):
            number += 1
            # An answer that does not come is judged by who watches `answered`.
            with contextlib.suppress(Exception):
                self._round(number)

    def _round(self, number: int) -> None:
        self._store.set(f"alive/{self._process}", f"{number} {self.doing}")
        if (failures := self._store.below("failed")) and not self._told:
            self._lost("; ".join(f"process {name} {why}" for name, why in failures.items()))
        self._agreement.look()
        if self._process == 0:
            self._listen(self._store.below("alive"))
        self.answered = time.monotonic()

    def _listen(self, alive: dict[str, str]) -> None:
        now = time.monotonic()
        # This process may have been stopped itself: then all others seem silent, and get another chance.
        if now - self.answered > self._seconds / 2:
            self._heard = {name: (text, now) for name, (text, _) in self._heard.items()}
        for name, (text, _) in self._heard.items():
            if alive.get(name, "") != text:
                self._heard[name] = alive[name], now
        for name, (text, since) in self._heard.items():
            if text != _DONE and now - since > self._seconds:
                why = f"has said nothing for {self._seconds:.0f} s"
                self._store.set(f"failed/{name}", why)
                self._lost(f"process {name} {why}")

    def _set(self, name: str, text: str) -> None:
        with contextlib.suppress(Exception):
            self._store.set(name, text)
