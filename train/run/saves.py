"""The saves of a run while it trains: when one is due, and how the last good state of a run reaches the disk.

A save is due after `checkpoint.every` steps, after `checkpoint.minutes`, on a signal, and at the end. The clocks of processes differ, so
the first process's clock asks all of them, as a signal to it does (`train.processes.watch`). A failed save costs nothing but time: training
continues, and the next one is due sooner. Only the last one must succeed, and it is tried again for as long as the run has trained, since a
full disk may be cleared meanwhile.

A run may also end by an error: an update that is not finite, data or an evaluation that fails. The state then is still good, and is saved
if all processes know of the error at the same step, because a save needs all of them.

The invariant: all processes start the same saves in the same order.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import jax

from ..checkpoint.checkpoint import Checkpoints, SaveError
from ..checkpoint.listing import Kept
from ..checkpoint.restore import first_line
from ..data.batches import Data
from ..data.mapped import DataChangedError
from ..files.ends import InUseError
from ..files.streams import say
from ..processes.processes import true_on_all_processes
from ..processes.watch import Watch
from ..records.progress import Progress, SkippedError
from ..records.records import Records
from ..settings.command_line import may_have_fewer
from ..setup import Setup
from .hooks import Evaluations, HookError
from .start import Position

_LAST_SECONDS = 600.0
"""The longest time for which the last save is tried again."""
_LONGEST_PAUSE = 60.0
_LAST = "The last state is saved next"
_SOONER = 0.1
"""After a failed save, the next one is due after this share of `checkpoint.minutes`."""


@dataclass
class Saves:
    """The saves of one start of a run.

    step: the step from which it trains. phase(name, **details): as in `train.run.start`. evaluations, reference: what a checkpoint has
    beside its arrays; see `Kept`.
    """

    setup: Setup
    data: Data
    checkpoints: Checkpoints
    watch: Watch
    records: Records
    phase: Callable[..., AbstractContextManager[None]]
    step: int
    evaluations: Evaluations | None = None
    reference: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        self._begun, self._saved, self._is_wanted = time.monotonic(), self.step, False
        self._failure: SaveError | None = None
        """Why the last save that was started has failed, if it has."""
        self.asked_for: frozenset[str] = frozenset()
        """The words of all requests before the next step, as in `train.processes.peers.Requests`."""
        self._minutes = self.setup.run.config.checkpoint.minutes
        self._wait(1.0)

    def are_asked_for(self, position: Position) -> bool:
        """Whether minutes or a signal ask for a save of a position. All processes call this before each step."""
        is_due = time.monotonic() >= self._next and not self._is_wanted and not self.checkpoints.is_saving
        if is_due and jax.process_index() == 0:
            self.watch.request("save")
        self.asked_for = self.watch.asked_for(position.step + 1)
        self._is_wanted |= "save" in self.asked_for
        # Without some of its groups, a run can only continue from a state that follows an exchange.
        return self._is_wanted and not (position.phase and may_have_fewer())

    def start(self, progress: Progress, position: Position) -> bool:
        """Starts to save a position, unless that has been done. Returns whether a save of it is under way now that was not before."""
        self._is_wanted = False
        if self._saved < position.step:
            with progress.interrupted(), self.phase("save", step=position.step), self._reported(position):
                self._save(position)
                return True
        return False

    def poll(self, position: Position) -> None:
        """Reports a failed save within a step, not at the next save."""
        with self._reported(position):
            self.checkpoints.poll()

    def finish(self, position: Position) -> None:
        """Saves the last position. Returns when it is on disk, and raises SaveError after the last try."""
        with self.phase("save", step=position.step), self._reported(position, _LAST):
            self.checkpoints.wait()
        until, pause = time.monotonic() + min(time.monotonic() - self._begun, _LAST_SECONDS), 1.0
        # A save may fail in one process alone. All ask each other, so that they repeat it together.
        while not true_on_all_processes(self._saved >= position.step and self._failure is None):
            may_repeat = true_on_all_processes(time.monotonic() < until)
            then = f"It is the last one, and is tried again in {pause:g} s" if may_repeat else "This was the last try"
            with self.phase("save", step=position.step), self._reported(position, then):
                self._save(position)
                self.checkpoints.wait()
            if not may_repeat and not true_on_all_processes(self._failure is None):
                raise self._failure or SaveError("another process failed")
            if self._failure is not None:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def rescue(self, progress: Progress, position: Position, error: BaseException) -> None:
        """Saves the last good position of a run that an error ends. Raises nothing."""
        is_known = jax.process_count() == 1 or isinstance(error, SkippedError | HookError)
        if not is_known or isinstance(error, KeyboardInterrupt | DataChangedError | InUseError):
            return
        # The step that failed has taken the memory of the state before it.
        if any(x.is_deleted() for x in jax.tree.leaves(position.state)):
            return
        try:
            if not isinstance(error, SkippedError):
                with contextlib.suppress(SkippedError):
                    progress.wait()
            good = self._last_good(position)
            # A save of this step may be under way, and may fail.
            if good.step >= self._saved and (good is not position or not isinstance(error, SkippedError)):
                self.finish(good)
        except Exception as failure:
            say(f"the last state could not be saved: {first_line(failure)}")

    def _last_good(self, position: Position) -> Position:
        """The position before an update that ends the run, to which the state has returned; without such an update, the position."""
        step = int(position.state.step)
        if step >= 0:
            return position
        step = ~step
        samples = position.samples - (position.step - step) * self.setup.run.config.train.batch
        return replace(position, state=replace(position.state, step=~position.state.step), step=step, samples=samples)

    def _save(self, position: Position) -> None:
        self._wait(1.0)
        # A state that was trained on samples of a changed file must never become a checkpoint.
        self.data.check()
        state = position.state if position.base is None else replace(position.state, frozen={})
        data, place = self.data.stored(position.samples), (position.step, position.samples, position.phase)
        self.checkpoints.save(self.setup.to_save(state), *place, position.base, data, self._kept(position.kept))
        self._saved, self._failure = position.step, None

    def _kept(self, kept: Kept) -> Kept:
        kept = kept if self.evaluations is None else replace(kept, evaluations=self.evaluations.stored())
        return kept if self.reference is None else replace(kept, reference=self.reference)

    def _wait(self, share: float) -> None:
        self._next = float("inf") if self._minutes is None else time.monotonic() + share * 60 * self._minutes

    @contextlib.contextmanager
    def _reported(self, position: Position, then: str | None = None) -> Iterator[None]:
        """Inside, a failed save is reported. then: what follows; by default training, or after the last step the last save."""
        then = then or ("Training continues" if position.step < self.setup.run.steps else _LAST)
        try:
            yield
        except SaveError as error:
            self._failure = error
            self._wait(_SOONER)
            self.records.event("save_failed", time.time(), 0.0, step=position.step, why=str(error))
            say(f"a checkpoint could not be saved: {error}. {then}; {self.checkpoints.describe()}")
