"""The time of each layer of a pipeline's stages, from a profiler trace.

All layers of a stage are one loop, so a trace has the same instructions for each of them, time and again. Between two runs of a stage's
first instruction lies one layer of one microbatch. A schedule's ticks are several loops, one after another (segments), and the number of
layers that each runs is known. So the first instruction of a segment is the first one that ran this often. Whatever a layer runs after it,
such as a branch that only some layers take, is in its time.
"""

from __future__ import annotations

import bisect
import collections
import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jgt.planner.hlo.collectives import is_collective
from jgt.planner.hlo.kernels import CONTROL
from jgt.planner.hlo.origin import origin_at
from jgt.planner.hlo.text import Module
from jgt.planner.profile.events import Event, Trace, read_trace

_PIPELINE = "pipeline"
"""The signal of what a pipeline adds to the model."""
Segments = Sequence[tuple[int, int]]
"""For each segment of a schedule's ticks: a stage's items in it, and its ticks."""


@dataclass(frozen=True, kw_only=True)
class StageOfLayers:
    """The stage of a device: its number, its layers, the layers of the longest stage, and its segments in each direction."""

    stage: int
    layers: Sequence[int]
    most: int
    forward: Segments
    backward: Segments


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """The milliseconds of a microbatch in a layer, on the devices of its stage."""

    layer: int
    stage: int
    forward_ms: float
    backward_ms: float


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """The times of the layers of this process's stages, and of a microbatch in embedding and head."""

    layers: tuple[LayerTime, ...]
    ends_ms: float


@dataclass(frozen=True, kw_only=True)
class PipelineTimes:
    """How a trace is read for the costs of a pipeline's layers. signal: the layers' signal. devices: the stage of each device.

    microbatches: those that go through the schedule at once. parts: the schedule runs this often in a step. by_stage: a chunk runs forward
    a second time before it runs backward, all layers in a loop of their own.
    """

    signal: str
    microbatches: int
    parts: int
    by_stage: bool
    devices: Mapping[int, StageOfLayers] = field(default_factory=dict[int, StageOfLayers])

    def read(self, path: Path, annotation: str, text: str, num_steps: int) -> LayerTimes | None:
        """As `of`, from a trace's file and the compiled program."""
        return self.of(read_trace(path, annotation), Module.parse(text), num_steps)

    def of(self, trace: Trace, module: Module, num_steps: int) -> LayerTimes | None:
        """The times, which `jgt.schedule.balance.MeasuredCosts` reads as JSON; None if the trace does not show each layer."""
        # The schedule runs so often.
        num_steps *= self.parts
        kinds, stage_of, ends = dict[str, str](), dict[int, int](), list[float]()
        spent: dict[tuple[int, str], list[float]] = collections.defaultdict(list)
        for device, stage in self.devices.items():
            events: dict[str, list[Event]] = collections.defaultdict(list)
            for event in sorted((e for e in trace.events if e.device == device), key=lambda e: e.start_ns):
                if event.instruction not in kinds:
                    kinds[event.instruction] = self._kind(module, event)
                events[kinds[event.instruction]].append(event)
            for kind, segments in (("forward", stage.forward), ("backward", stage.backward)):
                for position, ms in _layers(events[kind], stage, segments, num_steps, descending=kind == "backward"):
                    if position < len(stage.layers):
                        spent[stage.layers[position], kind].append(ms)
            stage_of |= dict.fromkeys(stage.layers, stage.stage)
            # The optimizer and whatever else runs once a step do not count.
            often = collections.Counter(event.instruction for event in events["end"])
            total = sum(e.end_ns - e.start_ns for e in events["end"] if often[e.instruction] >= self.microbatches * num_steps)
            ends.append(total / (1e6 * self.microbatches * num_steps))
        if not stage_of or any(not spent[layer, kind] for layer in stage_of for kind in ("forward", "backward")):
            return None
        layers = list[LayerTime]()
        for layer, stage in sorted(stage_of.items()):
            forward, backward = (statistics.median(spent[layer, kind]) for kind in ("forward", "backward"))
            layers.append(LayerTime(layer=layer, stage=stage, forward_ms=forward, backward_ms=backward + forward * self.by_stage))
        return LayerTimes(layers=tuple(layers), ends_ms=statistics.fmean(ends))

    def _kind(self, module: Module, event: Event) -> str:
        instruction = module.named.get(event.instruction)
        if event.program not in ("", module.name) or instruction is None or instruction.op in CONTROL or is_collective(module, instruction):
            return ""
        signal, phase = origin_at(module, instruction)
        if signal != self.signal and not signal.startswith(f"{self.signal}/"):
            return "" if signal == _PIPELINE else "end"
        return "backward" if phase == "recompute" and not self.by_stage else phase


def _usual(values: Sequence[float]) -> float:
    """A low decile: on a machine with other work, most runs are interrupted."""
    return statistics.quantiles(values, n=10, method="inclusive")[0] if len(values) > 1 else values[0]


def _layers(
    events: Sequence[Event], stage: StageOfLayers, segments: Segments, num_steps: int, *, descending: bool
) -> Iterator[tuple[int, float]]:
    """The position and the milliseconds of each run of a layer; none if a segment is not recognized. events: in order of time."""
    by_instruction: dict[str, list[Event]] = collections.defaultdict(list)
    for event in events:
        by_instruction[event.instruction].append(event)
    # A stage without an item skips its layers and padding, or computes both in every tick.
    for length, counts in ((len(stage.layers), [items for items, _ in segments]), (stage.most, [ticks for _, ticks in segments])):
        begins = _begins(by_instruction.values(), [count * length for count in counts if count], num_steps)
        if begins is not None:
            break
    else:
        return
    # All layers have the same instructions, and differ by how often they run them. Where one took longer than usual, it was interrupted, or
    # it was a stage's last one, which ended while the stage waited for the others.
    usual = {name: _usual([e.end_ns - e.start_ns for e in run]) for name, run in by_instruction.items()}
    spent = [0.0] * len(begins)
    for event in events:
        if (window := bisect.bisect_right(begins, event.start_ns) - 1) >= 0:
            spent[window] += usual[event.instruction]
    for index, ns in enumerate(spent):
        position = index % length
        yield length - 1 - position if descending else position, ns / 1e6


def _begins(runs: Collection[list[Event]], counts: Sequence[int], num_steps: int) -> list[float] | None:
    """The moments at which layers begin. runs: the events of each instruction. counts: the layers that each segment runs in a step."""
    begins, since = list[float](), -math.inf
    for count in counts:
        fitting = [run for run in runs if len(run) == count * num_steps and run[0].start_ns > since]
        if not fitting:
            return None
        first = min(fitting, key=lambda run: run[0].start_ns)
        begins += [event.start_ns for event in first]
        since = first[count - 1].start_ns
    return sorted(begins)
