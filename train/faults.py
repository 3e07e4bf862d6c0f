"""Faults for drills: what a run's `debug: {faults: [...]}` breaks, once each, however often the run is started again."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from train.sections import Fault
from train.steps import FOLDER, Steps

_MARKS = "faults"


class InjectedError(Exception):
    """The error of a fault of kind `raise`."""


class Faults:
    """The faults of one process; a file in the run directory remembers each that has happened.

    note(fault) is called before one happens.
    """

    def __init__(self, faults: tuple[Fault, ...], folder: Path, process: int, note: Callable[[Fault], None]):
        self._faults = [(number, fault) for number, fault in enumerate(faults) if fault.process == process]
        self._folder = folder
        self._note = note
        self._step = 0

    def before(self, step: int, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Breaks what is to be broken before a step; the batch, which may be broken too."""
        self._step = step
        for number, fault in self._faults:
            if fault.at_step == step and fault.kind != "disk_full" and self._first_time(number, fault):
                batch = self._happen(fault, batch)
        return batch

    def free(self, folder: Path) -> int:
        """Bytes free on a folder's disk, as far as a fault lets it be known."""
        for number, fault in self._faults:
            if fault.kind == "disk_full" and fault.at_step <= self._step and self._first_time(number, fault):
                return 0
        return shutil.disk_usage(folder).free

    def _happen(self, fault: Fault, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                while True:
                    time.sleep(60)
            case "raise":
                raise InjectedError(f"debug.faults: raise at step {fault.at_step}")
            case "corrupt":
                _flip_a_bit(Steps(self._folder / FOLDER))
            case _:
                return _poisoned(batch)
        return batch

    def _first_time(self, number: int, fault: Fault) -> bool:
        marks = self._folder / _MARKS
        marks.mkdir(exist_ok=True)
        try:
            (marks / str(number)).touch(exist_ok=False)
        except FileExistsError:
            return False
        self._note(fault)
        return True


def _poisoned(batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The batch with weights that are not a number, in this process's rows."""
    weights = batch["weights"]
    parts = [jnp.full_like(shard.data, jnp.nan) for shard in weights.addressable_shards]
    return {**batch, "weights": jax.make_array_from_single_device_arrays(weights.shape, weights.sharding, parts)}


def _flip_a_bit(steps: Steps) -> None:
    """Damages the newest checkpoint, in the middle of its largest file."""
    if not (listed := steps.listed()):
        return
    largest = max((path for path in steps.path(listed[-1]).rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
