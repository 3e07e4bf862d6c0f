"""The run directory: whether this run may use it, and whether it continues the run that is in it.

Two mistakes cost days. Starting a changed model or other data in an old run's directory would resume the old state and train on with it;
so the directory stores the config and a fingerprint of the data, and a start that differs in a key of `FIXED` is refused, by name, unless
`--allow-change` permits it. And two runs in one directory would overwrite each other's checkpoints; so a run holds a lock on it, and stops
when the lock file is gone: the kernel locks a file and not a name, and the next run would lock a new file of the same name.

A directory may also come from a stranger. A link in it would lead a run to write somewhere else, and a pipe would block it for ever; so
every name that a run itself uses must be a regular file or a folder. The checks need no JAX, and happen before anything is written.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from jgt import document
from jgt.document import InputError, collect, shown, suggestion

from ..checkpoint.disk import DiskError, describe, kind, patiently
from ..checkpoint.steps import FOLDER, Steps, find_steps
from ..code.files import COPY, read_code
from ..command_line import EndError
from ..config import Run
from ..profile.steps import PROFILE

FIXED = ("model", "data", "run.seed", "code")
"""Keys that must not change between two starts of a run, and the user's own code. All else (mesh, rules, steps, batch, ...) may."""
CONFIG, DATA, CONFIGS = "config.yaml", "data.json", "configs"
"""The run's config, the identity of its data, and the folder for what they were before."""
LOGS = "logs"
"""The folder for the output of the launcher's processes."""
_LOCK = "lock"
_NOT_MOVED = ("data", LOGS, _LOCK)
"""Stays when an earlier run is moved away: encoded text serves any run, and the launcher has its logs open while the run starts."""
_FILES = re.compile(
    rf"(config\.yaml|data\.json|metrics\.(jsonl|csv)|loggers\.json)(\.new)?|events(-[0-9]+)?\.jsonl|stacks-[0-9]+\.txt|sample\.txt|{_LOCK}"
)
_FOLDERS = ("checkpoints", COPY, CONFIGS, "data", "faults", "tensorboard", "wandb", LOGS, PROFILE)
_MAX_BYTES = 1_000_000


class InUseError(EndError):
    """Another run is using this directory, or may be; the message names it."""


class Lock:
    """The lock on a run directory. file: the lock file, open and locked."""

    def __init__(self, path: Path, file: TextIO):
        self._path = path
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
            gone = f"{self._path} was removed or replaced while this run was using it, so another run may be using the directory"
            raise InUseError(f"{gone}. This one stops, and writes nothing more there")


@dataclass(frozen=True, kw_only=True)
class Resume:
    """What a run resumes from: its own newest checkpoint, or the newest one in `path` if it has none of its own.

    never: start from step 0 instead. allow: keys below `FIXED` that may differ from the run that is resumed.
    """

    never: bool = False
    path: Path | None = None
    allow: tuple[str, ...] = ()


def read_resume(resume: str, allow: Sequence[str], folder: Path) -> Resume:
    """The flags `--resume` (auto, never or a path) and `--allow-change` (keys) of a run in this folder. Raises InputError."""
    problems = []
    for key in allow:
        if not any(_is_below(key, section) for section in FIXED):
            keys = f"It takes these keys and the keys below them: {', '.join(FIXED)}"
            near = suggestion(key, FIXED)
            why = f"unknown key.{near}" if near else "is not a key that needs to be allowed."
            problems.append(f"command line: --allow-change: {key}: {why} {keys}")
    path = None if resume in ("auto", "never") else Path(resume)
    # A run with checkpoints of its own goes on from them, and its origin may be gone.
    if path is not None and not document.is_folder(path) and not Steps(folder / FOLDER).listed():
        problems.append(f"command line: --resume: {resume}: is not a folder. Write auto, never, a run directory or one of its checkpoints")
    if problems:
        raise InputError(problems)
    return Resume(never=resume == "never", path=path, allow=tuple(allow))


def check_places(run: Run, resume: Resume) -> None:
    """Raises InputError with everything that is wrong with the run directory and the weights."""
    problems: list[str] = []
    with collect(problems):
        check_folder(run, resume)
    with collect(problems):
        check_weights(run)
    if problems:
        raise InputError(problems)


def check_folder(run: Run, resume: Resume) -> None:
    """Raises InputError if the run directory cannot be used, or was started with other values of the keys in `FIXED`; or DiskError."""
    folder = run.config.run.path
    path = folder / CONFIG
    try:
        problems = [f"{run.where('run.dir')}: run.dir: {problem}" for problem in _place_problems(folder, moved=resume.never)]
    except OSError as error:
        raise DiskError(f"{describe(error, folder)}. No checkpoint was changed") from None
    if problems:
        raise InputError(problems)
    # No config.yaml: no run was started here yet.
    if resume.never or not path.is_file():
        return
    before = document.read(path).plain()
    problems = _changed(run, {**{key: _get(before, key) for key in FIXED}, "code": code_of(folder)}, str(path), resume.allow)
    if problems:
        raise InputError(problems)


def code_of(folder: Path) -> str | None:
    """The checksum of a run directory's copy of the user's own code; None if it has none that can be read."""
    if document.is_folder(folder / COPY):
        with contextlib.suppress(InputError):
            return read_code([folder / COPY]).checksum
    return None


def check_weights(run: Run) -> None:
    """Raises InputError if there is no checkpoint at `checkpoint.weights`, also if this start is not going to use it; or OSError."""
    weights = run.config.checkpoint.weights
    if weights is None:
        return
    steps, named = find_steps(Path(weights))
    if named is None and not steps.listed():
        why = f"no checkpoint in {weights}" if os.path.lexists(weights) else f"{weights} does not exist"
        remedy = "Name a run directory, or one of the steps in its checkpoints/"
        raise InputError([f"{run.where('checkpoint.weights')}: checkpoint.weights: {why}. {remedy}"])


