"""The watch over a process that trains: it handles signals, ends a process that hangs, and ends one whose peers are gone.

The thread that trains waits inside XLA for devices, and may wait for ever, because a kernel hangs or another process of the run is dead.
Python delivers signals and exceptions only to a thread that runs Python code, so that thread can neither notice nor be interrupted. A
second thread watches: it reads signals from a socket, measures how long the training thread has made no progress, and hears about the other
processes (`peers.py`).

A first SIGTERM, SIGINT, SIGHUP or SIGXCPU asks all processes to stop after a common step, which the training thread learns from
`may_begin`. SIGUSR1 and `request` ask them to save, or to profile a step, and to continue (`asked_for`). What the watch cannot mend, it
ends, in this order: it informs the other processes (while it can), prints the reason, writes the stacks of all threads to stderr and to the
run directory, notes the reason in the run's events, and leaves with `os._exit` and a code that says what happened
(`train.files.ends.Exit`). A regular exit would wait for the thread that hangs. A process that is not the run's own, such as the kernel of
a notebook, is not ended by a Ctrl-C: there it raises KeyboardInterrupt in the training thread as soon as that runs Python code.

Two invariants. Only one thread ends the process: the first one in `_end` wins and the others wait there. And suspended time does not
count: the watch adds up its own ticks instead of subtracting clock readings, so a process stopped by Ctrl-Z is not taken for a hang.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from _thread import interrupt_main
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

import jax

from jgt.document import InputError

from ..files.ends import Exit
from ..files.streams import say
from .compiled import finish_trial
from .config import WatchdogConfig
from .peers import Peers, Requests
from .processes import Store, dump_stacks, number_of_processes, this_process

_TICK = 0.25
_SLOW = 10
"""A step may take this many times as long as the slowest one so far."""
_LAST_WORD_SECONDS = 2.0
"""How long the first process stays when it fails: the shared store is inside it, and the others need a round to read the reason."""
_GOODBYE_SECONDS = 5.0
"""How long a process that ends may take to print and write the reason."""
_PEER_MARGIN_SECONDS = 5
"""The first process's own limit ends this much earlier: if it lives, its report names the lost process and arrives before."""
_UNMEASURED = 2
"""The host runs this many steps ahead of the devices, so its first steps return at once and say nothing about a step's time."""
_SAME_REQUEST_SECONDS = 0.5
"""Signals within this time are one request: a scheduler often signals a process and its group together."""
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU)
_SAVE = signal.SIGUSR1


