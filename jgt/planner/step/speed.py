"""What a predicted step means to the person who pays for it: tokens/s, MFU and cost; and the schedule of its pipeline.

A program does not say how many tokens a step has, nor what the model needs without recompute and with half of the scores under a causal
mask, nor what an hour of a GPU costs. Its caller knows, and says so in a `Workload`. MFU then is the one that runs log and papers report:
the model's own FLOPs over the peak of all devices in bf16. Without a workload, the FLOPs of the traced program take their place, in which
all scores count that XLA computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jgt.hardware.chip import Target
from jgt.pipeline.config import PipelineConfig
from jgt.schedule.find import find_table
from jgt.schedule.simulate import Costs, simulate


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The value of a run's key. where: its file:line, or of the nearest key around it that the file has."""

    value: object
    where: str


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a caller knows of a step and its program does not say.

    tokens: of a step. flops: of the model in a step, on all devices; the numerator of MFU. rows: the rows of the batch that a device
    computes at once, such as those of a microbatch. pipeline: how the layers are staged. price: dollars for an hour of one device.
    settings: the run's keys that advice may change, dotted; empty if the function is not a run's.
    """

    tokens: int | None = None
    flops: float | None = None
    rows: int | None = None
    pipeline: PipelineConfig | None = None
    price: float | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict[str, Setting])

    def value(self, key: str) -> object:
        """The value of a setting; None if it is not known."""
        return self.settings[key].value if key in self.settings else None


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule:
    """A pipeline's schedule on a mesh. bubble: the share of the time in which the average stage does nothing useful, by the schedule alone.

    where: file:line of the pipeline's section; empty if it is not from a file.
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


def schedule_of(pipeline: PipelineConfig, mesh: Mapping[str, int], **changes: int | str) -> PipelineSchedule:
    """The schedule of a pipeline on a mesh. changes: fields with other values. Raises InputError if no schedule has these numbers."""
    lines = pipeline.lines
    pipeline = replace(pipeline, **changes) if changes else pipeline
    table = find_table(pipeline.schedule, mesh.get(pipeline.axis, 1), pipeline.microbatches, pipeline.virtual, pipeline.where("schedule"))
    # A recompute before the backward pass is as long as a forward pass.
    costs = Costs(backward=1 if pipeline.remat == "none" else 2)
    return PipelineSchedule(
        name=pipeline.schedule,
        signal=pipeline.signal,
        axis=pipeline.axis,
        stages=table.num_stages,
        microbatches=table.num_microbatches,
        virtual=table.virtual,
        bubble=simulate(table, costs).bubble,
        where=lines.get("schedule") or lines.get("", ""),
    )


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed of a step on all devices. mfu: of the peak in bf16; causal if the workload says what the model needs.

    dollars_per_hour: of all devices; dollars_per_million_tokens; both None without a price.
    """

    tokens_per_s: float | None
    mfu: float
    model_tflops_per_device: float
    dollars_per_hour: float | None
    dollars_per_million_tokens: float | None


def speed_of(work: Workload, target: Target, flops_per_device: float, seconds: float) -> Speed:
    """The speed of a step. flops_per_device: of the model, by the traced program, where the workload does not say. seconds: of the step."""
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
