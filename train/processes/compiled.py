# pyright: reportPrivateUsage=false
"""Compiled programs that are stored for later starts, and checked before they run.

A program with one wrong bit may run and compute wrong numbers, and JAX's own cache does not always notice. So each one is a sealed file
(`train.files.sealed`); a damaged file is reported, removed and compiled again. No fault of the folder ends a run.

A whole program can still end the process that loads it: it may use instructions that this machine lacks, or a driver may have changed. A
restart would load it again and die again. So a process writes the programs that it loads into a `.trial` file, which it locks, and removes
as soon as a step is finished. A file without a lock shows that a process died with these programs, and the next start removes them. Without
locks or room for such a file, programs are loaded without a trial.

JAX reads and writes its cache through one object with the methods `get` and `put`, and has no public way to give it another. This file puts
its own there, and asks JAX whether it is in use. If not, JAX gets no cache: compiling again is better than running a program unchecked.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
from jax._src import compilation_cache, compiler

from ..files.locks import lock
from ..files.sealed import DamagedError, open_regular, read_sealed, write_sealed
from ..files.streams import say

ENDING = ".sealed-cache"
"""The end of the names of stored programs. JAX's own cache, which may be in the same folder, uses `-cache` and `-atime`."""
TRIAL = ".trial"
_LARGEST = 10 * 2**30
"""The bytes of a folder above which the oldest programs are removed at a start."""
_LONGEST_TRIAL = 1 << 20


class Programs:
    """The compiled programs in a folder, with the methods of JAX's `CacheInterface`. They never raise OSError. key: that of their seals."""

    def __init__(self, folder: Path, key: bytes = b""):
        # JAX shows `_path` in its log.
        self.folder = self._path = folder
        self._key, self._reported = key, set[str]()
        # A path and a descriptor, which stays open until the trial ends: its lock says that the process lives.
        self._trial: tuple[Path, int] | None = None
        # JAX compiles in several threads.
        self._trial_lock = threading.Lock()

    def get(self, key: str) -> bytes | None:
        """The program of a key, which is then on trial; None if there is none that can be used."""
        path = self.folder / f"{key}{ENDING}"
        try:
            program = read_sealed(path, self._key)
        except FileNotFoundError:
            return None
        except DamagedError as error:
            return self._report(f"the compiled program {path} {error}. {_remove(path)}")
        except OSError as error:
            # The disk may have failed for a moment: the file is not damaged, so it stays.
            return self._report(f"the compiled program {path} cannot be read: {error.strerror or error}. It is compiled again")
        with contextlib.suppress(OSError), self._trial_lock:
            if self._trial is None:
                new = self.folder / f"{secrets.token_hex(8)}{TRIAL}"
                self._trial = new, os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
                lock(self._trial[1])
            os.write(self._trial[1], f"{key}\n".encode())
        return program

    def put(self, key: str, value: bytes) -> None:
        """Stores the program of a key, in place of an earlier one."""
        try:
            write_sealed(self.folder / f"{key}{ENDING}", value, self._key)
        except OSError as error:
            why = error.strerror or str(error)
            self._report(f"compiled programs cannot be stored in {self.folder}: {why}. Those that are in it can still be used")

    def end_trial(self) -> None:
        """The programs loaded so far have run, or this process ends for a reason that is not theirs."""
        with self._trial_lock:
            trial, self._trial = self._trial, None
            if trial is not None:
                # Removed before the lock is released: no other process takes it for a dead one's.
                with contextlib.suppress(OSError):
                    trial[0].unlink(missing_ok=True)
                os.close(trial[1])

    def remove_suspects(self) -> None:
        """Removes the programs that dead processes have left on trial."""
        names: set[str] = set()
        for trial in self.folder.glob(f"*{TRIAL}"):
            # An error: this is not a file that a start has written.
            with contextlib.suppress(OSError, ValueError, DamagedError), open_regular(trial) as file:
                if not lock(file):
                    continue
                for key in file.read(_LONGEST_TRIAL).decode().split():
                    program = self.folder / f"{key}{ENDING}"
                    if program.parent == self.folder and program.exists():
                        _remove(program)
                        names.add(key.rpartition("-")[0])
                trial.unlink()
        if names:
            why = f"a start died before it finished a step with compiled programs from {self.folder}"
            self._report(f"{why}. They are compiled again: {', '.join(sorted(names))}")

    def _report(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            say(text)


def open_programs(folder: Path, key: bytes = b"") -> Programs:
    """The programs in a folder, which is made if it is absent. key: that of their seals. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    programs = Programs(folder, key)
    programs.remove_suspects()
    _remove_oldest(folder)
    return programs


def use_programs(programs: Programs) -> bool:
    """Makes JAX store its programs there. Returns whether it does; if not, JAX stores none."""
    # XLA keeps more files below this folder.
    jax.config.update("jax_compilation_cache_dir", str(programs.folder))
    # JAX's default skips programs that compile in under a second. A start has a dozen of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # Any error of another version of JAX means the same.
    with contextlib.suppress(Exception):
        compilation_cache.reset_cache()
        with compilation_cache._cache_initialized_mutex:
            # Through setattr: its type is JAX's own interface.
            setattr(compilation_cache, "_cache", programs)  # noqa: B010
            compilation_cache._cache_initialized = True
        # JAX asks the backend only for the type of its runtime.
        if compilation_cache._get_cache(SimpleNamespace(runtime_type="")) is programs:
            _write_in_each_process()
            return True
    jax.config.update("jax_compilation_cache_dir", None)
    return False


@functools.cache
def _write_in_each_process() -> None:
    """Has JAX store what other processes than the first compile for CPUs, where each has keys of its own. A second call changes nothing."""
    write = compiler._cache_write

    @functools.wraps(write)
    def write_own(key: str, seconds: float, name: str, backend: Any, executable: Any, *callbacks: Any) -> None:
        if backend.platform != "cpu" or backend.process_index() == 0:
            write(key, seconds, name, backend, executable, *callbacks)
        # As in JAX: callbacks are addresses in this process.
        elif not any(callbacks):
            with contextlib.suppress(Exception):
                compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))

    compiler._cache_write = write_own


def finish_trial() -> None:
    """Ends the trial of the programs that JAX has loaded; see `Programs.end_trial`."""
    cache = getattr(compilation_cache, "_cache", None)
    if isinstance(cache, Programs):
        cache.end_trial()


@contextlib.contextmanager
def programs_on_trial() -> Iterator[None]:
    """Programs that are loaded inside stay on trial if the process dies there, or if JAX's runtime raises an error."""
    try:
        yield
    except jax.errors.JaxRuntimeError:
        raise
    except BaseException:
        finish_trial()
        raise
    finish_trial()


def _remove(path: Path) -> str:
    """Removes whatever has this name. Returns a sentence about it."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        return f"It cannot be removed ({error.strerror or error}), and is compiled at each start"
    return "It was removed and is compiled again"


def _remove_oldest(folder: Path) -> None:
    """Removes the oldest programs of a folder that has grown too large. Other files stay: they may be the user's."""
    # Another start may remove them at the same time.
    with contextlib.suppress(OSError):
        stored = [(path.lstat(), path) for path in folder.iterdir() if path.name.endswith(("-cache", "-atime"))]
        newest = sorted((s.st_mtime, s.st_size, path) for s, path in stored if stat.S_ISREG(s.st_mode))[::-1]
        for size, (*_, path) in zip(itertools.accumulate(size for _, size, _ in newest), newest, strict=True):
            if size > _LARGEST:
                path.unlink(missing_ok=True)
