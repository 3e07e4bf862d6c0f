"""Device time by signal: a trace's events, each with the signal that the compiled program's text gives its instruction."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jgt.plan.collectives import is_collective
from jgt.plan.hlo import Module
from jgt.plan.kernels import CONTROL
from jgt.plan.neighbours import belongs
from jgt.plan.signals import Homes
from jgt.profile.events import Event, Trace
from jgt.profile.spans import Key, Shares, Span, shares

OTHER = "(other)"
"""The row of what is no instruction of the program: other programs, copies to and from the host, kernels without a name."""


@dataclass(frozen=True, kw_only=True)
class SignalTime:
    """A signal's time in milliseconds, of one device and step.

    forward_ms, backward_ms, recompute_ms: in which its kernels ran; where several ran at once, an equal part of it. exposed_ms: in
    which nothing but its collectives did (of OTHER: nothing but that). collectives_ms: from their starts to their ends, hidden or not.
    share: of the step, collectives that are hidden left out.
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
    """One device: milliseconds a step, and those in which it ran nothing.

    between_ms: the part of idle_ms between two steps; late_ms: the part of that in which the host had not yet asked for the next one.
    """

    device: int
    step_ms: float
    idle_ms: float
    between_ms: float
    late_ms: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Steps as they ran, from the start of the first to the end of the last: the mean of the devices of this process.

    signals: the longest first; with idle_ms they add up to step_ms. The rest as in `DeviceTime`.
    """

    num_steps: int
    step_ms: float
    idle_ms: float
    between_ms: float
    late_ms: float
    signals: tuple[SignalTime, ...]
    devices: tuple[DeviceTime, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def profile(trace: Trace, module: Module, num_steps: int, known: Iterable[str]) -> Profile | None:
    """The profile of a compiled program that ran `num_steps` times; None where no event is of it.

    known: whole names of signals, for what JAX keeps only the end of.
    """
    # Without the first: before it the trace began.
    asked = [trace.dispatched[step] for step in sorted(trace.dispatched)][1:]
    by_device: dict[int, list[Event]] = collections.defaultdict(list)
    for event in trace.events:
        by_device[event.device].append(event)
    reader = _Reader(module, Homes(set(known)))
    found = [reader.device(device, by_device[device], num_steps, asked) for device in sorted(by_device)]
    devices = [one for one in found if one is not None]
    if not devices:
        return None
    times = [one.time for one in devices]
    step_ms = statistics.fmean(time.step_ms for time in times)
    return Profile(
        num_steps=num_steps,
        step_ms=step_ms,
        idle_ms=statistics.fmean(time.idle_ms for time in times),
        between_ms=statistics.fmean(time.between_ms for time in times),
        late_ms=statistics.fmean(time.late_ms for time in times),
        signals=_rows(devices, step_ms, len(devices) * num_steps * 1e6),
        devices=tuple(times),
    )


@dataclass(frozen=True, kw_only=True)
class _Device:
    time: DeviceTime
    shares: Shares
    collectives: dict[str, float]
    """Nanoseconds by signal."""


class _Reader:
    def __init__(self, module: Module, homes: Homes):
        self._module, self._homes = module, homes
        self._spans: dict[str, tuple[Key, bool]] = {}

    def device(self, device: int, events: Sequence[Event], num_steps: int, asked: Sequence[float]) -> _Device | None:
        """One device's events; None where none is the program's."""
        events = [event for event in events if not self._contains(event)]
        own = [event for event in events if self._is_own(event)]
        if not own:
            return None
        begin, end = min(event.start_ns for event in own), max(event.end_ns for event in own)
        spans, collectives = [], collections.defaultdict[str, float](float)
        for event in events:
            (signal, phase), beside = self._told(event.instruction) if self._is_own(event) else ((OTHER, "forward"), True)
            start, stop = max(event.start_ns, begin), min(event.end_ns, end)
            if start < stop:
                spans.append(Span(start, stop, (signal, phase), beside))
                if beside and signal != OTHER:
                    collectives[signal] += stop - start
        found = shares(spans)
        per_step = num_steps * 1e6
        pauses = _pauses(own, num_steps)
        # Where the host is in time it asked before the pause began.
        late = [(start, min(end, by)) for (start, end), by in zip(pauses, asked, strict=False)]
        time = DeviceTime(
            device=device,
            step_ms=(end - begin) / per_step,
            idle_ms=found.idle / per_step,
            between_ms=_common(found.gaps, pauses) / per_step,
            late_ms=_common(found.gaps, late) / per_step,
        )
        return _Device(time=time, shares=found, collectives=collectives)

    def _is_own(self, event: Event) -> bool:
        return event.program in ("", self._module.name) and event.instruction in self._module.spots

    def _contains(self, event: Event) -> bool:
        """Whether what runs is in other events."""
        return event.may_contain and self._is_own(event) and self._module.at(self._module.spots[event.instruction]).op in CONTROL

    def _told(self, name: str) -> tuple[Key, bool]:
        """Signal and phase of an instruction, and whether it is a collective."""
        if name not in self._spans:
            spot = self._module.spots[name]
            signal, phase = belongs(self._module, spot)
            self._spans[name] = (self._homes.of(signal), phase), is_collective(self._module, self._module.at(spot))
        return self._spans[name]


def _pauses(own: Sequence[Event], num_steps: int) -> list[tuple[float, float]]:
    """From the end of each step to the start of the next one, told by the instructions that run once in each."""
    runs: dict[str, list[Event]] = collections.defaultdict(list)
    for event in sorted(own, key=lambda event: event.start_ns):
        runs[event.instruction].append(event)
    steps = list(zip(*(found for found in runs.values() if len(found) == num_steps), strict=True))
    ends = [max(event.end_ns for event in step) for step in steps]
    starts = [min(event.start_ns for event in step) for step in steps]
    return list(zip(ends, starts[1:], strict=False))


def _common(some: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """How much of spans is in others too."""
    return sum(max(0.0, min(end, until) - max(start, since)) for start, end in some for since, until in others)


def _rows(devices: Sequence[_Device], step_ms: float, unit: float) -> tuple[SignalTime, ...]:
    own: dict[Key, float] = collections.defaultdict(float)
    alone: dict[str, float] = collections.defaultdict(float)
    collectives: dict[str, float] = collections.defaultdict(float)
    for device in devices:
        for key, time in device.shares.own.items():
            own[key] += time / unit
        for (signal, _), time in device.shares.alone.items():
            alone[signal] += time / unit
        for signal, time in device.collectives.items():
            collectives[signal] += time / unit
    rows = []
    for signal in {*(signal for signal, _ in own), *alone}:
        forward, backward, recompute = (own[signal, phase] for phase in ("forward", "backward", "recompute"))
        rows.append(
            SignalTime(
                signal=signal,
                forward_ms=forward,
                backward_ms=backward,
                recompute_ms=recompute,
                exposed_ms=alone[signal],
                collectives_ms=collectives[signal],
                share=(forward + backward + recompute + alone[signal]) / step_ms,
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.share, row.signal)))