class Watch:
    """The watch over this process: a context manager, to be entered in the main thread.

    stopped_code: exit code if a signal ends the process before its first step. owns_process: whether SIGINT may end the process;
    otherwise it raises KeyboardInterrupt instead.
    """

    def __init__(
        self, config: WatchdogConfig, folder: Path, store: Store | None, stopped_code: int = Exit.DONE, *, owns_process: bool = True
    ):
        self._config, self._stopped_code, self._owns_process = config, stopped_code, owns_process
        self._is_interrupted = self._has_raised = False
        self.on_end: Callable[[str], object] = lambda why: None
        """Called once, with the reason, before the watch ends the process."""
        self._process, count = this_process(), number_of_processes()
        self._stacks = folder / f"stacks-{self._process}.txt"
        self._requests = Requests(store, self._process, count)
        self._peers = None
        if store is not None:
            self._peers = Peers(store, self._process, count, self._requests, seconds=config.peer_seconds, on_loss=self._end_after_loss)
        self._idle, self._limit, self._doing = 0.0, config.start_seconds, "starting the devices"
        self._steps, self._slowest = 0, 0.0
        self._begun: float | None = None
        self._last_begun: int | None = None
        self.stop_signal: str | None = None
        """The name of the signal that asked this process to stop; None if there was none, or if another process received it."""
        self._stop_requested_at = 0.0
        self._closed = threading.Event()
        self._ending = threading.Lock()

    def __enter__(self) -> Watch:
        self._signals = contextlib.ExitStack()
        # A Python handler runs only when the main thread returns to Python code, which may never happen. The byte that Python's C handler
        # writes to this socket arrives at once, and wakes the watch's thread.
        self._wake, waker = socket.socketpair()
        for end in (self._wake, waker):
            self._signals.callback(end.close)
        waker.setblocking(False)
        self._wake.settimeout(_TICK)
        # Python allows only the main thread to set handlers.
        if threading.current_thread() is threading.main_thread():
            self._signals.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False))
            for number in (*_STOPS, _SAVE):
                # nohup ignores SIGHUP for the process that it starts, and that is to stay so.
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._signals.callback(signal.signal, number, signal.signal(number, self._on_signal))
        if self._peers is not None:
            self._peers.start()
        # A daemon, so that a regular exit never waits for it.
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # Every process finds wrong input on its own, or hears of it in `agree_on_input`.
        if self._peers is not None and error is not None and not isinstance(error, InputError):
            self._report_error(self._peers, error)
        self._closed.set()
        self._thread.join(timeout=5)
        if self._peers is not None:
            self._peers.close(done=error is None)
            if error is not None:
                self._linger()
        self._signals.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Has to be set: without a handler the signal would end the process. The byte in the socket does the work, but for `_interrupt`."""
        if self._is_interrupted and not self._has_raised:
            self._has_raised = True
            raise KeyboardInterrupt

    # -- called by the training thread ---------------------------------------------------------------------------

    def begin_unlimited(self, what: str) -> None:
        """Announces something without a limit, such as reading a corpus, until the next phase or step."""
        self._note_progress(what, float("inf"))

    @contextlib.contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Announces something other than a step, such as a save; inside it and until the next step the limit is `start_seconds`."""
        # Every phase begins by waiting for the steps in flight, so the step before it is a whole one and counts.
        self._measure_step()
        self._note_progress(what, self._config.start_seconds)
        yield
        self._note_progress(f"what follows {what}", self._config.start_seconds)

    def may_begin(self, step: int) -> bool:
        """Announces that all earlier steps are dispatched. Returns whether to begin `step`; False stops all processes before it."""
        self._measure_step()
        self._begun = time.monotonic()
        self._steps, self._last_begun = self._steps + 1, step
        limit = max(self._config.step_seconds, _SLOW * self._slowest) if self._slowest else self._config.start_seconds
        self._note_progress(f"step {step}", limit)
        return self._requests.stop.may_begin(step)

    def request(self, what: str) -> None:
        """Asks all processes to `save` or to `profile` after a common step, as SIGUSR1 asks for a save, and returns at once."""
        self._requests.request(what)

    def asked_for(self, step: int) -> frozenset[str]:
        """The words of what all processes do before this step, by a signal or `request`. All of them call this once before each step."""
        return self._requests.due(step)

    def now(self) -> dict[str, object]:
        """For the status: what the training thread does, for how long without progress, its limit, in seconds, and the step it began."""
        limit = None if self._limit == float("inf") else round(self._limit, 3)
        return {"doing": self._doing, "idle_s": round(self._idle, 2), "limit_s": limit, "begun": self._last_begun}

    def _measure_step(self) -> None:
        if self._begun is not None and self._steps > _UNMEASURED:
            # Not more than the time that this thread was awake, by the watch's ticks: a suspended step is not a slow one.
            self._slowest = max(self._slowest, min(time.monotonic() - self._begun, self._idle + 2 * _TICK))
        self._begun = None

    def _note_progress(self, what: str, limit: float) -> None:
        self._doing, self._limit, self._idle = what, limit, 0.0
        if self._peers is not None:
            self._peers.doing = what

    def _report_error(self, peers: Peers, error: BaseException) -> None:
        """Informs the other processes about an error, unless it may only be the echo of another process's death.

        When a process dies, the collectives of the others fail with an error of the runtime, often before anyone knows which process it
        was. Waiting lets the watch's thread end this process with the right reason and code.
        """
        if isinstance(error, jax.errors.JaxRuntimeError):
            self._note_progress("failing", float("inf"))
            seconds = self._config.peer_seconds + _PEER_MARGIN_SECONDS
            say(f"{_first_line(error)}. Another process may be gone; waiting {seconds:.0f} s to learn which")
            self._closed.wait(seconds)
        peers.report_failure(f"failed: {type(error).__name__}: {_first_line(error)}")

    # -- the watch's own thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        last = time.monotonic()
        while not self._closed.is_set():
            # Each byte is the number of a signal. Unlike `select`, a socket may have a descriptor above 1,023.
            numbers = b""
            with contextlib.suppress(TimeoutError):
                numbers = self._wake.recv(64)
            if self._closed.is_set():
                return
            for number in numbers:
                self._handle_signal(number)
            now = time.monotonic()
            # A longer tick means that the whole process was suspended, or starved; that time is not the training thread's.
            self._idle += min(now - last, 2 * _TICK)
            if self._peers is not None:
                self._peers.forgive(max(0.0, now - last - 2 * _TICK))
            last = now
            self._check_limits(now)

    def _handle_signal(self, number: int) -> None:
        if number == _SAVE:
            self._requests.request("save")
            say("SIGUSR1: saving after the steps under way; training continues")
        if number not in _STOPS:
            return
        name = signal.Signals(number).name
        # The kernel repeats SIGXCPU every second, between the soft and the hard limit of CPU time.
        is_same = number == signal.SIGXCPU or time.monotonic() - self._stop_requested_at < _SAME_REQUEST_SECONDS
        if self.stop_signal is not None and is_same:
            return
        is_second = self.stop_signal is not None
        if number == signal.SIGINT and not self._owns_process and (is_second or not self._steps):
            self._interrupt("second signal (SIGINT)" if is_second else "SIGINT before the first step")
            return
        if is_second:
            self._end(128 + number, f"second signal ({name}): stopping at once, without saving", stacks=False)
        self.stop_signal, self._stop_requested_at = name, time.monotonic()
        self._requests.stop.request_stop()
        say(f"{name}: the steps under way are finished and saved, then the run stops. A second signal stops at once, without saving")

    def _interrupt(self, why: str) -> None:
        # Python's own signal for it comes back here as a byte.
        if not self._is_interrupted:
            self._is_interrupted = True
            say(f"{why}: stopping at once, without saving; the same call resumes from the newest checkpoint")
            interrupt_main()

    def _check_limits(self, now: float) -> None:
        if self._requests.stop.is_before_first_step:
            who = self.stop_signal or "another process"
            self._end(self._stopped_code, f"stopped by {who} before the first step: there is nothing to save", stacks=False)
        if self._idle > self._limit:
            why, others = f"hangs: {self._doing} has taken more than {self._limit:.0f} s", ""
            if self._peers is not None:
                others = self._peers.describe_others()
                self._peers.report_failure(why)
            self._end(Exit.HUNG, f"process {self._process} {why}{'; ' if others else ''}{others}")
        if self._peers is not None and now - self._peers.answered > (seconds := self._config.peer_seconds + _PEER_MARGIN_SECONDS):
            self._end_after_loss(f"the coordinator, in process 0, has not answered for {seconds:.0f} s")

    def _end_after_loss(self, why: str) -> NoReturn:
        self._end(Exit.PEER, f"process {self._process} stops, because {why}")

    def _end(self, code: int, why: str, *, stacks: bool = True) -> NoReturn:
        # Never released. The watch's thread and the peers' thread may both come here; the second one waits for the end.
        self._ending.acquire()
        if code != Exit.HUNG:
            # A signal or another process is the reason, and not a program that was loaded here.
            finish_trial()
        # The lines below write to stderr and to a disk, and either may block.
        last_moment = threading.Timer(_LAST_WORD_SECONDS + _GOODBYE_SECONDS, os._exit, (code,))
        last_moment.daemon = True
        # The system may allow no further thread. Then a stream or a disk that blocks delays the end.
        with contextlib.suppress(RuntimeError):
            last_moment.start()
        remedy = "; the same command resumes from the newest checkpoint"
        # A process that ends at its start may not have a run directory yet.
        where = self._stacks if self._stacks.parent.is_dir() else "below"
        say(f"{why}{remedy}. Stacks of all threads: {where}" if stacks else f"{why}{remedy}")
        if stacks:
            with contextlib.suppress(OSError), self._stacks.open("a", encoding="utf-8") as file:
                print(f"{time.strftime('%F %T')} {why}", file=file, flush=True)
                dump_stacks(file)
            dump_stacks(sys.stderr)
        self.on_end(why)
        if stacks:
            self._linger()
        last_moment.cancel()
        # sys.exit would end only this thread, and a regular exit waits for threads and devices that hang.
        os._exit(code)

    def _linger(self) -> None:
        if self._peers is not None and self._process == 0:
            time.sleep(_LAST_WORD_SECONDS)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
