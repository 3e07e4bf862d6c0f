"""The run itself: start or resume, steps, evaluations, checkpoints, a sample at the end."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax

from jgt.document import collect
from train.agree import agree, barrier
from train.checkpoint import Checkpoints, Identity, SaveError
from train.clock import InFlight, steps_ahead
from train.config import Run
from train.console import Screen
from train.data.batches import Data, open_data
from train.exits import Exit
from train.faults import Faults
from train.feed import Feed
from train.folder import Resume, check_data, fingerprints, held, make_way, write_folder
from train.guard import Done
from train.processes import shared_store
from train.profile.profiler import Profiler
from train.profile.steps import Steps
from train.progress import Progress
from train.records import Records
from train.sample import sample_text
from train.sections import Fault
from train.setup import Setup, prepare
from train.start import Position, Start
from train.step import State
from train.steps import FOLDER
from train.watch import Watch

_LAST_SAVE_SECONDS = 10


def train(
    run: Run, resume: Resume | None = None, *, profiled: Steps | None = None, begun: float | None = None, stopped_code: int = Exit.DONE
) -> int:
    """Trains until `train.steps`, from the newest checkpoint if there is one, or until a signal asks to stop.

    profiled: the steps of a profile; begun: when this process did, seconds since 1970. Returns the exit code, `stopped_code` where a signal came first. Raises InputError
    for wrong input, SkippedError and SaveError where a run has to end.
    """
    resume, entered = resume or Resume(), time.time()
    folder, process, count = run.config.run.path, jax.process_index(), jax.process_count()
    screen, done = Screen(enabled=process == 0), False
    with Watch(run.config.watchdog, folder, shared_store(), stopped_code) as watch, contextlib.ExitStack() as closing:
        setup, data = open_run(run, resume)
        if process == 0:
            closing.enter_context(held(folder))
            if resume.never and (moved := make_way(folder)):
                screen.say(f"The earlier run is now in {moved}")
            write_folder(run, data.fingerprint)
        barrier("run directory")
        records = closing.enter_context(contextlib.closing(Records(folder, process=process)))
        watch.note = lambda why: records.event("stop", time.time(), 0.0, why=why)
        begun = begun or entered
        who = {"processes": count, "process": process, "devices": jax.device_count(), "host": socket.gethostname(), "pid": os.getpid()}
        records.event("start", begun, entered - begun, **who, jax=jax.__version__)
        records.event("open", entered, time.time() - entered)
        screen.setup(setup)
        screen.say("Data: " + ", ".join(f"{key} {value}" for key, value in data.fingerprint.items()))

        def note_fault(fault: Fault) -> None:
            records.event("fault", time.time(), 0.0, step=fault.at_step, kind=fault.kind)

        faults = Faults(run.config.debug.faults, folder, process, note_fault)
        identity = Identity(mesh=dict(setup.mesh.shape), fingerprints=fingerprints(run, data.fingerprint))
        checkpoints = Checkpoints(folder / FOLDER, run.config.checkpoint, identity, free=faults.free)
        closing.callback(screen.stop_steps)
        profiler = closing.enter_context(contextlib.closing(Profiler(profiled, folder, process, screen)))
        try:
            done = Loop(setup, data, screen, records, checkpoints, watch, faults, profiler).run(resume)
        except Exception as error:
            # The other processes may be gone, and a save that needs them with them.
            checkpoints.close(seconds=None if count == 1 else _LAST_SAVE_SECONDS)
            records.event("stop", time.time(), 0.0, why=f"failed: {type(error).__name__}")
            print(f"jgt: the run failed; {checkpoints.describe()}", file=sys.stderr)
            raise
        checkpoints.close()
    return Exit.DONE if done else stopped_code


def open_run(run: Run, resume: Resume | None = None) -> tuple[Setup, Data]:
    """The program and the data. Raises InputError with what is wrong with either."""
    config = run.config
    problems: list[str] = []
    setup = data = None
    with collect(problems):
        setup = prepare(run)
    in_data: list[str] = []
    with collect(in_data):
        cache = config.run.path / "data"
        data = open_data(config.data, seq=config.model.seq, vocab=config.model.vocab, seed=config.run.seed, cache_dir=cache)
    problems += [f"{run.where('data')}: {problem}" for problem in in_data]
    if data is not None and jax.process_index() == 0:
        with collect(problems):
            check_data(run, data.fingerprint, resume or Resume())
    agree(problems, (run.resolved(), None if data is None else data.fingerprint))
    assert setup is not None and data is not None
    return setup, data


class Loop:
    """One run over an open directory; owns the state while it is trained."""

    def __init__(
        self, setup: Setup, data: Data, screen: Screen, records: Records, checkpoints: Checkpoints, watch: Watch, faults: Faults, profiler: Profiler
    ):
        self._setup, self._data = setup, data
        self._screen, self._records, self._checkpoints = screen, records, checkpoints
        self._watch, self._faults, self._profiler = watch, faults, profiler
        self._config = setup.run.config
        self._feed = Feed(data, setup.batch_shardings, self._config.train.batch, self._config.model.seq)
        self._eval_step: Any = None

    def run(self, resume: Resume) -> bool:
        """Start or resume, train, and show a sample; whether all steps are done."""
        position = Start(self._setup, self._data.fingerprint, self._phase, self._screen.say).position(self._checkpoints, resume)
        self._profiler.check(position.step)
        self._records.forget_after(position.step)
        last = self._config.train.steps
        if position.step >= last:
            self._screen.say(f"Already at step {position.step} of {last}; to go on, raise it: train.steps={position.step * 2}")
        else:
            position = self._steps(position)
            self._screen.say(f"Checkpoint of step {position.step} in {self._checkpoints.folder}")
        if position.step < last:
            why = self._watch.asked or "a signal to another process"
            self._screen.say(f"Stopped at step {position.step} of {last} by {why}; the same command goes on from it")
        elif self._config.sample.tokens:
            self._sample(position.state)
        self._records.event("stop", time.time(), 0.0, step=position.step, why="done" if position.step >= last else self._watch.asked or "peer")
        return position.step >= last

    def _steps(self, position: Position) -> Position:
        """Trains from a position to the end or to where a signal stops it, and saves that."""
        config, state, samples = self._config.train, position.state, position.samples
        with self._phase("compile"):
            train_step = self._setup.compile_train_step()
        self._screen.start_steps(position.step, config.steps)
        progress = Progress(self._setup, self._screen, self._records, position.step)
        done = saved = position.step
        for step, batch in zip(range(done + 1, config.steps + 1), self._feed.train(samples), strict=False):
            if not self._watch.may_begin(step):
                break
            if self._profiler.begins(step):
                progress.wait()
                self._profiler.start()
            with self._profiler.around(step):
                state, metrics = train_step(state, self._faults.before(step, batch))
            progress.begun(Done(step=step, samples=(samples, samples + config.batch - 1), metrics=metrics))
            done, samples = step, samples + config.batch
            if self._profiler.ends(step):
                self._profile(step, train_step, progress)
            if self._due(step, config.eval_every) and self._data.has_eval:
                with progress.interrupted():
                    self._evaluate(state, step)
            if self._due(step, self._config.checkpoint.every):
                with progress.interrupted(), self._phase("save", step=step), self._saving(step):
                    self._checkpoints.save(state, step, samples)
                    saved = step
            with self._saving(step):
                self._checkpoints.poll()
            progress.over()
        progress.end()
        if self._profiler.tracing:
            self._profile(done, train_step, progress)
        self._screen.stop_steps()
        with self._phase("save", step=done):
            if saved < done:
                self._checkpoints.save(state, done, samples)
            self._checkpoints.wait()
        return Position(state=state, step=done, samples=samples)

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
        """A save may fail: it is told, and training goes on; the last one may not."""
        try:
            yield
        except SaveError as error:
            if step == self._config.train.steps:
                raise
            self._records.event("save_failed", time.time(), 0.0, step=step, why=str(error))
            print(f"jgt: a checkpoint could not be saved: {error}. Training goes on; {self._checkpoints.describe()}", file=sys.stderr)

    def _due(self, step: int, every: int) -> bool:
        return step == self._config.train.steps or (every > 0 and step % every == 0)

    def _sample(self, state: State) -> None:
        with self._phase("sample"):
            text = sample_text(self._setup, state, self._data)
        shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
        self._records.text("sample.txt", text)
        self._screen.say(f"Sample (temperature {self._config.sample.temperature}):\n{shown}")

    def _evaluate(self, state: State, step: int) -> None:
        """Token-weighted mean over the held-out split, nats per token."""
        if self._eval_step is None:
            with self._phase("compile", what="evaluation"):
                self._eval_step = self._setup.compile_eval_step()
        with self._phase("eval", step=step):
            sums, in_flight = [], InFlight(steps_ahead(self._setup.mesh))
            for batch in self._feed.evaluation(self._config.train.eval_batches):
                sums.append(self._eval_step(state.params, batch))
                in_flight.add(sums[-1])
            nats, weights = (float(sum(jax.device_get(part))) for part in zip(*sums, strict=True))
        row = {"eval_loss": nats / weights}
        self._records.metrics(step, row)
        self._screen.step(step, self._config.train.steps, row)
