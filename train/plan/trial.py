"""The measured steps of layouts on the devices at hand: functions for another process, because they start JAX.

A plan's times are off by tens of percent, and layouts often differ by less. So what a search finds is measured before it is taken.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jgt import use_virtual_cpu
from jgt.document import InputError

from ..config import Run
from ..setup import prepare
from ..setup.xla import configure_xla
from .search.plans import RunFile

_ROUNDS, _STEPS = 3, 5
"""A machine with other work is slow for seconds or minutes. So rounds of steps are far apart, and the fastest round counts."""


class MeasuredStep:
    """The training step of a run on random tokens, compiled. Each call runs it on the state that the previous one has returned."""

    def __init__(self, run: Run, devices: Sequence[Any]):
        setup = prepare(run, devices=devices)
        self._compiled = setup.train_step().lower(*setup.step_shapes).compile()
        self._setup = setup

    def seconds(self) -> float:
        """The median of a few steps, after one that is not timed."""
        setup, random = self._setup, np.random.default_rng(0)
        batch = {
            name: jax.device_put(random.integers(0, 2, x.shape).astype(x.dtype), setup.batch_shardings[name])
            for name, x in setup.batch_shapes.items()
        }
        state, settings, samples = setup.init(), setup.settings(1), list[float]()
        for _ in range(1 + _STEPS):
            start = time.perf_counter()
            state, metrics = self._compiled(state, batch, settings)
            jax.block_until_ready((state, metrics))
            samples.append(time.perf_counter() - start)
        return statistics.median(samples[1:])


def step_seconds(files: Sequence[RunFile]) -> list[float | str]:
    """The seconds of a step of each run, or why it does not run. The runs differ in their layouts. Starts JAX."""
    steps: list[MeasuredStep | str] = []
    for file in files:
        try:
            run = file.load()
            if not steps:
                # XLA reads its flags once, so all layouts have the flags of the first one.
                # Stored programs are for runs: this process ends without having finished a run's step.
                configure_xla(replace(run.config, xla=replace(run.config.xla, cache=None)))
                if run.config.devices.virtual_cpu is not None:
                    use_virtual_cpu(run.config.devices.virtual_cpu)
            step = MeasuredStep(run, jax.local_devices())
            # A layout that does not fit fails here.
            step.seconds()
            steps.append(step)
        except (InputError, ValueError, RuntimeError, NotImplementedError) as error:
            steps.append((str(error).splitlines() or [type(error).__name__])[0])
    seconds = [math.inf] * len(steps)
    for _ in range(_ROUNDS):
        for index, step in enumerate(steps):
            if isinstance(step, MeasuredStep):
                seconds[index] = min(seconds[index], step.seconds())
    return [step if isinstance(step, str) else taken for step, taken in zip(steps, seconds, strict=True)]


def devices_at_hand() -> tuple[int, str]:
    """The number of devices that JAX finds, and its name of their kind. Starts JAX."""
    devices = jax.local_devices()
    return len(devices), devices[0].device_kind
