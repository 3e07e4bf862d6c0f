"""The run directory: what it was started with, and whether this run may go on in it."""

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
from pathlib import Path
from typing import Any

from jgt import document
from jgt.document import InputError, shown
from train.config import Run

FIXED = ("model", "data", "run.seed")
"""What must be as it was when the run started; the rest (mesh, rules, steps, batch, ...) may change between starts."""
LOGS = "logs"
"""What a launcher's processes print."""
PROFILE = "profile"
"""What `--profile` records."""
_LOCK = "lock"
_KEPT = ("data", LOGS, _LOCK)
"""Encoded text is of use to any run, and the launcher writes to its files while the run starts."""
_FILES = re.compile(rf"(config\.yaml|data\.json|metrics\.jsonl)(\.new)?|events(-[0-9]+)?\.jsonl|stacks-[0-9]+\.txt|sample\.txt|{_LOCK}")
_FOLDERS = ("checkpoints", "data", "faults", "tensorboard", LOGS, PROFILE)
_MAX_BYTES = 1_000_000


class InUseError(Exception):
    """Another run is at work in this directory; the message says in which."""


@dataclass(frozen=True, kw_only=True)
class Resume:
    """What to go on from: the newest checkpoint here if there is one, else that of `path`; never: start again.

    allow: keys below `FIXED` that may differ from those of the run that is gone on with.
    """

    never: bool = False
    path: Path | None = None
    allow: tuple[str, ...] = ()


def read_resume(resume: str, allow: Sequence[str]) -> Resume:
    """From the command line: auto, never or a path. Raises InputError."""
    problems = []
    for key in allow:
        if not any(_is_below(key, section) for section in FIXED):
            problems.append(f"command line: --allow-change: {key}: may change anyway, or is no key. These and what is below them can be allowed: {', '.join(FIXED)}")
    path = None if resume in ("auto", "never") else Path(resume)
    if path is not None and not document.is_folder(path):
        problems.append(f"command line: --resume: {resume}: is no folder. Write auto, never, a run directory or one of its checkpoints")
    if problems:
        raise InputError(problems)
    return Resume(never=resume == "never", path=path, allow=tuple(allow))


def check_folder(run: Run, resume: Resume) -> None:
    """Raises InputError when the run directory was started with another model or other data, naming the keys, or is none."""
    folder = run.config.run.path
    path = folder / "config.yaml"
    if found := [f"{run.where('run.dir')}: run.dir: {problem}" for problem in _place_problems(folder, kept=resume.never)]:
        raise InputError(found)
    if resume.never or not path.is_file():
        return
    before = document.read(path).plain()
    problems = _changed(run, {key: _get(before, key) for key in FIXED}, str(path), resume.allow)
    if problems:
        raise InputError(problems)


def check_data(run: Run, fingerprint: Mapping[str, Any], resume: Resume) -> None:
    """Raises InputError when the data's own fingerprint differs from the one that the run directory keeps."""
    path = run.config.run.path / "data.json"
    if resume.never or not path.is_file():
        return
    try:
        before = json.loads(document.read_bytes(path, _MAX_BYTES))
    except (ValueError, RecursionError) as error:
        before = error
    if not isinstance(before, dict):
        raise InputError([f"{path}: is damaged: {before if isinstance(before, Exception) else 'it holds no JSON object'}. Remove it if the data is what it was"])
    if problems := _changed_data(run, before, fingerprint, str(run.config.run.path), resume.allow):
        raise InputError(problems)


def check_origin(run: Run, before: Mapping[str, Any], data: Mapping[str, Any], where: str, allow: Sequence[str]) -> None:
    """Raises InputError when a checkpoint from elsewhere, with these fingerprints, was made with another model or other data."""
    config, old = (value if isinstance(value := before.get(key), dict) else {} for key in ("config", "data"))
    problems = [*_changed(run, config, where, allow), *_changed_data(run, old, data, where, allow)]
    if problems:
        raise InputError(problems)


