"""A run's plan: its real training step, compiled from shapes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import jax

from jgt.document import InputError
from jgt.plan.chip import Target
from jgt.plan.cudnn import described
from jgt.plan.plan import Plan, plan
from jgt.plan.topology import devices_of
from train.config import Run
from train.setup import prepare


def make_plan(run: Run, target: Target | None, num_devices: int | None) -> Plan:
    """Plans the run's step for a target, or for as many CPU devices as the file, or num_devices, says. Raises InputError."""
    jax.config.update("jax_platforms", "cpu")
    if target is not None:
        with described():
            # On a mesh without devices, because those that are only described forget in which memory an array is.
            setup = prepare(run, num_devices=target.num_devices, like=devices_of(target)[0])
    else:
        count = _count(run, num_devices)
        if len(_cpu_devices(count)) < count:
            raise InputError([f"plan: {count} CPU devices are needed, but JAX has started with {len(jax.devices())}. Plan in a process of its own"])
        setup = prepare(run, devices=jax.devices()[:count])
    return plan(setup.train_step(), setup.shapes, setup.batch_shapes, target=target, rules=run.rules)


def _count(run: Run, num_devices: int | None) -> int:
    if run.rules is None:
        return 1
    count = num_devices or run.config.devices.virtual_cpu
    if count is None and -1 in run.mesh.values():
        raise InputError([f"{run.where('mesh')}: mesh: a size is -1: say for how many devices to plan with --devices N, or --target"])
    return count or math.prod(run.mesh.values())


def _cpu_devices(count: int) -> Sequence[Any]:
    """JAX's devices; the first to ask says how many."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)
    return jax.devices()
