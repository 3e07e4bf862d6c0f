"""Device time by signal: how long each signal's kernels and collectives took in the steps that were traced.

A trace names instructions, and the text of the compiled program knows the signal and the phase of each of them. Time is then divided among
the owners (`overlap`) such that a step's time is the sum of all rows. Idle time between two steps has two causes with different remedies.
If the host dispatched the next step in time, the device or its runtime is slow to start it. If it did not, the host is late: data, Python
or a checkpoint kept it from asking.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from jgt.planner.hlo.collectives import is_collective
from jgt.planner.hlo.kernels import CONTROL
from jgt.planner.hlo.origin import Origin, full_signal, origin_at
from jgt.planner.hlo.text import Module
from jgt.planner.profile.events import Event, Trace, read_trace
from jgt.planner.profile.layers import LayerTimes, PipelineTimes, StageOfLayers
from jgt.planner.profile.overlap import BusyTime, Interval, divide_time

OTHER = "(other)"
"""The row of what is not an instruction of the program: other programs, copies to and from the host, kernels without a name."""
_SAME_US = 20.0
"""Two stretches of the same signal with a shorter pause between them are one."""
_OTHER_ORIGIN = Origin(OTHER, "forward")


@dataclass(frozen=True, kw_only=True)
class SignalTime:
    """The time of one signal, in milliseconds per device and step.

    forward_ms, backward_ms, recompute_ms: while its kernels ran; kernels that run at once get equal parts. exposed_ms: while its
    collectives ran and no kernel did (for OTHER: while nothing else ran). collectives_ms: from the start to the end of its collectives,
    whether kernels ran meanwhile or not. share: the sum of the first four times, as a part of the step's time.
    """

    signal: str
    forward_ms: float
    backward_ms: float
    recompute_ms: float
    exposed_ms: float
    collectives_ms: float
    share: float


@dataclass(frozen=True, kw_only=True)
class DeviceTime:
    """The time of one device: milliseconds per step.

    step_ms: all of it; idle_ms: while the device ran nothing; between_ms: the part of idle_ms between two steps; late_ms: the part of
    between_ms before the host dispatched the next step.
    """

    device: int
    step_ms: float
    idle_ms: float
    between_ms: float
    late_ms: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The measured steps, from the start of the first to the end of the last; means over the devices of this process.

    signals: the rows, the longest first; together with idle_ms they add up to step_ms. Other fields are as in `DeviceTime`.
    """

    num_steps: int
    step_ms: float
    idle_ms: float
    between_ms: float
    late_ms: float
    signals: tuple[SignalTime, ...]
    devices: tuple[DeviceTime, ...]

    @classmethod
    def read(cls, path: Path, annotation: str, text: str, num_steps: int, known_signals: Iterable[str]) -> Profile | None:
        """The profile of a compiled program in a trace's file; None if the trace has no event of it.

        annotation: the name of the StepTraceAnnotation around the call of each step. text: the compiled program. See `profile_of`.
        """
        return profile_of(read_trace(path, annotation), Module.parse(text), num_steps, known_signals)

    @staticmethod
    def read_slices(path: Path, annotation: str, text: str, known_signals: Iterable[str]) -> list[list[Any]]:
        """Device, start and length in microseconds, signal and phase of each stretch of a device's time, from a trace's file."""
        trace, reader = read_trace(path, annotation), _Reader(Module.parse(text), set(known_signals))
        found, ends = collections.defaultdict[int, list[list[Any]]](list), collections.defaultdict[int, float](float)
        for event in sorted(trace.events, key=lambda event: event.start_ns):
            origin, before = reader.origin(event), found[event.device][-1:]
            # Kernels may overlap, and slices of a lane may not.
            begin, end = max(event.start_ns / 1e3, ends[event.device]), event.end_ns / 1e3
            if origin is None or end <= begin:
                continue
            if before and before[0][3:] == [*origin] and begin - ends[event.device] < _SAME_US:
                before[0][2] = round(end - before[0][1], 1)
            else:
                found[event.device].append([event.device, round(begin, 1), round(end - begin, 1), *origin])
            ends[event.device] = end
        return [row for rows in found.values() for row in rows]

    @staticmethod
    def read_layers(path: Path, annotation: str, text: str, num_steps: int, stages: Mapping[str, Any]) -> LayerTimes | None:
        """The times of a pipeline's layers in a trace's file; None if it does not show each layer.

        stages: the fields of `PipelineTimes`, and for each of its devices those of `StageOfLayers`.
        """
        devices = {device: StageOfLayers(**stage) for device, stage in stages["devices"].items()}
        return replace(PipelineTimes(**stages), devices=devices).read(path, annotation, text, num_steps)


def profile_of(trace: Trace, module: Module, num_steps: int, known_signals: Iterable[str]) -> Profile | None:
    """The profile of a compiled program that ran `num_steps` times; None if the trace has no event of it.

    known_signals: the full paths of signals, which complete paths that lack their beginning.
    """
    # The first dispatch precedes all device work: it ends no pause between steps.
    dispatched = [trace.dispatched[step] for step in sorted(trace.dispatched)][1:]
    by_device: dict[int, list[Event]] = collections.defaultdict(list)
    for event in trace.events:
        by_device[event.device].append(event)
    reader = _Reader(module, set(known_signals))
    measured = [reader.device(device, by_device[device], num_steps, dispatched) for device in sorted(by_device)]
    devices = [device for device in measured if device is not None]
    if not devices:
        return None
    times = [device.time for device in devices]
    step_ms = statistics.fmean(time.step_ms for time in times)
    return Profile(
        num_steps=num_steps,
        step_ms=step_ms,
        idle_ms=statistics.fmean(time.idle_ms for time in times),
        between_ms=statistics.fmean(time.between_ms for time in times),
        late_ms=statistics.fmean(time.late_ms for time in times),
        signals=_signal_times(devices, step_ms, len(devices) * num_steps * 1e6),
        devices=tuple(times),
    )


