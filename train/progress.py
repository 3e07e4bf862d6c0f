"""Steps that are under way, and what is told of each once it is done.

The host dispatches a step while the ones before it still run. To look at a step's metrics is to wait for it, so they are fetched
when it is known to be done and the devices have the next one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax

from train.clock import Finished, InFlight, StepClock, Stretches, steps_ahead
from train.console import Screen
from train.flops import flops_per_token, peak_flops
from train.guard import Done, Guard
from train.optimizer import build_schedule, known_rates
from train.records import Records
from train.setup import Setup


class Progress:
    """The steps of one start, from step `done` on: checked and logged in order, and timed."""

    def __init__(self, setup: Setup, screen: Screen, records: Records, done: int):
        self._setup, self._config = setup, setup.run.config
        self._screen, self._records = screen, records
        self._in_flight, self._clock = InFlight(steps_ahead(setup.mesh)), StepClock(done)
        self._stretches = Stretches(done, functools.partial(records.event, "step"))
        self._guard = Guard(self._config.train, records, enabled=jax.process_index() == 0)
        self._rate = known_rates(build_schedule(self._config.optimizer, self._config.train.steps))
        self._begun = done

    def begun(self, step: Done) -> None:
        """A step is dispatched; waits for the one that has to be done by then. Raises SkippedError, as all of these do."""
        self._begun = step.step
        with self._stretches.waiting():
            finished = self._in_flight.add(step)
        if finished is not None:
            self._tell(finished)

    def over(self) -> None:
        """The host has done all that it does in a step."""
        self._stretches.step(self._begun)

    def wait(self) -> None:
        """Waits until every step that was begun is done and told."""
        while self._in_flight:
            with self._stretches.waiting():
                finished = self._in_flight.next()
            self._tell(finished)

    @contextlib.contextmanager
    def interrupted(self) -> Iterator[None]:
        """Around something other than steps, which all steps before it are done for, and whose time is not theirs."""
        self.wait()
        with self._clock.paused(), self._stretches.interrupted(self._begun):
            yield

    def end(self) -> None:
        """No step comes any more."""
        self.wait()
        self._stretches.end(self._begun)

    def _tell(self, finished: Finished) -> None:
        done: Done = finished.result
        done = done._replace(metrics=jax.device_get(done.metrics))
        total = self._config.train.steps
        if done.step % self._config.train.log_every == 0 or done.step == total:
            row = self._row(done, self._clock.lap(done.step, finished.at))
            self._records.metrics(done.step, row)
            self._screen.step(done.step, total, row)
        self._guard.check(done)

    def _row(self, done: Done, seconds: float | None) -> dict[str, Any]:
        loss, norm = (float(done.metrics[name]) for name in ("loss", "grad_norm"))
        return {"loss": loss, "grad_norm": norm, "lr": self._rate(done.step - 1), "step_time_s": seconds, **self._speed(seconds)}

    def _speed(self, seconds: float | None) -> dict[str, float | None]:
        if seconds is None:
            return {"tokens_per_s": None, "mfu": None}
        tokens = self._config.train.batch * self._config.model.seq / seconds
        peak = peak_flops(jax.devices()[0].device_kind)
        flops = tokens * flops_per_token(self._config.model, self._setup.num_parameters)
        return {"tokens_per_s": tokens, "mfu": flops / (peak * self._setup.mesh.size) if peak else None}
