"""The run directory: whether a run may use it, and which files in it are the run's.

Two runs in one directory would overwrite each other's checkpoints. So a run holds a lock on it, and stops when the lock file is gone: the
kernel locks a file and not a name, and the next run would lock a new file of the same name.

A directory may also come from a stranger. A link in it would lead a run to write somewhere else, and a pipe would block it for ever; so
every name that a run itself uses must be a regular file or a folder.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from jgt import find_command
from jgt.document import InputError, path_problem

from ...checkpoint.steps import remove
from ...config import Run
from ...files.bucket import Bucket
from ...files.disk import kind
from ...files.ends import InUseError
from ...files.lease import Lease, hold_lease, holder_of
from ...files.locks import lock
from ...files.mirror import NOT_COPIED, Mirror, adopt_spool, fill_spool, spool_of
from ...records.step_range import PROFILE
from ...settings.code.files import COPY
from ...settings.command_line import LAUNCHED
from ...settings.sections import RunConfig
from ...weights.origin import ORIGIN

CONFIG, DATA, CONFIGS = "config.yaml", "data.json", "configs"
"""The run's config, the identity of its data, and the folder for what they were before."""
CHOICE = "layout.json"
"""The layout that the run has chosen for its devices (`train.auto`)."""
LOGS = "logs"
"""The folder for the output of the launcher's processes."""
_LOCK = "lock"
_NOT_MOVED = ("data", CHOICE, LOGS, _LOCK)
"""Stays when an earlier run is moved away: encoded text and a layout serve any run, and the launcher's logs are open while a run starts."""
_FILES = re.compile(
    rf"(config\.yaml|data\.json|reference\.npz|metrics\.(jsonl|csv)|(layout|loggers)\.json)(\.new)?|events(-[0-9]+|-launcher)?\.jsonl|status-([0-9]+|launcher)\.json(\.new)?|stacks-[0-9]+\.txt|sample\.txt|request\.json(\.new)?|{_LOCK}"
)
_OF_PROCESS = re.compile(r"(?:events|stacks|status)-([0-9]+)\.(?:jsonl|txt|json)")
_FOLDERS = ("checkpoints", COPY, CONFIGS, ORIGIN, "data", "faults", "tensorboard", "wandb", LOGS, PROFILE)

_NOT_SEARCHED, _MOST_SHOWN = ("checkpoints", "wandb"), 5
"""Folders that are searched elsewhere, or in which a service makes links."""


class Lock:
    """The lock on a run directory. file: the lock file, open and locked."""

    def __init__(self, path: Path, file: TextIO):
        self._path, self._here = path, Path.cwd()
        self._inode = _inode(os.fstat(file.fileno()))

    def is_held(self) -> bool:
        """Whether the lock file is still the one that was locked. If it was removed, another run may have locked a new one."""
        try:
            return _inode(self._path.stat()) == self._inode
        except OSError:
            return False

    def check(self) -> None:
        """Raises InUseError if the lock file is not the one that was locked."""
        if not self.is_held():
            if not self._path.is_absolute() and self._here != (now := Path.cwd()):
                why = f"the run's own code has changed the working directory from {self._here} to {now}, and run.dir is relative to it"
                raise InUseError(f"{why}. Change it back there, or name an absolute run.dir")
            gone = f"{self._path} was removed or replaced while this run was using it, so another run may be using the directory"
            raise InUseError(f"{gone}. This one stops, and writes nothing more there")


@contextlib.contextmanager
def lock_folder(folder: Path, seconds: float = 10.0) -> Iterator[Lock]:
    """Creates the run directory and locks it against other runs while inside.

    seconds: how long to wait for the lock, because a process that was just killed may take a moment to disappear. Raises InUseError after
    that, and InputError if nothing can be written there. On file systems without locks there is no protection.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / _LOCK).open("w")
        except OSError as error:
            raise InputError([f"run.dir: {error.filename} cannot be written: {error.strerror or error}. Name another directory"]) from None
        with file:
            _wait_for_lock(file, folder, deadline)
            lock = Lock(folder / _LOCK, file)
            # While this run waited, the file may have been removed with the run that had locked it.
            if lock.is_held():
                yield lock
                return


def _wait_for_lock(file: TextIO, folder: Path, deadline: float) -> None:
    while True:
        try:
            if lock(file):
                return
            if time.monotonic() > deadline:
                remedy = "Wait until it ends, or give this one another name (run.name=...)"
                raise InUseError(f"another run is using {folder}. {remedy}") from None
            time.sleep(0.2)
        except OSError:
            # The file system has no locks.
            return


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


@contextlib.contextmanager
def hold_bucket(run: RunConfig) -> Iterator[Lease]:
    """Holds the bucket of a run while inside, whose local folder is locked. Raises InUseError, InputError and OSError."""
    assert run.url is not None
    bucket = Bucket(run.url)
    bucket.check_conditions()
    fill_folder(run)
    with hold_lease(bucket, run.lease_seconds, spool_of(run.path)) as lease:
        # The run may have gone on elsewhere while this start waited.
        fill_folder(run, strict=True)
        adopt_spool(bucket, run.path)
        yield lease


def fill_folder(run: RunConfig, *, strict: bool = False) -> None:
    """Makes the local folder of a run in a bucket what the bucket has. strict: as in `fill_spool`. Raises InputError and OSError."""
    if run.url is not None:
        fill_spool(Bucket(run.url), run.path, _NOT_MOVED, remove, strict=strict)


@contextlib.contextmanager
def copied(run: RunConfig, process: int, lease: Lease | None) -> Iterator[Mirror | None]:
    """Copies a process's files to the run's bucket while inside; None for a run in a folder. lease: the first process's."""
    if run.url is None:
        yield None
        return
    bucket = Bucket(run.url)
    start = None if lease is not None else holder_of(bucket)

    def may_write() -> bool:
        return lease.is_certain() if lease is not None else holder_of(bucket) == start

    mirror = Mirror(bucket, run.path, run.copy_seconds, lambda name: _is_copied(name, process), may_write)
    try:
        yield mirror
    finally:
        if lease is not None:
            # The last copy waits for a late answer to the lease, because no other one follows.
            lease.is_held()
        mirror.close()


