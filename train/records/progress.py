"""The progress of a run: each step from its dispatch until its metrics are checked, logged and printed.

The host dispatches a step while the steps before it still run. To read a step's metrics is to wait for that step, so `Progress` keeps them
on the devices, and fetches them when the step is known to be finished and later steps are already enqueued (`clock.InFlight`). Steps are
handled in order, one or two behind the loop, and before anything that is not a step (an evaluation, a checkpoint, the end) all of them are.

The compiled step itself refuses an update whose loss or gradient is not finite, or whose loss is a spike, and says so in its metrics.
`UpdateGuard` records such updates and decides whether the run may continue. All processes have the same metrics, so each makes the same
decision without communication. With phases each process has only the metrics of its replicas, and decides for itself: communication would
make all processes wait for the slowest process.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from jgt.document import InputError
from jgt.planner import Target

from ..files.ends import EndError
from ..files.streams import say
from ..models.experts.balance import EXPERT_LOAD
from ..processes.compiled import finish_trial
from ..settings.training import TrainConfig
from ..setup import Setup
from ..step.objective import Arrays
from ..step.optimizer import learning_rate
from ..step.sync.phases import fetch_metrics
from .clock import WARMUP_STEPS, Finished, InFlight, StepClock, Stretches, steps_ahead
from .console import Screen
from .records import Records
from .summary import tokens_per_sample


class SkippedError(EndError):
    """The run has to stop because of updates that were not applied. The message names the step and its samples."""


_OF_THE_STEP = ("loss", "grad_norm", "applied", EXPERT_LOAD)
"""Results of every step, which are no metrics of the loss's own. The row has the first two."""
_MOST_LOADS = 500
"""About the largest number of rows of loads in a run."""
_MEMORY = {"memory_bytes": "bytes_in_use", "memory_peak_bytes": "peak_bytes_in_use", "memory_limit_bytes": "bytes_limit"}


class StepResult(NamedTuple):
    """A step and its metrics. samples: the first and the last position in the training data that the step read, both included."""

    step: int
    samples: tuple[int, int]
    metrics: dict[str, Any]


class UpdateGuard:
    """Records updates that were not applied. Stops the run at the first if the config says so, or after too many in a row.

    enabled: whether this process prints a warning for each.
    """

    def __init__(self, config: TrainConfig, records: Records, *, enabled: bool):
        self._config, self._records, self._enabled = config, records, enabled
        self._in_a_row = 0

    def check(self, done: StepResult) -> None:
        """Looks at a finished step, whose metrics are on the host. Raises SkippedError, on all processes or on none.

        With phases it is raised by the processes whose replicas did not apply the update, and the watches of the others then end them.
        """
        if bool(done.metrics["applied"]):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        first, last = done.samples
        loss, norm = (float(done.metrics[name]) for name in ("loss", "grad_norm"))
        finite = math.isfinite(loss) and math.isfinite(norm)
        # A finite update is only refused for its loss.
        kind = "spike" if finite else "nonfinite"
        # As text: JSON has no NaN and no infinity, which is what these values often are.
        self._records.event(kind, time.time(), 0.0, step=done.step, samples=[first, last], loss=str(loss), grad_norm=str(norm))
        values = f"the loss is {loss} and the norm of the gradient {norm}, on samples {first} to {last}"
        message = f"step {done.step}: {values}; the update was not applied"
        # A spike never stops the run at once: skipping spikes was asked for with `train.skip_spikes`.
        if self._config.on_nonfinite == "stop" and not finite:
            raise SkippedError(f"{message}. To skip such updates and continue, set train.on_nonfinite: skip")
        if self._in_a_row >= self._config.max_skipped:
            raise SkippedError(f"{message}. It is number {self._in_a_row} in a row (train.max_skipped)")
        if self._enabled:
            say(message)


