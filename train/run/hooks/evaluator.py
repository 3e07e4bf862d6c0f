"""Evaluations of a state on held-out data and on tasks, and calls of hooks, whose numbers a run records."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import jax

from ...processes.processes import barrier
from ...records.console import Screen
from ...records.progress import Progress
from ...records.records import Records
from ...setup import Setup
from ...setup.feed import Feed
from ...step.state import State
from .evaluations import EVENT, Evaluations, held_out_means
from .hooks import Hooks

TaskMetrics = Callable[[State, int], Mapping[str, float]]
"""From a state and its step to metrics by name, such as those of tasks of evaluation."""


@dataclass
class Evaluator:
    """Evaluates states, calls hooks, and records what both find.

    phase(name, **details): a context manager that records how long a phase of the run takes. evaluations: decide by what is found; None if
    nothing follows from it.
    """

    setup: Setup
    feed: Feed
    screen: Screen
    records: Records
    phase: Callable[..., AbstractContextManager[None]]
    tasks: TaskMetrics | None = None
    evaluations: Evaluations | None = None
    hooks: Hooks | None = None

    def __post_init__(self) -> None:
        self._step: jax.stages.Compiled | None = None

    def evaluate(self, state: State, step: int, metrics: Mapping[str, object]) -> None:
        """Logs the mean loss over the held-out split (of the trainer's own loss in nats per token), and the mean of the loss's metrics."""
        if self._step is None:
            with self.phase("compile", what="evaluation"):
                self._step = self.setup.compile_eval_step(self.feed.eval_batch)
                barrier("compiled evaluation")
        with self.phase("eval", step=step):
            params, variables = self.setup.eval_params(state), self.setup.eval_variables(state)
            batches = self.feed.held_out(self.setup.run.config.train.eval_batches)
            row = held_out_means(self._step, params, variables, batches, self.setup.mesh)
        if self.hooks is not None and self.hooks.are_due("eval", step):
            row |= self.hooks.call("eval", state, step, self.setup.run.steps, {**metrics, **row})
        if self.evaluations is not None:
            self.evaluations.check(row)
        self.log(step, row)

    def call_hooks(self, event: str, state: State, step: int, progress: Progress) -> None:
        """Calls the hooks that are due at an event, and records the numbers that they log."""
        if self.hooks is None or not self.hooks.are_due(event, step):
            return
        with progress.interrupted():
            found = self.hooks.call(event, state, step, self.setup.run.steps, progress.metrics)
        if found:
            self.records.metrics(step, {EVENT: event, **found, "time": round(time.time(), 3)})
            if self.evaluations is not None:
                self.evaluations.add(step, found)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of an evaluation."""
        row = {**metrics, "time": round(time.time(), 3)}
        self.records.metrics(step, row)
        self.screen.step(step, self.setup.run.steps, row)
        if self.evaluations is not None:
            self.evaluations.add(step, metrics)

    def verdict(self, step: int) -> tuple[bool, bool]:
        """Whether what was added since the last verdict makes this step the best so far, and whether the run ends here."""
        if self.evaluations is None or not self.evaluations.have_news:
            return False, False
        return self.evaluations.verdict(step)
