"""The events of a profiler trace: which instruction of which program each device ran, and when the host asked for it.

A trace (`.xplane.pb`) has planes, planes have lines, and lines have events with a name, times and stats. XLA writes device work in two
forms (https://github.com/openxla/xla, files in brackets):

    GPU   plane `/device:GPU:0`, a line `Stream #7(...)` for each CUDA stream, an event for each kernel, with the stats
          hlo_module=jit_step, hlo_op=all-reduce.2 (its innermost instruction), and one that says what kind of work it is
          (backends/profiler/gpu/cupti_collector.cc)
    CPU   plane `/host:CPU`, a line for each host thread, an event for each instruction, with the same two stats, device_ordinal=0
          and a number `_p`. If another thread ends the instruction, there is an event `end: all-reduce.2` with the same number as `_c`
          (backends/cpu/runtime/thunk_executor.cc)

Events of a CPU's loops and calls contain the events of what they run; on a GPU they do not exist. The host's plane also has an event for
each call of a step, which ends when the host has dispatched the step.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData  # pyright: ignore[reportUnknownVariableType] - jaxlib ships no types for it

Raw = Any
"""A plane or an event as jaxlib's reader returns it, which has no types. The stats of an event are (name, value)."""

_GPU = re.compile(r"/device:GPU:(\d+)")
_STREAM = "Stream #"
_WORK = {"hlo_op", "kernel_details", "memcpy_details", "memset_details", "cuda_graph_exec_id"}
"""Every event that is work has at least one of these stats. Other events, such as allocations, take no device time."""
_END = "end: "
"""How the name of an event begins that ends an instruction on another thread than the one that began it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Work of a device, given by its number in this process, from start_ns to end_ns on the trace's clock.

    program, instruction: their names; empty if the trace lacks them (copies outside any program, parts of CUDA graphs). may_contain:
    whether a loop or a call contains the events of what it runs.
    """

    device: int
    program: str
    instruction: str
    start_ns: float
    end_ns: float
    may_contain: bool = False


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The events of all devices, and for each step's number the time (in nanoseconds) at which the host had dispatched it."""

    events: tuple[Event, ...]
    dispatched: Mapping[int, float]


def read_trace(path: Path, annotation: str) -> Trace:
    """Reads a trace's file (`.xplane.pb`). annotation: the name of the StepTraceAnnotation around the call of each step."""
    return trace_of(ProfileData.from_file(str(path)).planes, annotation)  # pyright: ignore[reportUnknownArgumentType]


def trace_of(planes: Iterable[Raw], annotation: str) -> Trace:
    """Reads the planes of a trace, with the events of its GPUs or, if there are none, of its CPU devices."""
    with warnings.catch_warnings():
        # Python warns that jaxlib's types lack a __module__. If warnings are errors, that would end the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        planes = list(planes)
        host = [event for plane in planes if plane.name == "/host:CPU" for line in plane.lines for event in line.events]
        calls = [(event, dict(event.stats)) for event in host if event.name == annotation]
        dispatched = {int(stats["step_num"]): event.start_ns + event.duration_ns for event, stats in calls if "step_num" in stats}
        return Trace(events=tuple(_events(planes, host)), dispatched=dispatched)


def _events(planes: Sequence[Raw], host: Sequence[Raw]) -> Iterator[Event]:
    gpus = [(int(found[1]), plane) for plane in planes if (found := _GPU.fullmatch(plane.name))]
    for device, plane in gpus:
        yield from _on_gpu(device, plane)
    if not gpus:
        yield from _on_cpu(host)


def _on_gpu(device: int, plane: Raw) -> Iterator[Event]:
    # Lines other than streams, such as `XLA Ops`, show the same work a second time.
    for line in plane.lines:
        for event in line.events if line.name.startswith(_STREAM) else ():
            stats = dict(event.stats)
            if _WORK & stats.keys():
                yield _event(device, stats, event.start_ns, event.start_ns + event.duration_ns)


def _on_cpu(events: Iterable[Raw]) -> Iterator[Event]:
    begun: list[tuple[float, float, dict[str, Any]]] = []
    ends: dict[object, float] = {}
    for event in events:
        stats, end = dict(event.stats), event.start_ns + event.duration_ns
        if event.name.startswith(_END):
            ends[stats.get("_c")] = end
        # Host threads have many other events: of Python, of the runtime, of compilation.
        elif "hlo_op" in stats:
            begun.append((event.start_ns, end, stats))
    # Only now: the thread with an end may come earlier in the trace than the one with the beginning.
    for start, end, stats in begun:
        yield _event(int(stats.get("device_ordinal", 0)), stats, start, max(end, ends.get(stats.get("_p"), end)), may_contain=True)


def _event(device: int, stats: Mapping[str, object], start_ns: float, end_ns: float, *, may_contain: bool = False) -> Event:
    program, instruction = (str(stats.get(name, "")) for name in ("hlo_module", "hlo_op"))
    return Event(device=device, program=program, instruction=instruction, start_ns=start_ns, end_ns=end_ns, may_contain=may_contain)