def _is_copied(name: str, process: int) -> bool:
    """Whether a process copies a file of its folder to the bucket."""
    if name.partition("/")[0] in ("data", _LOCK, "checkpoints", "request.json", *NOT_COPIED) or name.endswith(".new"):
        return False
    match = _OF_PROCESS.fullmatch(name)
    return process == (int(match[1]) if match else 0)


def move_earlier_run(folder: Path) -> Path | None:
    """Moves an earlier run from this folder into a new folder beside it. Returns the new folder; None if there was nothing to move."""
    earlier = _movable(folder)
    if not earlier:
        return None
    # Absolute, because the folder may be written as `.`, which has no name to change.
    beside = (folder.absolute().with_name(f"{folder.absolute().name}.{n}") for n in itertools.count(1))
    target = next(path for path in beside if not os.path.lexists(path))
    target.mkdir()
    # One by one instead of the whole folder, because the launcher's logs and the lock stay.
    for path in earlier:
        path.rename(target / path.name)
    return target


def earlier_files(folder: Path) -> frozenset[tuple[str, int, int]]:
    """The files and folders of an earlier run in this folder: name, device and inode, which tell them from new ones of the same name."""
    files = set()
    for path in _movable(folder):
        # Another process may move it away at this moment.
        with contextlib.suppress(FileNotFoundError):
            files.add((path.name, (state := path.lstat()).st_dev, state.st_ino))
    return frozenset(files)


def _movable(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name not in _NOT_MOVED] if folder.is_dir() else []


def place_problems(folder: Path, *, moved: bool) -> Iterator[str]:
    """Why a run cannot write in its directory, or would write outside of it.

    moved: an earlier run is going to be moved out of the directory, so only what stays has to be right.
    """
    # The directory itself, or the nearest one above it that exists. lexists, because a broken link is in the way too.
    above = next((path for path in (folder, *folder.absolute().parents) if os.path.lexists(path)), Path())
    if path_problem(above, "folder"):
        yield f"{above} is not a folder. Name another directory"
    elif not os.access(above, os.W_OK | os.X_OK):
        yield f"no permission to write in {above}"
    elif above == folder:
        for entry in sorted(folder.iterdir()):
            if entry.name in _NOT_MOVED or not moved:
                yield from _entry_problems(entry)


def _entry_problems(entry: Path) -> Iterator[str]:
    wanted = stat.S_IFREG if _FILES.fullmatch(entry.name) else stat.S_IFDIR if entry.name in _FOLDERS else None
    remedy = "as a run's own would be. Remove it, or name another directory"
    actual = None if wanted is None else kind(entry)
    # None: another process of this run may have renamed it after the listing.
    if actual not in (None, wanted):
        yield f"{entry} is not {'a regular file' if wanted == stat.S_IFREG else 'a folder'}, {remedy}"
    elif actual == stat.S_IFDIR and entry.name not in _NOT_SEARCHED:
        others = (path for path in entry.rglob("*") if kind(path) not in (None, stat.S_IFREG, stat.S_IFDIR))
        yield from (f"{path} is neither a regular file nor a folder, {remedy}" for path in itertools.islice(others, _MOST_SHOWN))


@contextlib.contextmanager
def metrics_port(run: Run, process: int | None) -> Iterator[None]:
    """Inside, a process answers at the port of `metrics:`, or its launcher (None) in the place of all. Raises InputError if it is taken."""
    config, command = run.config.metrics, find_command("metrics")
    if config is None or command is None or (process is not None and LAUNCHED in os.environ):
        yield
        return
    with command.load().endpoint(config, run.config.run.path, process, run.where("metrics.port")):
        yield