class _Device(NamedTuple):
    """busy, and collectives by signal, are in nanoseconds of all steps together."""

    time: DeviceTime
    busy: BusyTime
    collectives: dict[str, float]


class _Reader:
    """Looks up the events of one program in its text. A trace repeats few instructions very often, so answers are cached."""

    def __init__(self, module: Module, known_signals: Collection[str]):
        self._module, self._known_signals = module, known_signals
        self._owners: dict[str, tuple[Origin, bool]] = {}

    def device(self, device: int, events: Sequence[Event], num_steps: int, dispatched: Sequence[float]) -> _Device | None:
        """The time of one device; None if it did not run the program."""
        events = [event for event in events if not self._contains_others(event)]
        steps = [event for event in events if self._is_of_program(event)]
        if not steps:
            return None
        begin, end = min(event.start_ns for event in steps), max(event.end_ns for event in steps)
        intervals: list[Interval] = []
        collectives: dict[str, float] = collections.defaultdict(float)
        for event in events:
            origin, in_background = self._owner(event.instruction) if self._is_of_program(event) else (_OTHER_ORIGIN, True)
            # Other work, such as an evaluation, counts only between the first and the last step.
            start, stop = max(event.start_ns, begin), min(event.end_ns, end)
            if start < stop:
                intervals.append(Interval(start, stop, origin, in_background))
                if in_background and origin != _OTHER_ORIGIN:
                    collectives[origin.signal] += stop - start
        busy = divide_time(intervals)
        # Nanoseconds of all steps to milliseconds of one.
        per_step = num_steps * 1e6
        pauses = _pauses(steps, num_steps)
        # A host that is in time dispatches a step before the pause begins: its stretch then ends before it starts, and counts as 0.
        late = [(start, min(end, by)) for (start, end), by in zip(pauses, dispatched, strict=False)]
        time = DeviceTime(
            device=device,
            step_ms=(end - begin) / per_step,
            idle_ms=busy.idle / per_step,
            between_ms=_overlap(busy.gaps, pauses) / per_step,
            late_ms=_overlap(busy.gaps, late) / per_step,
        )
        return _Device(time=time, busy=busy, collectives=collectives)

    def origin(self, event: Event) -> Origin | None:
        """The signal and the phase of an event of the program; None of any other, and of what contains others."""
        return self._owner(event.instruction)[0] if self._is_of_program(event) and not self._contains_others(event) else None

    def _is_of_program(self, event: Event) -> bool:
        # An event without a program, such as a part of a CUDA graph, is recognized by its instruction alone.
        return event.program in ("", self._module.name) and event.instruction in self._module.named

    def _contains_others(self, event: Event) -> bool:
        """Whether this is a loop or a call whose instructions have events of their own; counting both would count time twice."""
        return event.may_contain and self._is_of_program(event) and self._module.named[event.instruction].op in CONTROL

    def _owner(self, name: str) -> tuple[Origin, bool]:
        if name not in self._owners:
            instruction = self._module.named[name]
            signal, phase = origin_at(self._module, instruction)
            origin = Origin(full_signal(signal, self._known_signals), phase)
            self._owners[name] = origin, is_collective(self._module, instruction)
        return self._owners[name]


def _pauses(events: Sequence[Event], num_steps: int) -> list[tuple[float, float]]:
    """The pauses, from the end of each step to the start of the next.

    A trace does not mark steps on the device. An instruction with as many events as there are steps ran once in each, and the n-th
    events of all such instructions belong to step n.
    """
    runs: dict[str, list[Event]] = collections.defaultdict(list)
    for event in sorted(events, key=lambda event: event.start_ns):
        runs[event.instruction].append(event)
    # Transposed: entry n has the n-th event of every instruction that ran once in a step.
    steps = list(zip(*(events for events in runs.values() if len(events) == num_steps), strict=True))
    ends = [max(event.end_ns for event in step) for step in steps]
    starts = [min(event.start_ns for event in step) for step in steps]
    # One pause fewer than steps: none follows the last.
    return list(zip(ends, starts[1:], strict=False))


def _overlap(some: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    return sum(max(0.0, min(end, until) - max(start, since)) for start, end in some for since, until in others)


def _signal_times(devices: Sequence[_Device], step_ms: float, unit: float) -> tuple[SignalTime, ...]:
    """The rows of all devices together. unit: the nanoseconds, summed over devices and steps, that make one millisecond of the mean."""
    kernels: dict[Origin, float] = collections.defaultdict(float)
    exposed: dict[str, float] = collections.defaultdict(float)
    collectives: dict[str, float] = collections.defaultdict(float)
    for device in devices:
        for origin, time in device.busy.foreground.items():
            kernels[origin] += time / unit
        for origin, time in device.busy.background.items():
            exposed[origin.signal] += time / unit
        for signal, time in device.collectives.items():
            collectives[signal] += time / unit
    rows: list[SignalTime] = []
    for signal in {*(origin.signal for origin in kernels), *exposed}:
        forward, backward, recompute = (kernels[Origin(signal, phase)] for phase in ("forward", "backward", "recompute"))
        rows.append(
            SignalTime(
                signal=signal,
                forward_ms=forward,
                backward_ms=backward,
                recompute_ms=recompute,
                exposed_ms=exposed[signal],
                collectives_ms=collectives[signal],
                share=(forward + backward + recompute + exposed[signal]) / step_ms,
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.share, row.signal)))
