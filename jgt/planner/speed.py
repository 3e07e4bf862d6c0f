"""The speed of a predicted step: tokens/s, MFU and cost; and the schedule of its pipeline.

The caller puts what the program does not contain into a `Workload`. MFU is the model's own FLOPs over the peak of all devices in bf16;
without a workload, the FLOPs of the traced program take their place, in which all scores count that XLA computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jgt.pipeline.config import PipelineConfig
from jgt.planner.hardware.target import Target


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule:
    """A pipeline's schedule on a mesh.

    bubble: the share of the time in which the average stage does nothing useful, by the schedule alone. where: the file:line of the
    pipeline's section; empty if it is not from a file.
    """

    name: str
    signal: str
    axis: str
    stages: int
    microbatches: int
    virtual: int
    bubble: float
    where: str

    @property
    def text(self) -> str:
        """The schedule in one line."""
        chunks = f" of {self.virtual} chunks" if self.virtual > 1 else ""
        return f"{self.name}, {self.stages} stages{chunks}, {self.microbatches} microbatches, bubble {self.bubble:.1%}"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The facts about a step that its caller knows and its program does not contain.

    tokens: the tokens in a step. flops: the model's FLOPs in a step on all devices, the numerator of MFU. pipeline: how the layers are
    staged. price: dollars for an hour of one device.
    """

    tokens: int | None = None
    flops: float | None = None
    pipeline: PipelineConfig | None = None
    price: float | None = None

    def schedule(self, mesh: Mapping[str, int], **changes: int | str) -> PipelineSchedule | None:
        """The schedule of the pipeline on a mesh; None without a pipeline.

        changes: fields of the pipeline with other values. Raises InputError if no schedule has these numbers.
        """
        if self.pipeline is None:
            return None
        lines, pipeline = self.pipeline.lines, replace(self.pipeline, **changes)
        simulation = pipeline.simulate(mesh.get(pipeline.axis, 1), with_recompute=True)
        table = simulation.table
        return PipelineSchedule(
            name=pipeline.schedule,
            signal=pipeline.signal,
            axis=pipeline.axis,
            stages=table.num_stages,
            microbatches=table.num_microbatches,
            virtual=table.virtual,
            bubble=simulation.bubble,
            where=lines.get("schedule") or lines.get("", ""),
        )


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed of a step on all devices.

    mfu: the share of the peak in bf16; causal if the workload has the model's FLOPs. dollars_per_hour, dollars_per_million_tokens: the
    cost of all devices; None without a price.
    """

    tokens_per_s: float | None
    mfu: float
    model_tflops_per_device: float
    dollars_per_hour: float | None
    dollars_per_million_tokens: float | None


def speed_of(work: Workload, target: Target, flops_per_device: float, seconds: float) -> Speed:
    """The speed of a step that takes this many seconds.

    flops_per_device: the model's FLOPs by the traced program, which count if the workload has no FLOPs.
    """
    needed = flops_per_device if work.flops is None else work.flops / target.num_devices
    tokens_per_s = None if work.tokens is None else work.tokens / seconds
    per_hour = None if work.price is None else work.price * target.num_devices
    return Speed(
        tokens_per_s=tokens_per_s,
        mfu=needed / seconds / target.chip.peak_flops("bf16"),
        model_tflops_per_device=needed / seconds / 1e12,
        dollars_per_hour=per_hour,
        dollars_per_million_tokens=None if per_hour is None or tokens_per_s is None else per_hour / 3600 / tokens_per_s * 1e6,
    )
