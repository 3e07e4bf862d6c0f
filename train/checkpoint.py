"""Checkpoints: parameters, optimizer state and the data's position. The only file that knows Orbax."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jgt.document import is_folder
from jgt.plan.units import size_text
from train import manifest
from train.agree import barrier
from train.arrays import array_entries, check_arrays
from train.manifest import BrokenError, Manifest, file_entries
from train.sections import CheckpointConfig
from train.step import State
from train.steps import FOLDER, Steps

_ARRAYS = "state"
_ROOM = 1.1
"""How much more than its arrays a save may need."""
# Orbax leaves a task for each array behind when a save fails, and asyncio prints them all; SaveError says it once.
logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def free_bytes(folder: Path) -> int:
    """Bytes free on a folder's disk."""
    return shutil.disk_usage(folder).free


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a manifest says of the run: axis sizes of the mesh, fingerprints of config and data."""

    mesh: Mapping[str, int] = field(default_factory=dict)
    fingerprints: Mapping[str, Any] = field(default_factory=dict)


class SaveError(Exception):
    """A save that failed; the message says why. What was saved before is as it was."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A step whose files are as they were written: where it is, and what it holds."""

    folder: Path
    manifest: Manifest


def find_in(path: Path, *, before: int | None = None) -> tuple[Found | None, list[str]]:
    """The newest whole step of another run, and what is wrong with newer ones; nothing there is changed.

    path: a run directory, its `checkpoints` folder, or one step of it; before: only steps below this one count.
    """
    path = path.absolute()
    if not is_folder(path):
        return None, []
    if path.name.isdecimal() and (path / manifest.NAME).exists():
        steps, listed = Steps(path.parent), [int(path.name)]
    else:
        steps = Steps(path / FOLDER if (path / FOLDER).is_dir() else path)
        listed = [step for step in steps.listed() if before is None or step < before]
    reports: list[str] = []
    while step := _of_first(listed.pop() if listed else 0):
        found, problem = _read(steps, step)
        if found is not None:
            return found, reports
        reports.append(f"the checkpoint {steps.path(step)} is damaged ({problem}); it is not used")
    return None, reports


def restore(found: Found, shapes: State, shardings: State, *, cast: bool = False) -> State:
    """The state of a step, laid out as asked whatever the mesh it was saved on.

    Parts of `shapes` without arrays are not read. cast: floating arrays of another type are converted. Raises InputError for another tree.
    """
    return shapes._replace(**_restored(found, _parts(shapes), _parts(shardings), cast=cast))


def restore_params(found: Found, shapes: Any, shardings: Any, *, cast: bool = False) -> Any:
    """The parameters alone, as in `restore`."""
    return _restored(found, {"params": shapes}, {"params": shardings}, cast=cast)["params"]


