"""Watches for updates that were not applied: a loss or a gradient was not finite, or a loss was a spike."""

from __future__ import annotations

import math
import sys
import time
from typing import Any, NamedTuple

from train.records import Records
from train.sections import TrainConfig


class SkippedError(Exception):
    """The run has to stop; the message says at which step, and on which samples."""


class Done(NamedTuple):
    """A step and its metrics: samples are the positions in the training data that it read, first and last."""

    step: int
    samples: tuple[int, int]
    metrics: dict[str, Any]


class Guard:
    """Notes each such step, and stops the run if that is asked for or if there are too many in a row."""

    def __init__(self, config: TrainConfig, records: Records, *, enabled: bool):
        self._config, self._records, self._enabled = config, records, enabled
        self._in_a_row = 0

    def check(self, done: Done) -> None:
        """Looks at a finished step, whose metrics are on the host. Raises SkippedError, on all processes alike."""
        if bool(done.metrics["applied"]):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        first, last = done.samples
        loss, norm = (float(done.metrics[name]) for name in ("loss", "grad_norm"))
        finite = math.isfinite(loss) and math.isfinite(norm)
        kind = "spike" if finite else "nonfinite"
        self._records.event(kind, time.time(), 0.0, step=done.step, samples=[first, last], loss=str(loss), grad_norm=str(norm))
        what = f"step {done.step}: the loss is {loss} and the norm of the gradient {norm}, on samples {first} to {last}; the update was not applied"
        if self._config.on_nonfinite == "stop" and not finite:
            raise SkippedError(f"{what}. train.on_nonfinite: skip goes on after such steps")
        if self._in_a_row >= self._config.max_skipped:
            raise SkippedError(f"{what}. It is number {self._in_a_row} in a row (train.max_skipped)")
        if self._enabled:
            print(f"jgt: {what}", file=sys.stderr)
