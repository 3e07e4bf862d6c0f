"""Saving a run's state: parameters, optimizer state, and the position in the data.

A save must cost training little, and a failed save must cost nothing. Training waits only until the arrays are copied from the devices. A
writer, `files.py` for a folder or `uploads.py` for a bucket, then writes them, and a thread waits for it and finishes the step, in this
order: all arrays written, manifest, the step's name, and only then the removal of older steps. Wherever the run is killed, the newest
listed step is whole (see `train.checkpoint.steps`).

A save may fail at any point: no room, an error of the disk, another process that fails. Its leftovers are removed, since they would keep
the disk full, and SaveError says why; the caller decides whether to continue. The writes wait for all processes, so whether a save
starts is decided by all processes together. The invariants: at most one save is under way, and every failure is raised exactly once, by
the next call of `save`, `poll` or `wait`.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Mapping
from concurrent import futures
from importlib import metadata
from pathlib import Path

import jax

from ..files.disk import DiskError, describe
from ..files.ends import EndError
from ..files.streams import say
from ..processes.processes import number_of_first_process, true_on_all_processes
from ..step.state import State
from .config import CheckpointConfig
from .files import FilesWriter
from .listing import Base, Kept, Manifest
from .restore import first_line
from .saved import MAX_DATA_BYTES, Search, array_entries
from .signature import read_key
from .steps import Steps, open_steps
from .uploads import ObjectsWriter

_KEPT = 3
"""The number of steps that remain where `checkpoint.keep` does not say it, if they have room."""


class SaveError(EndError):
    """A save failed; the message says why. Earlier checkpoints are untouched."""


class Checkpoints:
    """The checkpoints of one run directory, written in the background; the last `keep` remain.

    folder: a path or a URL. All processes make the same calls in the same order. Only the first one names and removes steps. mesh,
    fingerprints: see `Manifest`. free(folder): bytes free on its disk. is_ours(): whether the run directory still belongs to this run; if
    not, nothing changes there. saved(step): called by a thread of the first process when a step is finished. held(): steps that must not be
    removed.
    """

    def __init__(
        self,
        folder: Path | str,
        config: CheckpointConfig,
        *,
        mesh: Mapping[str, int] | None = None,
        fingerprints: Mapping[str, object] | None = None,
        free: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
        is_ours: Callable[[], bool] = lambda: True,
        saved: Callable[[int], None] = lambda step: None,
        held: Callable[[], Collection[int]] = tuple,
    ):
        key = read_key(config.key)
        self._steps = open_steps(folder, key)
        # A signature covers a file only by its SHA-256.
        sha256 = config.sha256 or key is not None
        steps = self._steps
        self._writer = FilesWriter(steps, free, sha256=sha256) if isinstance(steps, Steps) else ObjectsWriter(steps)
        self._keep, self._may_keep_fewer = config.keep or _KEPT, config.keep is None
        self._keep_every, self._keep_hours = config.keep_every, config.keep_hours
        self._mesh, self._fingerprints = dict(mesh or {}), dict(fingerprints or {})
        self._is_ours, self._saved, self._held = is_ours, saved, held
        self._is_first = jax.process_index() == 0
        self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        # Starts the thread: later, the system may allow no further one.
        self._last: futures.Future[None] | None = self._thread.submit(lambda: None)
        if self._is_first:
            try:
                self._steps.clear()
            except OSError as error:
                raise DiskError(f"{describe(error, self._steps.folder)}. No checkpoint was changed") from error

    def search(self) -> Search:
        """A search for the step to resume from. It sets bad steps aside."""
        return Search(self._steps, is_own=True)

    def newest(self) -> int:
        """As `Steps.newest`."""
        return self._steps.newest()

    def describe(self, *, resumes: bool = True) -> str:
        """Which checkpoint is the newest, for a message. resumes: whether to add that the same command resumes from it."""
        try:
            steps = self._steps.listed()
        except OSError as error:
            return f"its checkpoints cannot be listed ({describe(error, self._steps.folder)})"
        if not steps:
            return "no checkpoint was saved"
        then = "; the same command resumes from it" if resumes else ""
        return f"the newest checkpoint is from step {steps[-1]}, in {self._steps.folder}{then}"

    def save(
        self,
        state: State,
        step: int,
        samples: int,
        phase: int = 0,
        base: Base | None = None,
        data: str | None = None,
        kept: Kept | None = None,
    ) -> None:
        """Starts to save `state` after `step` updates and `samples` sequences of training data. Returns when the arrays are copied.

        phase: the steps since the last exchange of `sync`. base: where the arrays are that the state lacks. data: what this process stores
        about the place in its data. kept: see `Manifest`. Waits for the save before.
        Raises SaveError, on all processes, if the save before has failed or the new one cannot start; training may continue.
        """
        arrays = array_entries(state.arrays())
        # After a failed save the free space is not asked for: the leftovers of that save still take it.
        failure = self._finish_last_save() or self._owner_problem()
        space = None if failure else self._writer.space_problem(state)
        if not true_on_all_processes(space is None) and number_of_first_process(self._remove_oldest()):
            space = None if failure else self._writer.space_problem(state)
        if data is not None and len(data.encode()) > MAX_DATA_BYTES:
            # Otherwise no start could read it.
            failure = failure or OSError(f"the place in the data takes more than {MAX_DATA_BYTES:,} bytes")
        failure = failure or space or self._writer.data_problem(step, data)
        # A process that skipped the save alone would leave the others waiting for it.
        if not true_on_all_processes(failure is None):
            self._abandon()
            raise SaveError("another process failed" if failure is None else first_line(failure)) from failure
        try:
            self._writer.begin(state.arrays(), step)
        except Exception as error:
            self._abandon()
            raise SaveError(first_line(error)) from error
        listing = Manifest(
            step=step,
            samples=samples,
            phase=phase,
            mesh=self._mesh,
            versions={name: metadata.version(name) for name in ("jax", "orbax-checkpoint")},
            fingerprints=self._fingerprints,
            arrays=arrays,
            files=(),
            base=base,
            kept=kept or Kept(),
        )
        # A regular exit waits until the step is finished.
        self._last = self._thread.submit(self._finish, listing)

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return self._last is not None and not self._last.done()

    def poll(self) -> None:
        """Raises SaveError if a save has failed since the last call. Does not wait."""
        if self._last is not None and not self.is_saving:
            self.wait()

    def wait(self) -> None:
        """Returns when the last save is on disk. Raises SaveError if it failed."""
        failure = self._finish_last_save()
        if failure is not None:
            self._abandon()
            raise SaveError(first_line(failure)) from failure

    def close(self, seconds: float | None = None) -> None:
        """Waits for the last save and closes the writer. After `seconds` it gives up: the save may need processes that are gone."""
        if self._last is not None and futures.wait([self._last], seconds).not_done:
            return
        with contextlib.suppress(SaveError):
            self.wait()
        self._writer.close()

    def _finish_last_save(self) -> BaseException | None:
        """Waits for the last save. Returns its failure, and forgets it, so that it is raised only once."""
        last, self._last = self._last, None
        return None if last is None else last.exception()

    def _finish(self, listing: Manifest) -> None:
        self._writer.wait()
        if problem := self._owner_problem():
            raise problem
        if self._is_first:
            self._writer.finish(listing)
            self._saved(listing.step)
            # The step is saved, whatever happens to older ones. The next save tries to remove them, too.
            try:
                self._steps.retire(self._keep, self._kept())
            except OSError as error:
                say(f"old checkpoints cannot be removed: {describe(error, self._steps.folder)}. The next save tries again")
        self._writer.tidy()

    def _kept(self) -> set[int]:
        """The steps that stay, however old they are."""
        every, hours, last = self._keep_every, self._keep_hours, float("-inf")
        kept = {*self._held()}
        for step in self._steps.listed():
            # From the oldest one on, which stays, so that the next removal finds the same.
            if hours is not None and (saved := self._steps.saved_at(step)) >= last + 3600 * hours:
                last = saved
                kept.add(step)
            if every is not None and step % every == 0:
                kept.add(step)
        return kept

    def _abandon(self) -> None:
        """After a failed save: starts with a new writer, and removes the leftovers, which would keep the disk full."""
        self._writer.restart()
        if self._is_first and self._is_ours():
            with contextlib.suppress(OSError):
                self._steps.clear()

    def _owner_problem(self) -> OSError | None:
        return None if self._is_ours() else OSError(f"the run directory of {self._steps.folder} no longer belongs to this run")

    def _remove_oldest(self) -> int:
        """Removes the oldest step for a new one, unless it is the newest or the config asks for it. Returns the number of removed steps."""
        with contextlib.suppress(OSError):
            if self._is_first and self._may_keep_fewer and self._is_ours():
                kept, listed = self._kept(), self._steps.listed()
                oldest = next((n for n, step in enumerate(listed[:-1]) if step not in kept), None)
                if oldest is not None:
                    say(f"the disk has no room, so the checkpoint of step {listed[oldest]} is removed for the next one")
                    self._steps.retire(len(listed) - oldest - 1, kept)
                    return 1
        return 0