class Checkpoints:
    """The checkpoints of one run directory, written in the background, the last `keep` kept.

    All processes make the same calls; the first one names and removes folders. free(folder): bytes free on its disk.
    """

    def __init__(
        self, folder: Path, config: CheckpointConfig, identity: Identity | None = None, *, free: Callable[[Path], int] = free_bytes
    ):
        self._steps = Steps(folder)
        self._config = config
        self._identity = identity or Identity()
        self._free = free
        self._is_first = jax.process_index() == 0
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._writer = _writer()
        if self._is_first:
            self._steps.clear()

    @property
    def folder(self) -> Path:
        """Where they are."""
        return self._steps.folder

    def find(self) -> tuple[Found | None, list[str]]:
        """The newest step whose files are as they were written, and what was set aside on the way to it."""
        reports: list[str] = []
        while step := _of_first(max(self._steps.listed(), default=0)):
            found, problem = _read(self._steps, step)
            if found is not None:
                return found, reports
            if self._is_first:
                aside = self._steps.set_aside(step)
                reports.append(f"the checkpoint of step {step} is damaged ({problem}); it is not used, and is now {aside}")
            barrier("set aside")
        return None, reports

    def describe(self) -> str:
        """What there is to go on from, for a person."""
        steps = self._steps.listed()
        if not steps:
            return "no checkpoint was saved"
        return f"the newest checkpoint is that of step {steps[-1]} in {self._steps.folder}; the same command goes on from it"

    def save(self, state: State, step: int, samples: int) -> None:
        """Starts saving `state` after `step` updates and `samples` sequences of training data; returns when it is copied.

        Raises SaveError, on all processes alike, when the save before failed or this one cannot start; training may go on.
        """
        arrays = array_entries(_parts(state))
        failure = self._ended() or self._no_room(state)
        if not _agreed(failure is None):
            self._give_up()
            raise SaveError("another process failed" if failure is None else _text(failure)) from failure
        try:
            self._writer.save(self._steps.saving(step) / _ARRAYS, args=ocp.args.StandardSave(_parts(state)), force=True)
        except Exception as error:
            self._give_up()
            raise SaveError(_text(error)) from error
        found = Manifest(
            step=step,
            samples=samples,
            mesh=dict(self._identity.mesh),
            versions={name: metadata.version(name) for name in ("jax", "orbax-checkpoint")},
            fingerprints=dict(self._identity.fingerprints),
            arrays=arrays,
            files=(),
        )
        self._thread = threading.Thread(target=self._finish, args=(found,), name="checkpoint")
        self._thread.start()

    def poll(self) -> None:
        """Raises SaveError if a save has failed since the last call."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Returns when the last save is on disk. Raises SaveError."""
        failure = self._ended()
        if failure is not None:
            self._give_up()
            raise SaveError(_text(failure)) from failure

    def close(self, seconds: float | None = None) -> None:
        """Waits for the last save, at most so long, and lets go of the folder."""
        if self._thread is not None:
            self._thread.join(timeout=seconds)
            if self._thread.is_alive():
                return
        with contextlib.suppress(SaveError):
            self.wait()
        self._writer.close()

    def _ended(self) -> Exception | None:
        """Waits for the last save, and tells once what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        return failure

    def _finish(self, found: Manifest) -> None:
        try:
            self._writer.wait_until_finished()
            if self._is_first:
                saving = self._steps.saving(found.step)
                self._steps.finish(replace(found, files=file_entries(saving, sha256=self._config.sha256)))
                self._steps.retire(self._config.keep)
        except Exception as error:
            self._failure = error

    def _give_up(self) -> None:
        """After a failed save: its leftovers would keep the disk full."""
        with contextlib.suppress(Exception):
            self._writer.close()
        self._writer = _writer()
        if self._is_first:
            with contextlib.suppress(OSError):
                self._steps.clear()

    def _no_room(self, state: State) -> OSError | None:
        """What keeps a save from fitting on the disk, this process's part of it."""
        needed = _ROOM * sum(shard.data.nbytes for x in jax.tree.leaves(state) for shard in x.addressable_shards if shard.replica_id == 0)
        try:
            self._steps.folder.mkdir(parents=True, exist_ok=True)
            free = self._free(self._steps.folder)
        except OSError as error:
            return error
        return None if free >= needed else OSError(f"{size_text(needed)} are needed in {self._steps.folder}, but {size_text(free)} are free")


def _read(steps: Steps, step: int) -> tuple[Found | None, str]:
    """A step, if all processes find their part of its files whole."""
    found, problem = None, "another process says so"
    try:
        found = Found(folder=steps.path(step), manifest=steps.read(step, (jax.process_index(), jax.process_count())))
    except (BrokenError, OSError) as error:
        problem = str(error)
    return (found, "") if _agreed(found is not None) else (None, problem)


def _restored(found: Found, shapes: dict[str, Any], shardings: dict[str, Any], *, cast: bool) -> dict[str, Any]:
    saved = [entry for entry in found.manifest.arrays if entry.path.partition("/")[0] in shapes]
    check_arrays(found.folder, saved, array_entries(shapes), cast=cast)
    target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    arguments = ocp.checkpoint_utils.construct_restore_args(target)
    is_part = len(saved) < len(found.manifest.arrays)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore(found.folder / _ARRAYS, args=ocp.args.PyTreeRestore(target, restore_args=arguments, partial_restore=is_part))


def _of_first(step: int) -> int:
    """A number as the first process sees it."""
    return step if jax.process_count() == 1 else int(multihost_utils.broadcast_one_to_all(np.int64(step)))


def _agreed(fine: bool) -> bool:
    """Whether it is fine on all processes."""
    return fine if jax.process_count() == 1 else bool(np.asarray(multihost_utils.process_allgather(np.array([fine]))).all())


def _writer() -> ocp.AsyncCheckpointer:
    return ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler(), timeout_secs=600)


def _parts(state: State) -> dict[str, Any]:
    """Those that hold arrays: Orbax wants each of the others back too."""
    return {name: part for name, part in state._asdict().items() if jax.tree.leaves(part)}


def _text(error: BaseException) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0]
