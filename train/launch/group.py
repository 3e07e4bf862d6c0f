"""A group: the processes of one run on this machine, which live and die together.

A run cannot continue without one of its processes, and its other processes may wait for it for ever. So when one fails, the others have a
grace period to end by themselves (their own watch gives them a better reason than a signal would), and are killed after it. Killing has
an order: SIGCONT, because a suspended process would act on no other signal; SIGABRT, on which Python writes the stacks of all threads;
after two seconds SIGKILL, which always works.

The invariants: `wait` returns only when every process of the group has ended, so two groups never run at once; and the group's exit code
is the first failure's, since the later ones are its consequences.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from jgt.document import InputError

from ..files.disk import describe
from ..files.ends import Exit
from ..files.streams import say
from ..settings.command_line import FEWER, LAUNCHED, TOKEN

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_WELL = (Exit.DONE, Exit.LOST)
"""A process that ended with one of these did not fail: a restart would have nothing to do."""
_POLL_SECONDS = 0.1
_STACKS_SECONDS = 2.0
# Linux's sys/prctl.h; Python's standard library has no prctl.
_PR_SET_PDEATHSIG = 1
report = functools.partial(say, who="jgt launch")
"""Prints a line for a person. A terminal that is closed or stopped does not keep the launcher from a restart."""


def environments(count: int, *, virtual: bool, fewer: bool = False) -> list[dict[str, str]]:
    """The environment variables of each of `count` processes, which give it an equal share of this machine's GPUs.

    virtual: the processes use virtual CPU devices instead. fewer: other starts may have another number of processes. Raises InputError if
    `count` does not divide the number of GPUs.
    """
    gpus = [] if virtual or count == 1 else _gpus(os.environ)
    if len(gpus) % count:
        fits = ", ".join(str(n) for n in range(1, len(gpus) + 1) if len(gpus) % n == 0)
        raise InputError([f"command line: --processes: {count} processes cannot share {len(gpus)} GPUs equally. These can: {fits}"])
    share = len(gpus) // count
    common = {**os.environ, **({FEWER: "1"} if fewer else {})}
    return [{**common, **({_VISIBLE: ",".join(gpus[i * share : (i + 1) * share])} if gpus else {})} for i in range(count)]


def _gpus(environment: Mapping[str, str]) -> list[str]:
    if _VISIBLE in environment:
        # -1 is CUDA's way to hide all GPUs.
        return [name for name in environment[_VISIBLE].split(",") if name not in ("", "-1")]
    return sorted((path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")), key=int)


@dataclass(frozen=True, kw_only=True)
class End:
    """The end of a group: the exit code of each process (negative: the signal that killed it), and the first failed process, if any."""

    codes: tuple[int, ...]
    first: int | None

    @property
    def code(self) -> int:
        """The exit code of the first process that failed; 128 + its number for a signal, as in a shell. Without one: DONE or LOST."""
        if self.first is None:
            return max(self.codes, default=Exit.DONE)
        code = self.codes[self.first]
        return code if code >= 0 else 128 - code


class Group:
    """Processes of one run, one for each environment. The first one writes to the terminal, the others to files in `logs`.

    A process whose file cannot be opened writes to the terminal too. Raises OSError if not all processes can be started.
    """

    def __init__(self, arguments: Sequence[str], environments: Sequence[Mapping[str, str]], logs: Path):
        count, port = len(environments), free_port()
        # New for each group, so that a process which outlived its group cannot join the next.
        ours = {TOKEN: secrets.token_hex(32), LAUNCHED: "1"}
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for process, environment in enumerate(environments):
                flags = [] if count == 1 else ["--coordinator", f"localhost:{port}", "--processes", str(count), "--process", str(process)]
                # Through jgt, because `-m train` would run a train.py of the user's.
                command = [sys.executable, "-m", "jgt", "train", *arguments, *flags]
                with contextlib.nullcontext() if process == 0 else _open_log(log_of(logs, process)) as log:
                    # In a new session, so that Ctrl-C reaches only the launcher, which passes it on once. preexec_fn is not safe in a
                    # process with several threads; the launcher's second one does nothing but write to stderr.
                    prepare, variables = _end_with(os.getpid()), {**environment, **ours}
                    started = subprocess.Popen(command, stdout=log, stderr=log, env=variables, start_new_session=True, preexec_fn=prepare)  # noqa: PLW1509
                    self._processes.append(started)
        except OSError:
            # Those that were started would wait for the others, and the next group would start beside them.
            self.send(signal.SIGKILL)
            self.wait(0)
            raise

    def wait(self, grace_seconds: float) -> End:
        """Waits until all processes have ended. `grace_seconds` after the first failure, the remaining ones are killed."""
        first, deadline = None, float("inf")
        while any(process.poll() is None for process in self._processes):
            if first is None and (failed := [i for i, process in enumerate(self._processes) if process.poll() not in (None, *_WELL)]):
                first, deadline = failed[0], time.monotonic() + grace_seconds
            if time.monotonic() > deadline:
                self._kill()
            time.sleep(_POLL_SECONDS)
        codes = tuple(process.wait() for process in self._processes)
        # The last processes may fail together, after the last poll.
        failed = [i for i, code in enumerate(codes) if code not in _WELL]
        return End(codes=codes, first=first if first is not None else next(iter(failed), None))

    def send(self, number: int) -> None:
        """Sends a signal to each process that still runs, and to the processes that it started."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def _kill(self) -> None:
        self.send(signal.SIGCONT)
        self.send(signal.SIGABRT)
        deadline = time.monotonic() + _STACKS_SECONDS
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes):
            time.sleep(_POLL_SECONDS)
        self.send(signal.SIGKILL)


def log_of(logs: Path, process: int) -> Path:
    """The file with the output of a process."""
    return logs / f"process-{process}.log"


def _open_log(path: Path) -> IO[bytes] | contextlib.nullcontext[None]:
    """A log to append to; nothing, and a line for a person, if it cannot be opened."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A link would lead outside of the run directory, and a pipe would block.
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666), "ab")
    except OSError as error:
        report(f"{describe(error, path)}. The output of this process follows here")
        return contextlib.nullcontext()


def free_port() -> int:
    """A port of this machine that nobody listens at now."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        # Another program may take the port before the run's first process does. The run then fails, and is started again.
        return free.getsockname()[1]


def _end_with(parent: int) -> Callable[[], None] | None:
    """On Linux: makes the kernel send SIGTERM to a child when its launcher dies, which after a SIGKILL cannot do it itself."""
    if not sys.platform.startswith("linux"):
        return None
    # Loaded before the fork: after it, only what is already in memory is safe to use.
    library = ctypes.CDLL(None, use_errno=True)

    def prepare() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        # The launcher may have died before the line above.
        if os.getppid() != parent:
            os._exit(1)

    return prepare
