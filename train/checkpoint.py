"""Checkpoints: parameters, optimizer state and the data's position. The only file that knows Orbax."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jgt.document import InputError
from jgt.placement import path_text
from jgt.plan.units import size_text
from train.config import CheckpointConfig
from train.manifest import ArrayEntry, BrokenError, Manifest, file_entries
from train.step import State
from train.steps import Steps

_ARRAYS = "state"
_ROOM = 1.1
"""How much more than its arrays a save may need."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a manifest says of the run: axis sizes of the mesh, fingerprints of config and data."""

    mesh: Mapping[str, int] = field(default_factory=dict)
    fingerprints: Mapping[str, Any] = field(default_factory=dict)


class SaveError(Exception):
    """A save that failed; the message says why. What was saved before is as it was."""


class Checkpoints:
    """The checkpoints of one run directory, written in the background, the last `keep` kept.

    All processes make the same calls; the first one names and removes folders.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, identity: Identity | None = None):
        self._steps = Steps(folder)
        self._config = config
        self._identity = identity or Identity()
        self._is_first = jax.process_index() == 0
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._writer = _writer()
        if self._is_first:
            self._steps.clear()

    def find(self) -> tuple[Manifest | None, list[str]]:
        """The newest step whose files are as they were written, and what was set aside on the way to it."""
        reports: list[str] = []
        while step := self._newest():
            found, problem = self._read(step)
            if found is not None:
                return found, reports
            if self._is_first:
                aside = self._steps.set_aside(step)
                reports.append(f"the checkpoint of step {step} is damaged ({problem}); it is not used, and is now {aside}")
            _barrier("set aside")
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
        failure = self._ended() or self._no_room(state)
        if not self._agreed(failure is None):
            self._give_up()
            raise SaveError("another process failed" if failure is None else _text(failure)) from failure
        try:
            self._writer.save(self._steps.saving(step) / _ARRAYS, args=ocp.args.StandardSave(state._asdict()), force=True)
        except Exception as error:
            self._give_up()
            raise SaveError(_text(error)) from error
        found = Manifest(
            step=step,
            samples=samples,
            mesh=dict(self._identity.mesh),
            versions={name: metadata.version(name) for name in ("jax", "orbax-checkpoint")},
            fingerprints=dict(self._identity.fingerprints),
            arrays=_arrays(state),
            files=(),
        )
        self._thread = threading.Thread(target=self._finish, args=(found,), name="checkpoint")
        self._thread.start()

    def restore(self, found: Manifest, shapes: State, shardings: State) -> State:
        """The state of a step, laid out as asked whatever the mesh it was saved on. Raises InputError for another tree."""
        _check_tree(found, shapes, self._steps.path(found.step))
        target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
        arrays = self._steps.path(found.step) / _ARRAYS
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
            restored: Any = reader.restore(arrays, args=ocp.args.StandardRestore(target._asdict()))
        return State(**restored)

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

    def close(self) -> None:
        """Waits and lets go of the folder."""
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

    def _read(self, step: int) -> tuple[Manifest | None, str]:
        """A step's manifest, if all processes find their part of its files whole."""
        try:
            found, problem = self._steps.read(step, (jax.process_index(), jax.process_count())), ""
        except (BrokenError, OSError) as error:
            found, problem = None, str(error)
        return (found, "") if self._agreed(found is not None) else (None, problem or "another process says so")

    def _newest(self) -> int:
        """The newest step that the first process lists; 0 for none."""
        step = max(self._steps.listed(), default=0)
        return step if jax.process_count() == 1 else int(multihost_utils.broadcast_one_to_all(np.int64(step)))

    @staticmethod
    def _agreed(fine: bool) -> bool:
        """Whether it is fine on all processes."""
        return fine if jax.process_count() == 1 else bool(np.asarray(multihost_utils.process_allgather(np.array([fine]))).all())

    def _no_room(self, state: State) -> OSError | None:
        """What keeps a save from fitting on the disk, this process's part of it."""
        needed = _ROOM * sum(shard.data.nbytes for x in jax.tree.leaves(state) for shard in x.addressable_shards if shard.replica_id == 0)
        try:
            self._steps.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self._steps.folder).free
        except OSError as error:
            return error
        return None if free >= needed else OSError(f"{size_text(needed)} are needed in {self._steps.folder}, but {size_text(free)} are free")


def _writer() -> ocp.AsyncCheckpointer:
    return ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler(), timeout_secs=600)


def _barrier(name: str) -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def _arrays(state: State) -> tuple[ArrayEntry, ...]:
    leaves = jax.tree.leaves_with_path(state._asdict())
    return tuple(ArrayEntry(path=path_text(path), shape=tuple(x.shape), dtype=str(x.dtype)) for path, x in leaves)


def _check_tree(found: Manifest, shapes: State, where: Path) -> None:
    """Raises InputError with each array that is missing, new, or of another shape or type: Orbax would cast it silently."""
    saved, wanted = ({entry.path: entry for entry in entries} for entries in (found.arrays, _arrays(shapes)))
    problems = [f"{where}: {path}: is not part of this model" for path in sorted(saved.keys() - wanted.keys())]
    problems += [f"{where}: {path}: is missing in the checkpoint" for path in sorted(wanted.keys() - saved.keys())]
    for path in sorted(saved.keys() & wanted.keys()):
        old, new = saved[path], wanted[path]
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            problems.append(f"{where}: {path}: is {old.dtype}{list(old.shape)} in the checkpoint, but {new.dtype}{list(new.shape)} in this run")
    if problems:
        raise InputError([f"{problem}. Give the run another name (run.name=...), or the model it was started with" for problem in problems])


def _text(error: BaseException) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0]