class Progress:
    """Follows the steps of one start of a run: times them, checks them, and logs them in order.

    done: the steps before this start. epoch_samples: the samples of one pass over the training data; None if it has no end.
    """

    def __init__(self, setup: Setup, screen: Screen, records: Records, done: int, epoch_samples: int | None = None):
        self._setup, self._config = setup, setup.run.config
        self._screen, self._records = screen, records
        self._in_flight, self._clock = InFlight[StepResult](steps_ahead(setup.mesh)), StepClock(done)
        self._stretches = Stretches(done, records.timeline)
        # Inside a phase only this process knows of an update that its replicas did not apply.
        says = jax.process_index() == 0 or setup.phases is not None
        self._guard = UpdateGuard(self._config.train, records, enabled=says)
        self._dispatched, self._total = done, setup.run.steps
        self._is_cpu, self._figures = jax.default_backend() == "cpu", records.timeline.figures
        self._figures |= {"total": self._total, "finished": done}
        self._last: StepResult | None = None
        self.earlier: Mapping[str, float | None] = {}
        self._logged: Mapping[str, object] = {}
        self._epoch_samples, self._tokens = epoch_samples, tokens_per_sample(setup.batch_shapes)
        model, peak = self._config.model, peak_flops(jax.devices()[0].device_kind)
        self._flops = None if self._tokens is None else self._tokens * model.flops_per_token(setup.num_parameters, setup.num_frozen)
        """The FLOPs of a sample."""
        self._peak = None if peak is None else peak * setup.mesh.size
        self._countdown = Countdown(done)
        every = self._config.train.log_every
        self._loads_every = every * max(1, self._total // (_MOST_LOADS * every))

    def reading(self, batches: Iterator[Arrays]) -> Iterator[Arrays]:
        """The batches of training. The time until each is there counts as reading data."""
        return self._stretches.reading(batches)

    def dispatching(self) -> contextlib.AbstractContextManager[None]:
        """Surrounds the call of a step. CPU devices compute inside it, so the time there is theirs; others take it from the host."""
        return self._stretches.waiting() if self._is_cpu else contextlib.nullcontext()

    def dispatched(self, step: StepResult) -> None:
        """The loop has dispatched a step. Blocks while the host is too far ahead of the devices.

        Like all methods here, it handles the steps that it waited for and may raise SkippedError for one of them.
        """
        self._dispatched = step.step
        with self._stretches.waiting():
            finished = self._in_flight.add(step)
        if finished is not None:
            self._handle(finished)

    def step_over(self) -> None:
        """The loop has done everything that belongs to the step."""
        self._stretches.step(self._dispatched)

    def wait(self) -> None:
        """Waits until every dispatched step is finished and logged."""
        while self._in_flight:
            with self._stretches.waiting():
                finished = self._in_flight.next()
            self._handle(finished)

    @contextlib.contextmanager
    def interrupted(self) -> Iterator[None]:
        """Surrounds something that is not a step. First waits for all steps; the time inside is not counted as theirs."""
        self.wait()
        # The screen's step times leave the pause out, and the events give it to its own phase.
        with self._clock.paused(), self._stretches.interrupted(self._dispatched):
            yield

    def end(self) -> None:
        """Waits for all steps; no more will come."""
        self.wait()
        self._stretches.end(self._dispatched)

    def _handle(self, finished: Finished[StepResult]) -> None:
        """Fetches the metrics of a finished step, logs them, and checks them."""
        done = finished.result
        # One transfer for all metrics of the step.
        done = done._replace(metrics=fetch_metrics(done.metrics, has_replicas=self._setup.phases is not None))
        finish_trial()
        self._last = done
        self._figures["finished"] = done.step
        total = self._total
        if done.step % self._config.train.log_every == 0 or done.step == total:
            row = self._row(done, self._clock.lap(done.step, finished.at, finished.late))
            self._records.metrics(done.step, row)
            self._logged = row
            if EXPERT_LOAD in done.metrics and (done.step % self._loads_every == 0 or done.step == total):
                self._records.loads(done.step, done.metrics[EXPERT_LOAD].tolist())
            self._screen.step(done.step, total, row | {"eta_s": self._countdown.seconds_left(done.step, total)})
        # Checked after it is logged: if the check ends the run, the step that ended it is in the records.
        self._guard.check(done)

    @property
    def metrics(self) -> dict[str, object]:
        """The metrics of the last finished step by name, with speed and memory of the last logged one; before the first, `earlier`."""
        return {**self.earlier} if self._last is None else {**self._logged, **_metrics_of(self._last)}

    def _row(self, done: StepResult, seconds: float | None) -> dict[str, object]:
        """The metrics of a logged step. seconds: per step, or None if not known."""
        samples = done.samples[1] + 1
        return {
            **_metrics_of(done),
            # Computed here from the step's number, so that it needs no transfer from the devices.
            "lr": learning_rate(self._config.optimizer, self._total, done.step),
            "time": round(time.time(), 3),
            "samples": samples,
            **({} if self._tokens is None else {"tokens": samples * self._tokens}),
            **({} if self._epoch_samples is None else {"epoch": round(samples / self._epoch_samples, 6)}),
            "step_time_s": seconds,
            **self._speed(seconds),
            **memory_use(),
        }

    def _speed(self, seconds: float | None) -> dict[str, float | None]:
        name = "samples_per_s" if self._tokens is None else "tokens_per_s"
        if seconds is None:
            return {name: None, "mfu": None}
        speed = self._config.train.batch / seconds
        mfu = None if self._flops is None or self._peak is None else speed * self._flops / self._peak
        return {name: speed * (self._tokens or 1), "mfu": mfu}


def _metrics_of(done: StepResult) -> dict[str, float | None]:
    """The metrics of a finished step. Whatever the loss returns beside its value is there under its own name."""
    own = {name: _scalar(value) for name, value in done.metrics.items() if name not in _OF_THE_STEP}
    return own | {name: float(done.metrics[name]) for name in ("loss", "grad_norm")}


class Countdown:
    """Predicts the end of a run from the wall time of this start's steps, with their evaluations and checkpoints."""

    def __init__(self, done: int):
        self._warm = done + WARMUP_STEPS
        self._begin: tuple[int, float] | None = None

    def seconds_left(self, step: int, total: int) -> float | None:
        """The seconds until step `total`, when `step` is finished; None before there is a step to measure."""
        now = time.perf_counter()
        if self._begin is None:
            self._begin = (step, now) if step >= self._warm else None
            return None
        begin, at = self._begin
        return (now - at) / (step - begin) * (total - step)


def peak_flops(device_kind: str) -> float | None:
    """Peak bf16 FLOP/s of a device kind as JAX names it; None where no figure is known (CPU)."""
    with contextlib.suppress(InputError):
        target = Target.of_devices(device_kind, 1)
        return target.chip.peak_flops("bf16") if target.is_described else None
    return None


def memory_of_devices() -> list[list[int | None]]:
    """The bytes in use and available of each device of this process that keeps statistics."""
    return [[s.get("bytes_in_use"), s.get("bytes_limit")] for device in jax.local_devices() if (s := device.memory_stats())]


def memory_use() -> dict[str, int]:
    """Bytes in use at this moment, at most in use so far, and available, on the fullest device of this process.

    Empty if the allocator keeps no statistics, as on CPU devices.
    """
    all_stats = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
    # The fullest device is the one that runs out.
    fullest = max(all_stats, key=lambda stats: stats.get("peak_bytes_in_use", stats.get("bytes_in_use", 0)), default={})
    return {name: int(fullest[key]) for name, key in _MEMORY.items() if key in fullest}


def _scalar(value: Any) -> float | None:
    """A metric of the loss as a number; None if it is anything else."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
