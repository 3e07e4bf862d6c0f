"""What a profiler trace holds of the devices: which instruction of which program each of them ran, and when it was asked to.

The forms are those of XLA's profilers. A GPU has a plane of its own with a line for each stream, and a kernel names its innermost
instruction (xla/backends/profiler/gpu/cupti_collector.cc). The parts of a program on CPU devices stand on the host's lines, that of
the thread that began each of them; another thread may end it, in an event `end: NAME` that is linked to the first by a number
(xla/backends/cpu/runtime/thunk_executor.cc).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

_GPU = re.compile(r"/device:GPU:(\d+)")
_STREAM = "Stream #"
_WORK = {"hlo_op", "kernel_details", "memcpy_details", "memset_details", "cuda_graph_exec_id"}
"""What a stream's events have one of, if they are work; others tell of memory."""
_END = "end: "


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """A device, by its number in this process, at work; from start_ns to end_ns by the trace's clock.

    program, instruction: their names, empty where the trace does not tell (copies that no program asked for, parts of command
    buffers). may_contain: what a loop or a call runs has events of its own inside of it.
    """

    device: int
    program: str
    instruction: str
    start_ns: float
    end_ns: float
    may_contain: bool = False


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The events of the devices, and by step when the host was done with asking for it (nanoseconds)."""

    events: tuple[Event, ...]
    dispatched: Mapping[int, float]


def read_trace(path: Path, annotation: str) -> Trace:
    """From a trace's file (`.xplane.pb`). annotation: the name of the StepTraceAnnotation around the call of each step."""
    return trace_of(ProfileData.from_file(str(path)).planes, annotation)


def trace_of(planes: Iterable[Any], annotation: str) -> Trace:
    """From the planes of a trace; the events are those of GPUs where there are any, else those of CPU devices."""
    with warnings.catch_warnings():
        # The types of jaxlib's reader lack a name that Python wants of them, and a warning that is an error ends the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        planes = list(planes)
        host = [event for plane in planes if plane.name == "/host:CPU" for line in plane.lines for event in line.events]
        calls = [(event, dict(event.stats)) for event in host if event.name == annotation]
        dispatched = {int(stats["step_num"]): event.start_ns + event.duration_ns for event, stats in calls if "step_num" in stats}
        return Trace(events=tuple(_events(planes, host)), dispatched=dispatched)


def _events(planes: Sequence[Any], host: Sequence[Any]) -> Iterator[Event]:
    gpus = [(int(found[1]), plane) for plane in planes if (found := _GPU.fullmatch(plane.name))]
    for device, plane in gpus:
        yield from _on_gpu(device, plane)
    if not gpus:
        yield from _on_cpu(host)


def _on_gpu(device: int, plane: Any) -> Iterator[Event]:
    for line in plane.lines:
        for event in line.events if line.name.startswith(_STREAM) else ():
            stats = dict(event.stats)
            if _WORK & stats.keys():
                yield _event(device, stats, event.start_ns, event.start_ns + event.duration_ns)


def _on_cpu(events: Iterable[Any]) -> Iterator[Event]:
    begun: list[tuple[float, float, dict[str, Any]]] = []
    ends: dict[Any, float] = {}
    for event in events:
        stats, end = dict(event.stats), event.start_ns + event.duration_ns
        if event.name.startswith(_END):
            ends[stats.get("_c")] = end
        elif "hlo_op" in stats:
            begun.append((event.start_ns, end, stats))
    for start, end, stats in begun:
        yield _event(int(stats.get("device_ordinal", 0)), stats, start, max(end, ends.get(stats.get("_p"), end)), may_contain=True)


def _event(device: int, stats: dict[str, Any], start_ns: float, end_ns: float, *, may_contain: bool = False) -> Event:
    program, instruction = (str(stats.get(name, "")) for name in ("hlo_module", "hlo_op"))
    return Event(device=device, program=program, instruction=instruction, start_ns=start_ns, end_ns=end_ns, may_contain=may_contain)