def fingerprints(run: Run, data: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of its run, as plain values."""
    return {"config": _fixed(run), "data": dict(data)}


@contextlib.contextmanager
def held(folder: Path, seconds: float = 10.0) -> Iterator[None]:
    """Has the run directory for itself, and creates it; a process that was just killed has so long to be gone. Raises InUseError.

    File systems that know no locks let everyone in. Raises InputError where nothing can be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = (folder / _LOCK).open("w")
    except OSError as error:
        raise InputError([f"run.dir: {error.filename} cannot be written: {error.strerror or error}. Name another directory"]) from None
    with opened as file:
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise InUseError(f"another run is at work in {folder}. Wait for its end, or give this one another name (run.name=...)") from None
                time.sleep(0.2)
            except OSError:
                break
        yield


def make_way(folder: Path) -> Path | None:
    """Moves an earlier run in this folder to a folder beside it, which is returned; None where there is none."""
    earlier = [path for path in folder.iterdir() if path.name not in _KEPT] if folder.is_dir() else []
    if not earlier:
        return None
    beside = (folder.absolute().with_name(f"{folder.absolute().name}.{n}") for n in itertools.count(1))
    target = next(path for path in beside if not os.path.lexists(path))
    target.mkdir()
    for path in earlier:
        path.rename(target / path.name)
    return target


def write_folder(run: Run, fingerprint: Mapping[str, Any]) -> None:
    """Creates the run directory and notes the resolved config and the data's fingerprint."""
    folder = run.config.run.path
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / "config.yaml", document.dump(run.resolved()))
    _replace(folder / "data.json", json.dumps(dict(fingerprint), indent=1) + "\n")


def _place_problems(folder: Path, *, kept: bool) -> Iterator[str]:
    """What keeps a run from writing in its directory, and nowhere else: behind a link is another place, and a pipe waits.

    kept: all but what is kept is moved away first.
    """
    above = next((path for path in (folder, *folder.absolute().parents) if os.path.lexists(path)), Path())
    if not document.is_folder(above):
        yield f"{above} is no folder. Name another directory"
    elif not os.access(above, os.W_OK | os.X_OK):
        yield f"no permission to write in {above}"
    elif above == folder:
        for entry in sorted(folder.iterdir()):
            wanted = stat.S_IFREG if _FILES.fullmatch(entry.name) else stat.S_IFDIR if entry.name in _FOLDERS else None
            # Another process may have renamed it since.
            with contextlib.suppress(FileNotFoundError):
                if wanted not in (None, stat.S_IFMT(entry.lstat().st_mode)) and (entry.name in _KEPT or not kept):
                    yield f"{entry} is no {'file' if wanted == stat.S_IFREG else 'folder'} of a run's own. Remove it, or name another directory"


def _replace(path: Path, text: str) -> None:
    # Other processes of the run may be reading it.
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


def _fixed(run: Run) -> dict[str, Any]:
    # As a file would give it back.
    resolved = document.parse(document.dump(run.resolved()), "config").plain()
    return {key: _get(resolved, key) for key in FIXED}


def _changed(run: Run, before: Mapping[str, Any], where: str, allow: Sequence[str]) -> list[str]:
    return [
        f"{run.where(key)}: {key}: is {shown(new)}, but {where} was started with {shown(old)}. Change it back, give the run another name (run.name=...), "
        f"or allow it (--allow-change {key})"
        for section, value in _fixed(run).items()
        for key, old, new in _differences(section, before.get(section), value)
        if not any(_is_below(key, allowed) for allowed in allow)
    ]


def _changed_data(run: Run, before: Mapping[str, Any], after: Mapping[str, Any], where: str, allow: Sequence[str]) -> list[str]:
    changed = [f"{key} was {shown(before.get(key))}, is {shown(after.get(key))}" for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
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
        # A key that the run's file does not have is younger than the run: its default is what the run was started with.
        for name in [name for name in old if name in new]:
            yield from _differences(f"{key}.{name}", old[name], new[name])
    elif old != new:
        yield key, old, new


def _get(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