def check_data(run: Run, fingerprint: Mapping[str, Any], resume: Resume) -> None:
    """Raises InputError if the data's fingerprint differs from the one in the run directory."""
    path = run.config.run.path / DATA
    if resume.never or not path.is_file():
        return
    try:
        before = json.loads(document.read_bytes(path, _MAX_BYTES))
    except (ValueError, RecursionError) as error:
        before = error
    if not isinstance(before, dict):
        why = before if isinstance(before, Exception) else "it is not a JSON object"
        raise InputError([f"{path}: is damaged: {why}. Remove it if the data has not changed"])
    if problems := _changed_data(run, before, fingerprint, str(run.config.run.path), resume.allow):
        raise InputError(problems)


def check_origin(run: Run, before: Mapping[str, Any], data: Mapping[str, Any], where: str, allow: Sequence[str]) -> None:
    """Raises InputError if another run's checkpoint, whose fingerprints are `before`, was made with another model or other data."""
    config, old = (value if isinstance(value := before.get(key), dict) else {} for key in ("config", "data"))
    problems = [*_changed(run, config, where, allow), *_changed_data(run, old, data, where, allow)]
    if problems:
        raise InputError(problems)


def fingerprints(run: Run, data: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint records about its run, as plain values."""
    return {"config": _fixed(run), "data": dict(data)}


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
            # flock, because the kernel releases it when the process dies, however it dies. A file that marks the lock would stay.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                remedy = "Wait until it ends, or give this one another name (run.name=...)"
                raise InUseError(f"another run is using {folder}. {remedy}") from None
            time.sleep(0.2)
        except OSError:
            # The file system has no locks.
            return


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


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
    found = set()
    for path in _movable(folder):
        # Another process may move it away at this moment.
        with contextlib.suppress(FileNotFoundError):
            found.add((path.name, (state := path.lstat()).st_dev, state.st_ino))
    return frozenset(found)


def write_whole(path: Path, text: str) -> None:
    """Writes a file of the run directory. A kill leaves the old one or the new one. Raises OSError."""
    # A start that changes nothing needs no room on the disk.
    with contextlib.suppress(OSError):
        if path.read_bytes() == text.encode():
            return
    # Other processes of the run may read the file at this moment: they see the old one or the new one, never a part.
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


def _movable(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name not in _NOT_MOVED] if folder.is_dir() else []


def _place_problems(folder: Path, *, moved: bool) -> Iterator[str]:
    """Why a run cannot write in its directory, or would write outside of it.

    moved: an earlier run is going to be moved out of the directory, so only what stays has to be right.
    """
    # The directory itself, or the nearest one above it that exists. lexists, because a broken link is in the way too.
    above = next((path for path in (folder, *folder.absolute().parents) if os.path.lexists(path)), Path())
    if not document.is_folder(above):
        yield f"{above} is not a folder. Name another directory"
    elif not os.access(above, os.W_OK | os.X_OK):
        yield f"no permission to write in {above}"
    elif above == folder:
        for entry in sorted(folder.iterdir()):
            wanted = stat.S_IFREG if _FILES.fullmatch(entry.name) else stat.S_IFDIR if entry.name in _FOLDERS else None
            found = patiently(partial(kind, entry), entry)
            # None: another process of this run may have renamed it after the listing.
            if wanted is not None and found not in (None, wanted) and (entry.name in _NOT_MOVED or not moved):
                own = "a regular file" if wanted == stat.S_IFREG else "a folder"
                yield f"{entry} is not {own}, as a run's own would be. Remove it, or name another directory"


def _fixed(run: Run) -> dict[str, Any]:
    # Written and read once more, so that values compare equal to the ones in a file: a tuple is a list there.
    resolved = document.parse(document.dump(run.resolved()), "config").plain()
    return {**{key: _get(resolved, key) for key in FIXED}, "code": run.code.checksum or None}


def _changed(run: Run, before: Mapping[str, Any], where: str, allow: Sequence[str]) -> list[str]:
    return [
        f"{run.where(key)}: {key}: is {_shown(key, new)}, but {where} was started with {_shown(key, old)}. "
        f"Change it back, give the run another name (run.name=...), or allow it (--allow-change {key})"
        for section, value in _fixed(run).items()
        for key, old, new in _differences(section, before.get(section), value)
        if not any(_is_below(key, allowed) for allowed in allow)
    ]


def _shown(key: str, value: Any) -> str:
    if key != "code":
        # As YAML has them.
        return json.dumps(value) if value is None or isinstance(value, bool) else shown(value)
    # Nobody reads a checksum.
    return "no code of your own" if value is None else f"other code ({value[:8]})"


def _changed_data(run: Run, before: Mapping[str, Any], after: Mapping[str, Any], where: str, allow: Sequence[str]) -> list[str]:
    keys = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    was, now = ({key: shown(value) for key, value in data.items()} for data in (before, after))
    changed = [f"{key} was {was.get(key, 'not there')}, is {now.get(key, 'not there')}" for key in keys]
    if not changed or any(_is_below(key, "data") for key in allow):
        return []
    return [
        f"{run.where('data')}: data: is not the data that {where} was started with: {'; '.join(changed)}. "
        "Give the run another name (run.name=...), or allow it (--allow-change data)"
    ]


def _is_below(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def _differences(key: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        # A key that is missing in the run's file was introduced after the run started. Its default is what the run was started with.
        for name in [name for name in old if name in new]:
            yield from _differences(f"{key}.{name}", old[name], new[name])
    elif old != new:
        yield key, old, new


def _get(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
