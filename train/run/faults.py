"""Faults for drills: breaks what a run's `debug: {faults: [...]}` lists, each fault once, however often the run is started again.

A drill kills a run and expects its restart to succeed. A fault that happened again in the restart would never let it, so a file in the run
directory remembers each fault, and is created before the fault happens.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from ..checkpoint.steps import FOLDER, Steps
from ..settings.sections import Fault

_MARKS = "faults"


class InjectedError(Exception):
    """The error that a fault of kind `raise` raises."""


class Faults:
    """The faults of one process. note(fault) is called before each of them happens."""

    def __init__(self, faults: tuple[Fault, ...], folder: Path, process: int, note: Callable[[Fault], None]):
        self._faults = [(number, fault) for number, fault in enumerate(faults) if fault.process == process]
        self._folder = folder
        self._note = note
        self._step = 0

    def inject(self, step: int, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Causes the faults of a step, before the step runs. Returns its batch, which may be one of the things to break."""
        # free() is asked in the middle of a save, and does not know the step.
        self._step = step
        for number, fault in self._faults:
            if fault.at_step == step and fault.kind != "disk_full" and self._first_time(number, fault):
                batch = self._cause(fault, batch)
        return batch

    def free(self, folder: Path) -> int:
        """Bytes free on a folder's disk; 0 if a fault pretends that it is full."""
        for number, fault in self._faults:
            if fault.kind == "disk_full" and fault.at_step <= self._step and self._first_time(number, fault):
                return 0
        return shutil.disk_usage(folder).free

    def _cause(self, fault: Fault, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        match fault.kind:
            case "kill":
                # SIGKILL, because a real crash runs no handler and flushes nothing either.
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                while True:
                    time.sleep(60)
            case "raise":
                raise InjectedError(f"debug.faults: raise at step {fault.at_step}")
            case "corrupt":
                _flip_a_bit(Steps(self._folder / FOLDER))
            case _:
                return _with_nan_weights(batch)
        return batch

    def _first_time(self, number: int, fault: Fault) -> bool:
        marks = self._folder / _MARKS
        marks.mkdir(exist_ok=True)
        try:
            # By number, so that two equal faults in the list are two faults.
            (marks / str(number)).touch(exist_ok=False)
        except FileExistsError:
            return False
        self._note(fault)
        return True


def _with_nan_weights(batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The batch with NaN for all weights in this process's rows, which makes the loss NaN on every process."""
    weights = batch["weights"]
    # Shard by shard, without a collective: the other processes know nothing of this fault.
    parts = [jnp.full_like(shard.data, jnp.nan) for shard in weights.addressable_shards]
    return {**batch, "weights": jax.make_array_from_single_device_arrays(weights.shape, weights.sharding, parts)}


def _flip_a_bit(steps: Steps) -> None:
    """Flips one bit of the newest checkpoint, in the middle of its largest file."""
    if not (listed := steps.listed()):
        return
    largest = max((path for path in steps.path(listed[-1]).rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
