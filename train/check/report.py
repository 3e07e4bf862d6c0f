"""A run's placement, found without devices, for a person and for a program."""

from __future__ import annotations

import math
from typing import Any

import jax

from jgt.document import InputError
from train.config import Run
from train.console import Screen
from train.setup import Setup, prepare


def check(run: Run) -> Setup:
    """The run's placement on as many devices as its file names. Raises InputError with every problem."""
    jax.config.update("jax_platforms", "cpu")
    count = run.config.devices.virtual_cpu
    if run.rules is None:
        count = 1
    if count is None:
        if -1 in run.mesh.values():
            raise InputError([f"{run.where('mesh')}: mesh: a size is -1: say for how many devices to check with --devices N"])
        count = math.prod(run.mesh.values())
    return prepare(run, num_devices=count)


def report(setup: Setup) -> dict[str, Any]:
    """The checked placement as plain values."""
    return {
        "ok": True,
        "mesh": dict(setup.mesh.shape),
        "parameters": [
            {
                "name": p.path,
                "signals": list(p.signals),
                "shape": list(p.shape),
                "spec": p.spec,
                "bytes_per_device": p.bytes_per_device(setup.mesh),
            }
            for p in setup.placement.parameters
        ],
    }


def show(setup: Setup) -> None:
    """Prints the mesh and the parameters."""
    screen = Screen(enabled=True)
    screen.setup(setup)
    screen.say("Everything fits: every rule is used, every sharded dim divides.")
