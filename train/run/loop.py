"""The loop of a run: train, evaluate, save.

The host runs ahead of its devices: it dispatches a step while the steps before it still run, and reads their metrics later
(`train.records.progress`). Whatever needs finished steps (an evaluation, a save, a profile) happens inside `progress.interrupted()`,
which first waits for them.

The invariant: the updates and the sequences of data of a `Position` describe its state exactly. A save records all three together, so a
run that resumes computes the same numbers as one that was never stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import jax

from ..records.profiler import layers_of_devices
from ..records.progress import Progress, StepResult
from ..setup import Setup
from ..setup.feed import DeviceBatch, Feed
from ..step.state import State
from ..step.sync.phases import Exchanges
from ..verify.background import WRONG, LayoutCheck
from .hooks import made_at
from .hooks.evaluator import Evaluator
from .saves import Saves
from .session import Session
from .start import Position

_Exchange = Callable[[State, int], tuple[State, int]]
"""From the state after a step and its number to the state after its exchange, and the number of steps since the last exchange."""


@dataclass(kw_only=True)
class Loop:
    """The steps of one start of a run.

    position: where it is; each step replaces it. progress follows the steps, evaluator computes what belongs to some of them, and saves
    writes some to disk. ended_at: the step at which the run has ended early, if it has.
    """

    setup: Setup
    session: Session
    feed: Feed
    saves: Saves
    evaluator: Evaluator
    layout: LayoutCheck
    progress: Progress
    position: Position
    ended_at: int | None = None

    def __post_init__(self) -> None:
        self._config = self.setup.run.config

    @property
    def num_steps(self) -> int:
        """The updates of the whole run, unless it ends early."""
        return self.setup.run.steps

    @property
    def last_step(self) -> int:
        """The step at which the run ends, or has ended early."""
        return self.num_steps if self.ended_at is None else self.ended_at

    def train(self, train_step: jax.stages.Compiled, exchanges: Exchanges | None, batches: Iterator[DeviceBatch]) -> None:
        """Trains to the last step, or until a signal stops the run, saves the state that it reached, and says so."""
        exchange = self._exchange(exchanges)
        try:
            self._steps(train_step, exchange, batches)
        except BaseException as error:
            self.saves.rescue(self.progress, self.position, error)
            raise
        self.session.check_lock()
        self.saves.finish(self.position)
        self.session.screen.say(f"Checkpoint of step {self.position.step} in {self._config.run.checkpoints}")

    def train_nothing(self) -> None:
        """Makes up for the evaluations of the last step, which is saved, and says how to train further."""
        self._make_up()
        self.progress.end()
        if self.ended_at is None:
            step, epochs = self.position.step, self._config.train.epochs
            longer = f"train.steps={step * 2}" if epochs is None else f"train.epochs={epochs * 2:g}"
            more = f"To train further, raise {longer.partition('=')[0]}, for example {longer}"
            self.session.screen.say(f"Already at step {step} of {self.num_steps}. {more}")

    def _steps(self, train_step: jax.stages.Compiled, exchange: _Exchange, batches: Iterator[DeviceBatch]) -> None:
        config, position, progress, saves = self._config.train, self.position, self.progress, self.saves
        session, profiler, exports = self.session, self.session.profiler, self.session.exports
        self._call_hooks("start")
        self._make_up()
        # The feed has no end, so the range of steps decides.
        for step, batch in zip(range(position.step + 1, self.num_steps + 1), progress.reading(batches), strict=False):
            if self.ended_at is not None:
                break
            session.check_lock()
            if saves.are_asked_for(position):
                self._save()
            self._end_if_wrong()
            if not session.watch.may_begin(step):
                break
            if profiler.begins(step, is_asked_for="profile" in saves.asked_for):
                # Otherwise the trace would contain the end of earlier steps.
                progress.wait()
                profiler.start()
            with profiler.around(step), progress.dispatching():
                state, metrics = train_step(position.state, session.faults.inject(step, batch), self.setup.settings(step))
            # The metrics are still being computed; progress reads them when the devices have the next steps to do.
            # Evaluations and saves of this step see the state after its exchange.
            state, phase = exchange(state, step)
            samples = position.samples + config.batch
            result = StepResult(step=step, samples=(position.samples, samples - 1), metrics=metrics)
            self.position = position = replace(position, state=state, step=step, samples=samples, phase=phase)
            progress.dispatched(result)
            if profiler.ends(step):
                self._profile(train_step)
            # Before the evaluation, which may fail.
            self._call_hooks("step")
            if self._is_due(self._config.checkpoint.every) or exports.is_due(step):
                self._save()
            self._evaluate_if_due()
            saves.poll(position)
            profiler.poll()
            exports.poll()
            progress.step_over()
        self._call_hooks("end")
        progress.end()
        if profiler.tracing:
            self._profile(train_step)

    def _exchange(self, compiled: Exchanges | None) -> _Exchange:
        """A function from the state after a step to the state after its exchange, if one is due, and the number of steps since the last."""
        last = self.position.step - self.position.phase

        def exchange(state: State, step: int) -> tuple[State, int]:
            nonlocal last
            if compiled is None:
                return state, 0
            state, are_equal = compiled.after(state, step, is_last=step == self.num_steps)
            last = step if are_equal else last
            return state, step - last

        return exchange

    def _is_due(self, every: int) -> bool:
        step = self.position.step
        return step == self.last_step or (every > 0 and step % every == 0)

    def _save(self) -> None:
        """Starts to save the position, unless that has been done."""
        if self.saves.start(self.progress, self.position):
            self._call_hooks("save")

    def _end_if_wrong(self) -> None:
        """Saves and ends the run, on all processes, if the first one has found that the layout changes the numbers. Raises LayoutError."""
        self.layout.poll()
        if WRONG in self.saves.asked_for:
            self._save()
            self.saves.finish(self.position)
            raise self.layout.error()

    def _make_up(self) -> None:
        """Makes the evaluations of the step from which this start resumes that have no row, because a kill came before them."""
        if step := self.position.step:
            *made, self.progress.earlier = made_at(self._config.run.path, step)
            self._evaluate_if_due(made)

    def _evaluate_if_due(self, made: Sequence[bool] = (False, False)) -> None:
        """Evaluates the position, if its step is one for it. made: whether that was done on held-out data, and on tasks."""
        state, step, evaluator = self.position.state, self.position.step, self.evaluator
        if not made[0] and self._is_due(self._config.train.eval_every) and self.feed.data.eval_parts:
            with self.progress.interrupted():
                evaluator.evaluate(state, step, self.progress.metrics)
            self._judge()
        if not made[1] and evaluator.tasks is not None and self._is_due(self._config.eval.every):
            with self.progress.interrupted(), self.session.phase("eval", step=step, what="tasks"):
                self.session.watch.begin_unlimited("evaluating on tasks")
                evaluator.log(step, evaluator.tasks(state, step))
            self._judge()

    def _call_hooks(self, event: str) -> None:
        self.evaluator.call_hooks(event, self.position.state, self.position.step, self.progress)
        self._judge()

    def _judge(self) -> None:
        """Saves the position if it is the best so far, and ends the run if it should end early."""
        is_best, ends = self.evaluator.verdict(self.position.step)
        if is_best:
            self._save()
        if ends:
            self._end_early()

    def _end_early(self) -> None:
        if self.position.step < self.num_steps:
            self.ended_at = self.session.exports.num_steps = self.position.step

    def _profile(self, train_step: jax.stages.Compiled) -> None:
        known = {signal for parameter in self.setup.storage.model.parameters for signal in parameter.signals}
        step = self.position.step
        with self.progress.interrupted(), self.session.phase("profile", step=step):
            self.session.profiler.finish(step, train_step.as_text() or "", known, layers_of_devices(self.setup))
