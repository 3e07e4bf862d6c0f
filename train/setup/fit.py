"""`train.remat: auto` takes the setting of `train.remat` with the least recompute whose step fits in the devices' memory.

Layouts, fusions and the schedule decide how much memory a step needs, so it is known once XLA has compiled the step. The settings are
compiled in order. Usually the first one fits, and the run takes that program without compiling it twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from jgt.planner import Target

from ..processes.processes import true_on_all_processes
from .remat import AUTO, Remat, remat_settings
from .setup import Setup


def with_remat(setup: Setup, again: Callable[[Remat], Setup], fits: Callable[[Setup], Setup | None]) -> Setup:
    """The setup with the setting that `train.remat: auto` takes; other settings stay.

    setup: the setup with the first setting. again(remat): makes it with another one. fits: returns the setup if its step fits, otherwise
    None. If no step fits, the setting with the most recompute is taken.
    """
    if setup.run.config.train.remat != AUTO:
        return setup
    attention = setup.program.attention
    for remat in remat_settings(keeps_scores=attention is None or attention.kernel.keeps_scores):
        setup = setup if remat == setup.program.remat else again(remat)
        if (fitting := fits(setup)) is not None:
            return fitting
    return setup


def compiled_to_fit(setup: Setup) -> Setup | None:
    """The setup with its compiled step, if that fits in the memory of this run's devices, as far as they report their memory."""
    limit = _memory_of_devices()
    # Devices that do not report it are CPUs, whose memory is the host's.
    if limit is None:
        return setup
    compiled: Any = None
    try:
        compiled = setup.compile_train_step()
        is_enough = Target.memory_fits(compiled.memory_analysis(), limit)
    except RuntimeError as error:
        # XLA may already give up while it compiles.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        is_enough = False
    # Devices may have different amounts of free memory, and all processes have to run one program.
    return replace(setup, compiled=compiled) if true_on_all_processes(is_enough) else None


def _memory_of_devices() -> int | None:
    """The bytes that a program may use on each device of this process; None if a device does not report them."""
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
    known = [int(limit) for limit in limits if limit]
    return min(known) if known and len(known) == len(limits) else None
