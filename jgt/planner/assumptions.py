"""Sentences say what a plan assumes here, and figures how far its time may be off."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from jgt.command.console import amount
from jgt.planner.compiled import Compiled
from jgt.planner.hardware.target import Target
from jgt.planner.hlo.collectives import Collective, collectives
from jgt.planner.hlo.shares import possible_rounds
from jgt.planner.hlo.text import Module
from jgt.planner.memory import Memory
from jgt.program.scopes import PIPELINE


def assumptions(compiled: Compiled, module: Module, mesh: Mapping[str, int], sent: Sequence[Collective]) -> Iterator[str]:
    """Sentences about how a plan counts."""
    yield from _about_counts(compiled)
    yield from _about_rounds(module, mesh, sent)


def _about_counts(compiled: Compiled) -> Iterator[str]:
    if compiled.flags:
        yield f"XLA's flags: {', '.join(f'{name}={value}' for name, value in compiled.flags.items())}"
    yield (
        "FLOPs: 2 for each multiply-add of matmuls and convolutions. With a causal mask, all scores of attention count if XLA computes "
        "them, and half of them if cuDNN does, which skips the other half"
    )
    yield (
        "bytes sent: by one device, in ring algorithms. A branch counts as always taken, but a pipeline's branch as often as its schedule "
        "takes it"
    )
    if not compiled.is_described:
        yield (
            "compiled for CPU: bf16 collectives send f32, and reduce-scatters become all-reduces. GPUs send fewer bytes, over the same axes"
        )
    if compiled.target is None:
        return
    chip = compiled.target.chip
    power = f" at {chip.power_w:g} W" if chip.platform == "cuda" else ""
    links = ", ".join(f"{name} at {link.gbs:g} GB/s ({link.share:.0%})" for name, link in chip.links.items())
    yield (
        f"{chip.name}{power}: {chip.tflops['bf16']:g} TFLOP/s in bf16 (large matmuls of a step reach "
        f"{chip.rates.matmul['bf16'].share:.0%}), {chip.hbm_gb:g} GB of memory at {chip.hbm_gbs:g} GB/s ({chip.rates.memory.share:.0%}); "
        f"for each device and direction {links}, and the host's memory at {chip.host_gbs:g} GB/s"
    )
    yield (
        "time: a kernel takes the longer of its FLOPs and its bytes, and a collective runs beside what XLA scheduled meanwhile. This is a "
        "prediction, not a measurement"
    )


def _about_rounds(module: Module, mesh: Mapping[str, int], sent: Sequence[Collective]) -> Iterator[str]:
    rounds = [number for i in module.instructions() if i.op == "while" and (number := possible_rounds(i.op_name)) is not None]
    if rounds:
        with_another = collectives(module, mesh, math.prod(mesh.values()), further_rounds=1)
        cost = sum(c.total_bytes for c in with_another) - sum(c.total_bytes for c in sent)
        most = f"Up to {max(rounds)} further ones" if max(rounds) else "Further ones"
        yield (
            f"experts: each exchange counts as one round. {most} run if a pair of devices has more rows than room. One more round of each "
            f"exchange sends {amount(cost, 'B')} more in a step"
        )


def time_error(target: Target | None, module: Module, memory: Memory) -> float | None:
    """The error to expect of the step's time, by kind of layout; None if it is unknown, or if the time means nothing."""
    if target is None or memory.fits is False:
        return None
    is_staged = any(PIPELINE in i.op_name for i in module.instructions())
    return target.chip.error.get("pipeline" if is_staged else "several_hosts" if target.num_hosts > 1 else "one_host")


def time_caveat(memory: Memory) -> str:
    """Why the step's time means nothing; empty if it means something."""
    if memory.fits is not False:
        return ""
    return (
        "the step does not fit, and XLA scheduled it to save memory, with no collective beside a kernel. "
        "Change the layout until it fits, then compare times"
    )
