"""`train.remat: auto`: of the settings of `train.remat`, the one with the least recompute whose step fits in the devices' memory.

Nobody knows how much memory a step needs before XLA has compiled it: layouts, fusions and the schedule decide. So the settings are compiled
in order, and the first that fits is taken. The first one usually does, and then nothing is compiled twice: the run takes that program.

Two orders exist. Where attention is a fused kernel, `matmuls` comes first: it computes no matmul again, and the step is faster than with
`none`, because fewer bytes are moved. Elsewhere a layer's scores are an array of their own, which all settings but `none` compute again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from jgt.hardware import USABLE

from ..models.attention import CUDNN
from ..models.remat import Remat
from ..processes.processes import true_on_all_processes
from .setup import Setup

AUTO = "auto"


def first_remat(remat: Remat, *, is_fused: bool) -> Remat:
    """The setting to begin with: of `auto` the one with the least recompute, otherwise the setting itself."""
    return _ladder(is_fused=is_fused)[0] if remat == AUTO else remat


def with_remat(setup: Setup, again: Callable[[Remat], Setup], fits: Callable[[Setup], Setup | None]) -> Setup:
    """The setup with the setting that `train.remat: auto` takes; other settings stay.

    setup: with the first setting. again(remat): the setup with another one. fits: the setup if its step fits, None if not. If no step
    fits, the setting with the most recompute is taken.
    """
    if setup.run.config.train.remat != AUTO:
        return setup
    for remat in _ladder(is_fused=setup.attention is not None and setup.attention.kernel is CUDNN):
        setup = setup if remat == setup.remat else again(remat)
        if (found := fits(setup)) is not None:
            return found
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
        is_enough = _peak_bytes(compiled.memory_analysis()) <= USABLE * limit
    except RuntimeError as error:
        # XLA may already give up while it compiles.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        is_enough = False
    # Devices may have different amounts of free memory, and all processes have to run one program.
    return replace(setup, compiled=compiled) if true_on_all_processes(is_enough) else None


def _ladder(*, is_fused: bool) -> tuple[Remat, ...]:
    return ("matmuls", "block") if is_fused else ("none", "attention", "matmuls", "block")


def _memory_of_devices() -> int | None:
    """The bytes that a program may use on each device of this process; None if a device does not report them."""
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
    known = [int(limit) for limit in limits if limit]
    return min(known) if known and len(known) == len(limits) else None


def _peak_bytes(stats: Any) -> int:
    """The bytes on a device, of JAX's CompiledMemoryStats."""
    # A donated argument's memory is its output's, and XLA counts it in both.
    new_outputs = max(stats.output_size_in_bytes - stats.alias_size_in_bytes, 0)
    return min(stats.argument_size_in_bytes + new_outputs + stats.temp_size_in_bytes, stats.peak_memory_in_bytes or 1 << 62)
