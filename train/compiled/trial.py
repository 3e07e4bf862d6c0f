"""The programs on trial: those that a start has loaded, and that have not yet run without ending it.

A stored program can be whole and still end the process that loads it: it may use instructions that this machine lacks, or a driver may
have changed under it. A restart would load it again and die again, for ever. So a start writes the name of each stored program that it
loads into a file of its own, before it loads it, and removes that file as soon as a step is finished. A file whose process is dead names
the suspects; they are removed, and compiled again.

Whether a process lives is asked of the kernel: it holds a lock on its file, which disappears with it, however it dies, and which has no
meaning that a number of a process could lose to another machine or container. A file is locked before it gets its name, so that it is
never seen without its lock. Those who look take shared locks, so that several starts at once all find the same suspects.

On a file system without locks, or where nothing can be written, programs are not on trial.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from .sealed import UNFINISHED

TRIAL = ".trial"
"""The end of the names of files that list programs on trial."""
_MAX_BYTES = 1_000_000


class Trial:
    """This process's list of programs on trial, in a folder. Its methods may be called from any thread, and never raise OSError."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._descriptor: int | None = None

    def add(self, name: str) -> None:
        """Notes a program that is about to be loaded."""
        with self._lock, contextlib.suppress(OSError):
            if self._descriptor is None:
                self._path, self._descriptor = _begin(self._folder)
            os.write(self._descriptor, f"{name}\n".encode())

    def end(self) -> None:
        """The programs noted so far have run, or this process ends for a reason that is not theirs."""
        # The usual case, at each step.
        if self._descriptor is None:
            return
        with self._lock, contextlib.suppress(OSError):
            path, descriptor = self._path, self._descriptor
            self._path = self._descriptor = None
            if path is not None and descriptor is not None:
                # Unlinked before it loses its lock: it is never seen as a dead process's.
                try:
                    path.unlink(missing_ok=True)
                finally:
                    os.close(descriptor)


@contextlib.contextmanager
def suspects(folder: Path) -> Iterator[list[str]]:
    """The names that dead processes have left in their lists. The lists are removed after the `with` block, if it ends well."""
    names: set[str] = set()
    dead: list[Path] = []
    with contextlib.ExitStack() as opened:
        for path in folder.glob(f"*{TRIAL}"):
            with contextlib.suppress(OSError):
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                opened.callback(os.close, descriptor)
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    # BlockingIOError: its process lives. Any other: there are no locks here.
                    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    names.update(os.read(descriptor, _MAX_BYTES).decode(errors="replace").splitlines())
                    dead.append(path)
        yield sorted(names)
        for path in dead:
            with contextlib.suppress(OSError):
                path.unlink()


def _begin(folder: Path) -> tuple[Path, int]:
    """A new, locked list. Raises OSError."""
    name = secrets.token_hex(8)
    new, path = folder / f"{name}{UNFINISHED}", folder / f"{name}{TRIAL}"
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(path)
    except BaseException:
        os.close(descriptor)
        new.unlink(missing_ok=True)
        raise
    return path, descriptor
