"""The loop of a run: start or resume, train, evaluate, save, and write a sample at the end.

The host runs ahead of its devices: it dispatches a step while the steps before it still run, and reads their metrics later
(`train.records.progress`). Whatever needs finished steps (an evaluation, a save, a profile) happens inside `progress.interrupted()`,
which first waits for them.

The invariant: the updates and the sequences of data of a `Position` describe its state exactly. A save records all three together, so a
run that resumes computes the same numbers as one that was never stopped.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from ..checkpoint.checkpoint import Checkpoints
from ..checkpoint.manifest import Kept
from ..data.batches import Data
from ..export.exports import Exports
from ..files.lease import Lease
from ..generate.generate import sample_text
from ..generate.text import terminal_text
from ..processes.processes import barrier
from ..processes.watch import Watch
from ..records.console import Screen
from ..records.profiler import Profiler, layers_of_devices
from ..records.progress import Progress, StepResult
from ..records.records import Records
from ..records.summary import describe_end, duration_text, tokens_per_sample
from ..setup import Setup
from ..step.state import State
from ..verify.background import WRONG, LayoutCheck
from .faults import Faults
from .folder import Lock
from .history import replace_config
from .hooks import EVENT, Evaluations, Hooks, held_out_means, made_at
from .identity import Resume
from .saves import Saves
from .start import Feed, Position, Start

_Exchange = Callable[[State, int], tuple[State, int]]
"""From the state after a step and its number to the state after its exchange, and the number of steps since the last exchange."""

TaskMetrics = Callable[[State, int], Mapping[str, float]]
"""From a state and its step to metrics by name, such as those of tasks of evaluation."""

_QUICK_SECONDS = 5.0
"""A compilation that takes longer is announced."""


@dataclass
class Loop:
    """A run in its directory, from its start to its last step. lock: the first process has it. reference: as in `Kept`."""

    setup: Setup
    data: Data
    screen: Screen
    records: Records
    checkpoints: Checkpoints
    exports: Exports
    watch: Watch
    faults: Faults
    profiler: Profiler
    lock: Lock | Lease | None
    tasks: TaskMetrics | None = None
    evaluations: Evaluations | None = None
    hooks: Hooks | None = None
    layout: LayoutCheck | None = None
    reference: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self._config = self.setup.run.config
        self._ended_at: int | None = None
        """The step at which the run has ended early, if it has."""
        self.checkpoints.kept = self._kept
        self._feed = Feed(self.data, self.setup)
        self._check_lock = (lambda: None) if self.lock is None else self.lock.check
        self._eval_step: Any = None
        for note in self.data.notes:
            self.screen.say(note)
        count = self.data.eval_sequences
        if count and self._feed.eval_batch != self._config.train.batch:
            self.screen.say(f"An evaluation reads {count} samples in batches of {self._feed.eval_batch}, so that few are left out")
        elif count and self.setup.objective.is_of_whole_batches:
            self.screen.say("An evaluation reads whole batches only, because the loss compares their rows")

    def run(self, resume: Resume) -> Position:
        """Starts or resumes, trains, and writes a sample. Returns the position that was reached."""
        # XLA compiles the step meanwhile, unless there is no step to take.
        newest = self.checkpoints.newest()
        has_ended = newest >= self.num_steps or (self.evaluations is not None and self.evaluations.begin(newest))
        compiling = None if has_ended else self._compile()
        position = Start(self.setup, self.data.fingerprint, self._phase, self.screen.say).position(self.checkpoints, resume)
        self.data.restore(position.samples, position.data)
        self._count_epochs(position)
        self.exports.num_steps = self.num_steps
        self.exports.begin(position.step, position.kept.id)
        self.profiler.check(position.step, self.num_steps)
        # Steps after the checkpoint are trained again, and would be logged twice.
        self.records.forget_after(position.step)
        if self.evaluations is not None and self.evaluations.begin(position.step, position.kept.evaluations):
            self._end_early(position.step)
        first, begun = position.step, time.perf_counter()
        if first < self.last_step:
            self._replace_config(first)
            position = self._steps(position, compiling or self._compile())
            self.screen.say(f"Checkpoint of step {position.step} in {self._config.run.checkpoints}")
        else:
            self._train_nothing(position)
            epochs = self._config.train.epochs
            longer = f"train.steps={first * 2}" if epochs is None else f"train.epochs={epochs * 2:g}"
            more = f"To train further, raise {longer.partition('=')[0]}, for example {longer}"
            if self._ended_at is None:
                self.screen.say(f"Already at step {first} of {self.num_steps}. {more}")
        self._conclude(position)
        if position.step > first and self.lock is not None:
            tokens, samples = tokens_per_sample(self.setup.batch_shapes), position.samples
            tokens = None if tokens is None else tokens * samples
            for line in describe_end(self._config.run.path, seconds=time.perf_counter() - begun, tokens=tokens, samples=samples):
                self.screen.say(line)
        return position

    def _conclude(self, position: Position) -> None:
        """Says how the run ended, and finishes what belongs to its last step."""
        is_done = position.step >= self.last_step
        if self.evaluations is not None and self.lock is not None:
            self._describe_evaluations(position.step)
        if not is_done:
            why = self.watch.stop_signal or "a signal to another process"
            self.screen.say(f"Stopped at step {position.step} of {self.num_steps} by {why}; the same command resumes from there")
        elif self._config.sample.tokens:
            self._sample(position.state)
        if is_done and self.exports.are_asked_for:
            if self._ended_at is not None:
                # Its last step may have been saved before it was known to be the last.
                self.exports.begin(position.step, position.kept.id)
            self._finish_exports()
        why = "done" if is_done else self.watch.stop_signal or "peer"
        lost = {"lost": lost} if (lost := lost_records(self.screen, self.records)) else {}
        self.records.stop(step=position.step, why=why, **lost)

    @property
    def num_steps(self) -> int:
        """The updates of the whole run, unless it ends early."""
        return self.setup.run.steps

    @property
    def last_step(self) -> int:
        """The step at which the run ends, or has ended early."""
        return self.num_steps if self._ended_at is None else self._ended_at

    def _end_early(self, step: int) -> None:
        if step < self.num_steps:
            self._ended_at = self.exports.num_steps = step

    def _describe_evaluations(self, step: int) -> None:
        assert self.evaluations is not None
        if self._ended_at is not None:
            more = "To train further, raise its patience, or set train.stop_early=null"
            self.screen.say(f"{self.evaluations.describe_end(step, self.num_steps)}. {more}")
        if (line := self.evaluations.describe_best()) is not None:
            self.screen.say(line)

    def _count_epochs(self, position: Position) -> None:
        epochs, samples = self._config.train.epochs, self.data.train_sequences
        self.setup = self.setup.with_epochs(samples, position.step, position.samples)
        if epochs is not None and samples is not None:
            self.screen.say(f"{epochs:g} epochs of {samples:,} samples are {self.num_steps:,} steps")

    def _replace_config(self, step: int) -> None:
        """This start trains: its config is the run's from here on."""
        change = replace_config(self.setup.run, self.data.fingerprint, step) if self.lock is not None else None
        if change is not None:
            self.records.event("config", time.time(), 0.0, **change.to_json())
            self.screen.say(change.text)

    def _compile(self) -> Future[Any]:
        """Compiles the step in a thread. Only XLA works there: the trace is finished when this returns."""
        self._compile_begun = time.perf_counter()
        with self._phase("trace"):
            lowered = None if self.setup.compiled is not None else self.setup.lower_train_step()
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compile")
        try:
            return pool.submit(self.setup.compile_train_step, lowered)
        finally:
            pool.shutdown(wait=False)

    def _compiled(self, compiling: Future[Any]) -> Any:
        if wait([compiling], _QUICK_SECONDS).done:
            return compiling.result()
        self.screen.say("Compiling the step ...")
        compiled = compiling.result()
        self.screen.say(f"Compiled the step in {duration_text(time.perf_counter() - self._compile_begun)}")
        return compiled

    def _steps(self, position: Position, compiling: Future[Any]) -> Position:
        """Trains from a position to the last step, or until a signal stops the run, and saves the state that it reached."""
        batches = self._batches(position.samples)
        # Compiled before the loop, so that the first step's time limit and the first lap do not include it.
        with self._phase("compile"):
            train_step, exchange = self._compiled(compiling), self._exchange(position)
            barrier("compiled step")
        progress, saves = self._begun(position)
        try:
            self._train(train_step, exchange, batches, progress, saves)
        except BaseException as error:
            saves.rescue(progress, self._position, error)
            raise
        self._check_lock()
        saves.finish(self._position)
        return self._position

    def _train_nothing(self, position: Position) -> None:
        """Makes up for the evaluations of the last step, which is saved."""
        progress, saves = self._begun(position)
        self._make_up(progress, saves)
        progress.end()

    def _begun(self, position: Position) -> tuple[Progress, Saves]:
        self._position = position
        progress = Progress(self.setup, self.screen, self.records, position.step, self.data.train_sequences)
        return progress, Saves(self.setup, self.data, self.checkpoints, self.watch, self.records, self._phase, position.step)

    def _kept(self) -> Kept:
        evaluations, kept = self.evaluations, self._position.kept
        kept = kept if evaluations is None else replace(kept, evaluations=evaluations.stored())
        return kept if self.reference is None else replace(kept, reference=self.reference)

    def _batches(self, samples: int) -> Iterator[Any]:
        """The training batches after this many samples. A stream is brought there first, which may take any time."""
        if not self.data.is_stream:
            return self._feed.train(samples)
        with self._phase("open", what="stream"):
            self.watch.begin_unlimited("reading the stream up to its place")
            batches = self._feed.train(samples)
            barrier("stream")
        return batches

    def _train(self, train_step: Any, exchange: _Exchange, batches: Iterator[Any], progress: Progress, saves: Saves) -> None:
        """Trains from the position of this object, which each step replaces, to the last step, or until a signal stops the run."""
        config, position = self._config.train, self._position
        self._call_hooks("start", progress, saves)
        self._make_up(progress, saves)
        # The feed has no end, so the range of steps decides.
        for step, batch in zip(range(position.step + 1, self.num_steps + 1), progress.reading(batches), strict=False):
            if self._ended_at is not None:
                break
            self._check_lock()
            if saves.are_asked_for(position):
                self._save(progress, saves)
            self._end_if_wrong(progress, saves)
            if not self.watch.may_begin(step):
                break
            if self.profiler.begins(step, is_asked_for="profile" in saves.asked_for):
                # Otherwise the trace would contain the end of earlier steps.
                progress.wait()
                self.profiler.start()
            with self.profiler.around(step), progress.dispatching():
                state, metrics = train_step(position.state, self.faults.inject(step, batch), self.setup.settings(step))
            # The metrics are still being computed; progress reads them when the devices have the next steps to do.
            # Evaluations and saves of this step see the state after its exchange.
            state, phase = exchange(state, step)
            samples = position.samples + config.batch
            result = StepResult(step=step, samples=(position.samples, samples - 1), metrics=metrics)
            self._position = position = replace(position, state=state, step=step, samples=samples, phase=phase)
            progress.dispatched(result)
            if self.profiler.ends(step):
                self._profile(step, train_step, progress)
            # Before the evaluation, which may fail.
            self._call_hooks("step", progress, saves)
            if self._due(step, self._config.checkpoint.every) or self.exports.is_due(step):
                self._save(progress, saves)
            self._evaluate_if_due(progress, saves)
            saves.poll(position)
            self.profiler.poll()
            self.exports.poll()
            progress.step_over()
        self._call_hooks("end", progress, saves)
        progress.end()
        if self.profiler.tracing:
            self._profile(position.step, train_step, progress)

    def _end_if_wrong(self, progress: Progress, saves: Saves) -> None:
        """Saves and ends the run, on all processes, if the first one has found that the layout changes the numbers. Raises LayoutError."""
        if self.layout is not None:
            self.layout.poll()
            if WRONG in saves.asked_for:
                self._save(progress, saves)
                saves.finish(self._position)
                raise self.layout.error()

    def _make_up(self, progress: Progress, saves: Saves) -> None:
        """Makes the evaluations of the step from which this start resumes that have no row, because a kill came before them."""
        if step := self._position.step:
            *made, progress.earlier = made_at(self._config.run.path, step)
            self._evaluate_if_due(progress, saves, made)

    def _evaluate_if_due(self, progress: Progress, saves: Saves, made: Sequence[bool] = (False, False)) -> None:
        """Evaluates the position of this object, if its step is one for it. made: whether that was done on held-out data, and on tasks."""
        state, step = self._position.state, self._position.step
        if not made[0] and self._due(step, self._config.train.eval_every) and self.data.eval_parts:
            with progress.interrupted():
                self._evaluate(state, step, progress.metrics)
            self._judge(progress, saves)
        if not made[1] and self.tasks is not None and self._due(step, self._config.eval.every):
            with progress.interrupted(), self._phase("eval", step=step, what="tasks"):
                self.watch.begin_unlimited("evaluating on tasks")
                self._log(step, self.tasks(state, step))
            self._judge(progress, saves)

    def _save(self, progress: Progress, saves: Saves) -> None:
        """Starts to save the position of this object, unless that has been done."""
        if saves.start(progress, self._position):
            self._call_hooks("save", progress, saves)

    def _call_hooks(self, event: str, progress: Progress, saves: Saves) -> None:
        """Calls the hooks that are due at an event, and records the numbers that they log."""
        position = self._position
        if self.hooks is None or not self.hooks.are_due(event, position.step):
            return
        with progress.interrupted():
            found = self.hooks.call(event, position.state, position.step, self.num_steps, progress.metrics)
        if found:
            self.records.metrics(position.step, {EVENT: event, **found, "time": round(time.time(), 3)})
            if self.evaluations is not None:
                self.evaluations.add(position.step, found)
                self._judge(progress, saves)

    def _judge(self, progress: Progress, saves: Saves) -> None:
        """Saves the position if it is the best so far, and ends the run if it should end early."""
        if self.evaluations is None or not self.evaluations.have_news:
            return
        is_best, ends = self.evaluations.verdict(self._position.step)
        if is_best:
            self._save(progress, saves)
        if ends:
            self._end_early(self._position.step)

    def _exchange(self, position: Position) -> _Exchange:
        """A function from the state after a step to the state after its exchange, if one is due, and the number of steps since the last."""
        compiled, last = self.setup.compile_exchanges(), position.step - position.phase

        def exchange(state: State, step: int) -> tuple[State, int]:
            nonlocal last
            if compiled is None:
                return state, 0
            state, are_equal = compiled.after(state, step, is_last=step == self.num_steps)
            last = step if are_equal else last
            return state, step - last

        return exchange

    def _profile(self, step: int, train_step: Any, progress: Progress) -> None:
        known = {signal for parameter in self.setup.storage.model.parameters for signal in parameter.signals}
        with progress.interrupted(), self._phase("profile", step=step):
            self.profiler.finish(step, train_step.as_text(), known, layers_of_devices(self.setup))

    @contextlib.contextmanager
    def _phase(self, name: str, **details: Any) -> Iterator[None]:
        with self.watch.phase(name), self.records.phase(name, **details):
            yield

    def _finish_exports(self) -> None:
        """Returns when the first process has written all exports."""
        self.watch.begin_unlimited("exporting the model")
        if self.lock is not None:
            self.exports.finish()
        barrier("exports")

    def _due(self, step: int, every: int) -> bool:
        return step == self.last_step or (every > 0 and step % every == 0)

    def _sample(self, state: State) -> None:
        with self._phase("sample"):
            text = sample_text(self.setup, state, self.data)
        self.records.sample(text)
        self.screen.say(f"Sample (temperature {self._config.sample.temperature}):\n{terminal_text(text)}")

    def _evaluate(self, state: State, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs the mean loss over the held-out split (of the trainer's own loss in nats per token), and the mean of the loss's metrics."""
        if self._eval_step is None:
            with self._phase("compile", what="evaluation"):
                self._eval_step = self.setup.compile_eval_step(self._feed.eval_batch)
                barrier("compiled evaluation")
        with self._phase("eval", step=step):
            params, variables = self.setup.eval_params(state), self.setup.eval_variables(state)
            batches = self._feed.held_out(self._config.train.eval_batches)
            row = held_out_means(self._eval_step, params, variables, batches, self.setup.mesh)
        if self.hooks is not None and self.hooks.are_due("eval", step):
            row |= self.hooks.call("eval", state, step, self.num_steps, {**metrics, **row})
        if self.evaluations is not None:
            self.evaluations.check(row)
        self._log(step, row)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {**metrics, "time": round(time.time(), 3)}
        self.records.metrics(step, row)
        self.screen.step(step, self.num_steps, row)
        if self.evaluations is not None:
            self.evaluations.add(step, metrics)


def lost_records(screen: Screen, records: Records) -> dict[str, int]:
    """The number of lost records of each sink that lost any."""
    return {**({"stdout": screen.sink.lost} if screen.sink.lost else {}), **records.lost}
