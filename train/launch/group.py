"""A group of processes that live and die together."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_POLL_SECONDS = 0.1
_STACKS_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class End:
    """How a group ended: exit codes by process (negative: the signal that killed it), and which process was the first to fail."""

    codes: tuple[int, ...]
    first: int | None

    @property
    def code(self) -> int:
        """The group's exit code: that of the first failure, 128 + its number for a signal, as in a shell."""
        if self.first is None:
            return 0
        code = self.codes[self.first]
        return code if code >= 0 else 128 - code


class Group:
    """Processes of one run, one for each environment, which find each other on this machine; all but the first write to files."""

    def __init__(self, arguments: Sequence[str], environments: Sequence[Mapping[str, str]], logs: Path):
        count, port = len(environments), _free_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        logs.mkdir(parents=True, exist_ok=True)
        for process, environment in enumerate(environments):
            flags = [] if count == 1 else ["--coordinator", f"localhost:{port}", "--processes", str(count), "--process", str(process)]
            command = [sys.executable, "-m", "train", *arguments, *flags]
            with contextlib.ExitStack() as closing:
                log = None if process == 0 else closing.enter_context((logs / f"process-{process}.log").open("ab"))
                # A session of its own: a Ctrl-C reaches the launcher alone, which passes it on. It has one thread.
                prepare = _die_with(os.getpid())
                started = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True, preexec_fn=prepare)  # noqa: PLW1509
                self._processes.append(started)

    def wait(self, grace_seconds: float) -> End:
        """Waits for the end of all; once one has failed, the others have so long to end by themselves, and are killed then."""
        first, deadline = None, float("inf")
        while any(process.poll() is None for process in self._processes):
            if first is None and (failed := [i for i, process in enumerate(self._processes) if process.poll() not in (None, 0)]):
                first, deadline = failed[0], time.monotonic() + grace_seconds
            if time.monotonic() > deadline:
                self._kill()
            time.sleep(_POLL_SECONDS)
        codes = tuple(process.wait() for process in self._processes)
        failed = [i for i, code in enumerate(codes) if code != 0]
        return End(codes=codes, first=first if first is not None else next(iter(failed), None))

    def send(self, number: int) -> None:
        """Sends a signal to each process that is still there."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def _kill(self) -> None:
        # On SIGABRT a process writes its stacks.
        self.send(signal.SIGCONT)
        self.send(signal.SIGABRT)
        deadline = time.monotonic() + _STACKS_SECONDS
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes):
            time.sleep(_POLL_SECONDS)
        self.send(signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def _die_with(parent: int) -> Callable[[], None] | None:
    """For Linux: has a child stopped when its launcher is killed, which could not tell it."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None, use_errno=True)

    def prepare() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return prepare
