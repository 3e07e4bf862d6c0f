"""Watches over a process that trains: signals that ask it to stop, steps that do not end, other processes that are gone.

The thread that trains may be waiting for devices for ever; so a thread beside it watches, and what it cannot mend it ends: all
threads' stacks go to stderr and to the run directory, and the process leaves with a code that says why (`train.exits`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TextIO

import jax

from jgt.document import InputError
from train.agreement import Agreement
from train.exits import Exit
from train.peers import Peers
from train.processes import Store
from train.sections import WatchdogConfig

_TICK = 0.25
_SLOW = 10
"""A step may take so many times as long as the slowest one so far."""
_LAST_WORD_SECONDS = 2.0
"""What the processes leave each other is in the first one: it stays so long for the others to read it."""
_UNMEASURED = 2
"""The host is so many steps ahead of the devices: in the first steps it waits for none."""
_AGAIN_SECONDS = 0.5
"""What asks twice at once (a process, and its group) asks once."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
Note = Callable[[str], None]


class Watch:
    """The watch over this process; a context, entered in the main thread.

    The training thread says what it is at with `phase` and `may_begin`. stopped_code: of a process that a signal ends before its
    first step.
    """

    def __init__(self, config: WatchdogConfig, folder: Path, store: Store | None, stopped_code: int = Exit.DONE):
        self._config, self._stopped_code = config, stopped_code
        self.note: Note = lambda why: None
        """Called with the reason, once, before the process is ended."""
        self._process, count = jax.process_index(), jax.process_count()
        self._stacks = folder / f"stacks-{self._process}.txt"
        self._agreement = Agreement(store, self._process, count)
        self._peers = None
        if store is not None:
            self._peers = Peers(store, self._process, count, self._agreement, seconds=config.peer_seconds, lost=self._lost)
        # How long it takes to read a corpus is not known.
        self._idle, self._limit, self._doing = 0.0, float("inf"), "opening model and data"
        self._steps, self._slowest = 0, 0.0
        self._begun: float | None = None
        self._asked: str | None = None
        self._asked_at = 0.0
        self._closed = threading.Event()
        self._ending = threading.Lock()

    def __enter__(self) -> Watch:
        self._signals = contextlib.ExitStack()
        self._wake, waker = socket.socketpair()
        for end in (self._wake, waker):
            end.setblocking(False)
            self._signals.callback(end.close)
        if threading.current_thread() is threading.main_thread():
            self._signals.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False))
            for number in _SIGNALS:
                self._signals.callback(signal.signal, number, signal.signal(number, _ignore))
        if self._peers is not None:
            self._peers.start()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # Wrong input is found by all processes alike.
        if self._peers is not None and error is not None and not isinstance(error, InputError):
            self._failed(self._peers, error)
        self._closed.set()
        self._thread.join(timeout=5)
        if self._peers is not None:
            self._peers.close(done=error is None)
            if error is not None:
                self._linger()
        self._signals.close()

    # -- the training thread -------------------------------------------------------------------------------------

    @property
    def asked(self) -> str | None:
        """The signal that asked this process to stop, by name; None where it was another process's."""
        return self._asked

    @contextlib.contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Says what comes next, other than a step, and when it is over."""
        self._other(what)
        yield
        self._other(f"what follows {what}")

    def may_begin(self, step: int) -> bool:
        """Says that all before this step is done; whether to begin it, or to stop here, as all processes do."""
        self._measure()
        self._begun = time.monotonic()
        self._steps += 1
        limit = max(self._config.step_seconds, _SLOW * self._slowest) if self._slowest else self._config.start_seconds
        self._progress(f"step {step}", limit)
        return self._agreement.may_begin(step)

    def _other(self, what: str) -> None:
        # Before anything else the host waits for the steps that it has begun.
        self._measure()
        self._progress(what, self._config.start_seconds)

    def _measure(self) -> None:
        if self._begun is not None and self._steps > _UNMEASURED:
            self._slowest = max(self._slowest, time.monotonic() - self._begun)
        self._begun = None

    def _progress(self, what: str, limit: float) -> None:
        self._doing, self._limit, self._idle = what, limit, 0.0
        if self._peers is not None:
            self._peers.doing = what

    def _failed(self, peers: Peers, error: BaseException) -> None:
        """The training thread fails. An error of the runtime may be another process's death, of which word may be under way."""
        if isinstance(error, jax.errors.JaxRuntimeError):
            self._progress("failing", float("inf"))
            _say(f"{_first_line(error)}; another process may be gone: waits {self._config.peer_seconds + 5:.0f} s for word of it")
            self._closed.wait(self._config.peer_seconds + 5)
        peers.tell(f"failed: {type(error).__name__}: {_first_line(error)}")

    # -- the thread beside it ------------------------------------------------------------------------------------

    def _run(self) -> None:
        last = time.monotonic()
        while not self._closed.is_set():
            readable, _, _ = select.select([self._wake], [], [], _TICK)
            if self._closed.is_set():
                return
            for number in self._wake.recv(64) if readable else b"":
                self._signal(number)
            now = time.monotonic()
            # Time in which the whole process was stopped does not count.
            self._idle += min(now - last, 2 * _TICK)
            last = now
            self._judge(now)

    def _signal(self, number: int) -> None:
        if number not in _SIGNALS:
            return
        name = signal.Signals(number).name
        if self._asked is not None:
            if time.monotonic() - self._asked_at < _AGAIN_SECONDS:
                return
            self._end(128 + number, f"{name} once more: stops at once", stacks=False)
        self._asked, self._asked_at = name, time.monotonic()
        _say(f"{name}: stops after the step under way and saves it; once more stops at once")
        self._agreement.ask()

    def _judge(self, now: float) -> None:
        if self._agreement.before_any:
            self._end(self._stopped_code, f"stopped by {self._asked or 'another process'} before the first step: there is nothing to save", stacks=False)
        if self._idle > self._limit:
            why = f"hangs: {self._doing} has taken more than {self._limit:.0f} s"
            others = "" if self._peers is None else self._peers.others()
            if self._peers is not None:
                self._peers.tell(why)
            self._end(Exit.HUNG, f"process {self._process} {why}{'; ' if others else ''}{others}")
        # Its own limit is longer: the first process's word, which names the culprit, comes before.
        if self._peers is not None and now - self._peers.answered > self._config.peer_seconds + 5:
            self._lost("process 0 does not answer")

    def _lost(self, why: str) -> NoReturn:
        self._end(Exit.PEER, f"process {self._process} ends, because {why}")

    def _end(self, code: int, why: str, *, stacks: bool = True) -> NoReturn:
        self._ending.acquire()  # never released: who comes second waits for the end
        _say(why)
        with contextlib.suppress(OSError):
            if stacks:
                with self._stacks.open("a", encoding="utf-8") as file:
                    print(f"{time.strftime('%F %T')} {why}", file=file, flush=True)
                    _dump(file)
                _dump(sys.stderr)
            self.note(why)
        if stacks:
            self._linger()
        os._exit(code)

    def _linger(self) -> None:
        if self._peers is not None and self._process == 0:
            time.sleep(_LAST_WORD_SECONDS)


def _ignore(number: int, frame: Any) -> None:
    """The byte in the wake-up socket is what counts."""


def _dump(file: TextIO) -> None:
    # stderr may be no file: of a test, or closed.
    with contextlib.suppress(OSError, ValueError):
        faulthandler.dump_traceback(file, all_threads=True)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"jgt: {text}", file=sys.stderr, flush=True)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
