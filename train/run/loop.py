"""The run itself: open the directory, start or resume, train, evaluate, save, and write a sample at the end.

Two things hold the order of this file together. First, any process may fail at any line, and all others then wait in their next
collective. So whatever only one process can see (wrong input, a directory in use) is found before training and exchanged by
`agree_on_input` or a barrier, and the watch, which ends a process whose peers are gone, is entered first and left last.

Second, the host runs ahead of its devices: it dispatches a step while the steps before it still run, and reads their metrics later
(`train.records.progress`). Whatever needs finished steps (an evaluation, a save, a profile) happens inside `progress.interrupted()`,
which first waits for them.

The invariant of the loop: `done` updates and `samples` sequences of data describe `state` exactly. A save records all three together, so
a run that resumes computes the same numbers as one that was never stopped.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax

from jgt.document import collect

from ..checkpoint.checkpoint import Checkpoints, Identity, SaveError
from ..checkpoint.disk import DiskError
from ..checkpoint.steps import FOLDER
from ..command_line import Exit
from ..config import Run
from ..data.batches import Data, open_data, open_own_data
from ..data.config import OwnData
from ..data.mapped import DataChangedError
from ..data.own import open_own
from ..processes.processes import agree_on_input, barrier, number_of_processes, shared_store, this_process, true_on_all_processes
from ..processes.watch import Watch
from ..profile.profiler import Profiler
from ..profile.steps import StepRange
from ..records.clock import InFlight, steps_ahead
from ..records.console import Screen
from ..records.loggers import open_loggers
from ..records.progress import Progress, StepResult
from ..records.records import Records
from ..records.summary import describe_data, describe_end, describe_size, describe_start, tokens_per_sample
from ..sections import Fault
from ..setup import Setup, prepare
from ..sink import describe_lost, say
from ..step.step import State
from ..xla import open_devices
from .faults import Faults
from .folder import InUseError, Lock, Resume, check_data, fingerprints, lock_folder, move_earlier_run
from .history import begin_folder, replace_config
from .sample import sample_text, terminal_text
from .start import Feed, Position, Start

_LAST_SAVE_SECONDS = 10
"""How long a failing process waits for a save that needs the other processes, which may be gone."""


def train(
    run: Run,
    resume: Resume | None = None,
    *,
    profiled: StepRange | None = None,
    begun: float | None = None,
    stopped_code: int = Exit.DONE,
    on_end: Callable[[Setup, Position], None] | None = None,
    owns_process: bool = True,
) -> int:
    """Trains until `train.steps`, from the newest checkpoint if there is one, or until a signal asks the run to stop.

    profiled: the steps to profile. begun: when this process started, in seconds since 1970. stopped_code: the exit code if a signal comes
    first. on_end: gets the program and the last position. owns_process: whether a second Ctrl-C ends the process, instead of raising
    KeyboardInterrupt. Returns the exit code. Raises InputError for wrong input, and SkippedError,
    SaveError or DataChangedError if the run cannot continue.
    """
    resume, entered = resume or Resume(), time.time()
    folder, process, count = run.config.run.path, this_process(), number_of_processes()
    screen, done = Screen(enabled=process == 0), False
    # Only the first process has one: it alone names and removes files that belong to all.
    lock: Lock | None = None
    with (
        Watch(run.config.watchdog, folder, shared_store(), stopped_code, owns_process=owns_process) as watch,
        contextlib.ExitStack() as closing,
    ):
        # With several processes this waits until each of them has told the others which devices it has.
        open_devices()
        watch.begin_unlimited("opening model and data")
        setup, data = open_run(run, resume)
        if process == 0:
            # An error here leaves the other processes in the barrier below. This one's watch reports it, and theirs end them.
            lock = closing.enter_context(lock_folder(folder))
            if resume.never and (moved := move_earlier_run(folder)):
                screen.say(f"The earlier run was moved to {moved}")
            begin_folder(run, data.fingerprint)
        # The others write into the directory only now, after an earlier run was moved out of it.
        barrier("run directory")
        loggers = [] if process else open_loggers(run.config.log, folder, run.config.run.name, run.resolved)
        records = Records(folder, process=process, loggers=loggers)
        closing.callback(records.close)
        watch.on_end = lambda why: records.event("stop", time.time(), 0.0, why=why)
        begun = begun or entered
        who = {"processes": count, "process": process, "devices": jax.device_count(), "host": socket.gethostname(), "pid": os.getpid()}
        records.event("start", begun, entered - begun, **who, jax=jax.__version__)
        records.event("open", entered, time.time() - entered)
        _introduce(screen, setup, data)
        faults = Faults(run.config.debug.faults, folder, process, partial(_note_fault, records))
        identity = Identity(mesh=dict(setup.mesh.shape), fingerprints=fingerprints(run, data.fingerprint))
        is_ours = (lambda: True) if lock is None else lock.is_held
        checkpoints = Checkpoints(folder / FOLDER, run.config.checkpoint, identity, free=faults.free, is_ours=is_ours)
        profiler = closing.enter_context(contextlib.closing(Profiler(profiled, folder, process, screen)))
        try:
            position = Loop(setup, data, screen, records, checkpoints, watch, faults, profiler, lock).run(resume)
            done = position.step >= run.config.train.steps
        except Exception as error:
            # A save under way is worth waiting for. With several processes not for ever, because it needs all of them.
            checkpoints.close(seconds=None if count == 1 else _LAST_SAVE_SECONDS)
            # The directory may belong to another run by now.
            if not isinstance(error, InUseError):
                records.event("stop", time.time(), 0.0, why=f"failed: {type(error).__name__}")
            _explain(error, checkpoints)
            raise
        except KeyboardInterrupt:
            # The next run of this process may have the same directory.
            checkpoints.close(seconds=_LAST_SAVE_SECONDS)
            raise
        checkpoints.close()
    if on_end is not None:
        on_end(setup, position)
    code = Exit.DONE if done else stopped_code
    if not (lost := _lost(screen, records)):
        return code
    say(describe_lost(lost))
    # A code that was asked for has its own reader.
    return Exit.LOST if code == Exit.DONE else code


def _explain(error: Exception, checkpoints: Checkpoints) -> None:
    """Says what of a run that failed is saved. Raises DataChangedError in place of one that does not say it."""
    if isinstance(error, DataChangedError):
        unsaved = "Steps after the newest checkpoint may have read wrong tokens, and are not saved. Put the file back"
        raise DataChangedError(f"{error}. {unsaved}; {checkpoints.describe()}") from None
    # Where the disk cannot be read, there is nothing to describe.
    if not isinstance(error, InUseError | DiskError):
        say(f"the run failed; {checkpoints.describe()}")


def _introduce(screen: Screen, setup: Setup, data: Data) -> None:
    screen.say(describe_start(setup.run.config.run.path))
    screen.setup(setup)
    screen.say(describe_data(data.fingerprint))
    screen.say(describe_size(setup))


def _note_fault(records: Records, fault: Fault) -> None:
    records.event("fault", time.time(), 0.0, step=fault.at_step, kind=fault.kind)


def open_run(run: Run, resume: Resume | None = None) -> tuple[Setup, Data]:
    """The program and the data of a run. Raises InputError, on all processes, with everything that is wrong with either."""
    config = run.config
    problems: list[str] = []
    setup = data = None
    if isinstance(config.data, OwnData):
        # First, because its samples say which arrays the program gets.
        with collect(problems):
            source = open_own(config.data, run.code, run.where, seq=config.model.seq, vocab=config.model.vocab)
            data = open_own_data(source, config.data, seed=config.run.seed)
    # The data is opened even if the program is wrong, so that all problems are reported at once.
    if data is not None or not problems:
        with collect(problems):
            setup = prepare(run, element=None if data is None else data.element)
    if not isinstance(config.data, OwnData):
        in_data: list[str] = []
        with collect(in_data):
            cache = config.run.path / "data"
            data = open_data(config.data, seq=config.model.seq, vocab=config.model.vocab, seed=config.run.seed, cache_dir=cache)
        problems += [f"{run.where('data')}: {problem}" for problem in in_data]
    # One process suffices for this check: if it fails, the others stop in agree_on_input too.
    if data is not None and jax.process_index() == 0:
        with collect(problems):
            check_data(run, data.fingerprint, resume or Resume())
    agree_on_input(problems, (run.resolved(), None if data is None else data.fingerprint))
    assert setup is not None and data is not None
    return setup, data


class Loop:
    """A run in its directory, from its start to its last step."""

    def __init__(
        self,
        setup: Setup,
        data: Data,
        screen: Screen,
        records: Records,
        checkpoints: Checkpoints,
        watch: Watch,
        faults: Faults,
        profiler: Profiler,
        lock: Lock | None,
    ):
        self._setup, self._data = setup, data
        self._screen, self._records, self._checkpoints = screen, records, checkpoints
        self._watch, self._faults, self._profiler = watch, faults, profiler
        self._is_first, self._check_lock = lock is not None, _nothing if lock is None else lock.check
        self._config = setup.run.config
        self._feed = Feed(data, setup)
        self._eval_step: Any = None
        self._saved, self._has_failed = 0, False
        """The step of the last save that was started, and whether it has failed."""

    def run(self, resume: Resume) -> Position:
        """Starts or resumes, trains, and writes a sample. Returns the position that was reached."""
        position = Start(self._setup, self._data.fingerprint, self._phase, self._screen.say).position(self._checkpoints, resume)
        self._profiler.check(position.step)
        # Steps after the checkpoint are trained again, and would be logged twice.
        self._records.forget_after(position.step)
        first, last, begun = position.step, self._config.train.steps, time.perf_counter()
        if position.step >= last:
            more = f"To train further, raise train.steps, for example train.steps={position.step * 2}"
            self._screen.say(f"Already at step {position.step} of {last}. {more}")
        else:
            self._replace_config(position.step)
            position = self._steps(position)
            self._screen.say(f"Checkpoint of step {position.step} in {self._config.run.path / FOLDER}")
        if position.step < last:
            why = self._watch.stop_signal or "a signal to another process"
            self._screen.say(f"Stopped at step {position.step} of {last} by {why}; the same command resumes from there")
        elif self._config.sample.tokens:
            self._sample(position.state)
        why = "done" if position.step >= last else self._watch.stop_signal or "peer"
        lost = {"lost": lost} if (lost := _lost(self._screen, self._records)) else {}
        self._records.event("stop", time.time(), 0.0, step=position.step, why=why, **lost)
        if position.step > first:
            self._summarize(position, time.perf_counter() - begun)
        return position

    def _summarize(self, position: Position, seconds: float) -> None:
        if self._is_first:
            tokens = tokens_per_sample(self._setup)
            tokens = None if tokens is None else tokens * position.samples
            for line in describe_end(self._config.run.path, seconds=seconds, tokens=tokens, samples=position.samples):
                self._screen.say(line)

    def _replace_config(self, step: int) -> None:
        """This start trains: its config is the run's from here on."""
        change = replace_config(self._setup.run, self._data.fingerprint, step) if self._is_first else None
        if change is not None:
            self._records.event("config", time.time(), 0.0, **change.to_json())
            self._screen.say(change.text)

    def _steps(self, position: Position) -> Position:
        """Trains from a position to the last step, or until a signal stops the run, and saves the state that it reached."""
        config, state, samples = self._config.train, position.state, position.samples
        # Compiled before the loop, so that the first step's time limit and the first lap do not include it.
        with self._phase("compile"):
            train_step = self._setup.compile_train_step()
        progress = Progress(self._setup, self._screen, self._records, position.step, self._data.train_sequences)
        done = self._saved = position.step
        # The feed has no end, so the range of steps decides.
        for step, batch in zip(range(done + 1, config.steps + 1), self._feed.train(samples), strict=False):
            self._check_lock()
            if self._watch.must_save(step):
                self._save(progress, Position(state=state, step=done, samples=samples))
            if not self._watch.may_begin(step):
                break
            if self._profiler.begins(step):
                # Otherwise the trace would contain the end of earlier steps.
                progress.wait()
                self._profiler.start()
            with self._profiler.around(step):
                state, metrics = train_step(state, self._faults.inject(step, batch), self._setup.settings(step))
            # The metrics are still being computed; progress reads them when the devices have the next steps to do.
            progress.dispatched(StepResult(step=step, samples=(samples, samples + config.batch - 1), metrics=metrics))
            done, samples = step, samples + config.batch
            if self._profiler.ends(step):
                self._profile(step, train_step, progress)
            if self._due(step, config.eval_every) and self._data.has_eval:
                with progress.interrupted():
                    self._evaluate(state, step)
            if self._due(step, self._config.checkpoint.every):
                self._save(progress, Position(state=state, step=done, samples=samples))
            # A failed save is reported within a step, not at the next save.
            with self._saving(step):
                self._checkpoints.poll()
            progress.step_over()
        progress.end()
        if self._profiler.tracing:
            self._profile(done, train_step, progress)
        self._check_lock()
        with self._phase("save", step=done):
            with self._saving(done):
                self._checkpoints.wait()
            # A signal stopped the run between two saves, or the last save has failed, perhaps on one process only.
            if self._saved < done or not true_on_all_processes(not self._has_failed):
                self._check_and_save(Position(state=state, step=done, samples=samples))
            self._checkpoints.wait()
        return Position(state=state, step=done, samples=samples)

    def _save(self, progress: Progress, position: Position) -> None:
        """Starts to save a position that training has reached, unless that has been done."""
        step = position.step
        if self._saved < step:
            with progress.interrupted(), self._phase("save", step=step), self._saving(step):
                self._check_and_save(position)

    def _check_and_save(self, position: Position) -> None:
        # A state that was trained on samples of a changed file must never become a checkpoint.
        self._data.check()
        self._checkpoints.save(position.state, position.step, position.samples)
        self._saved, self._has_failed = position.step, False

    def _profile(self, step: int, train_step: Any, progress: Progress) -> None:
        known = {signal for parameter in self._setup.placement.parameters for signal in parameter.signals}
        with progress.interrupted(), self._phase("profile", step=step):
            self._profiler.finish(step, train_step.as_text(), known)

    @contextlib.contextmanager
    def _phase(self, name: str, **details: Any) -> Iterator[None]:
        with self._watch.phase(name), self._records.phase(name, **details):
            yield

    @contextlib.contextmanager
    def _saving(self, step: int) -> Iterator[None]:
        """Inside, a failed save is reported and training continues. Only at the last step SaveError ends the run."""
        try:
            yield
        except SaveError as error:
            self._has_failed = True
            if step == self._config.train.steps:
                raise
            self._records.event("save_failed", time.time(), 0.0, step=step, why=str(error))
            say(f"a checkpoint could not be saved: {error}. Training continues; {self._checkpoints.describe()}")

    def _due(self, step: int, every: int) -> bool:
        return step == self._config.train.steps or (every > 0 and step % every == 0)

    def _sample(self, state: State) -> None:
        with self._phase("sample"):
            text = sample_text(self._setup, state, self._data)
        self._records.text("sample.txt", text)
        self._screen.say(f"Sample (temperature {self._config.sample.temperature}):\n{terminal_text(text)}")

    def _evaluate(self, state: State, step: int) -> None:
        """Logs the mean loss over the held-out split (of the trainer's own loss in nats per token), and the mean of the loss's metrics."""
        if self._eval_step is None:
            with self._phase("compile", what="evaluation"):
                self._eval_step = self._setup.compile_eval_step(self._feed.eval_batch)
        with self._phase("eval", step=step):
            # Sums stay on the devices until the end; fetching each would make the devices wait for the host.
            sums, in_flight = [], InFlight(steps_ahead(self._setup.mesh))
            for batch in self._feed.evaluation(self._config.train.eval_batches):
                sums.append(self._eval_step(state.params, state.variables, batch))
                in_flight.add(sums[-1])
            totals: dict[str, tuple[float, float]] = jax.tree.map(lambda *parts: float(sum(parts)), *jax.device_get(sums))
        row = {f"eval_{name}": total / weight for name, (total, weight) in totals.items()} | {"time": round(time.time(), 3)}
        self._records.metrics(step, row)
        self._screen.step(step, self._config.train.steps, row)


def _nothing() -> None: ...


def _lost(screen: Screen, records: Records) -> dict[str, int]:
    """The number of lost records of each sink that lost any."""
    return {**({"stdout": screen.sink.lost} if screen.sink.lost else {}), **records.lost}
