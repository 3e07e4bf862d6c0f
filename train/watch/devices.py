"""The lanes of devices in a run's timeline: what they did by signal while a profile was taken, beside the pipeline's plan.

A profile leaves `profile/slices-P.json`, with the work of each device of process P, and `profile/costs-P.json` if there is a pipeline. The
plan is its schedule with these costs, so a stage that differs from it waited, or was slower than usual.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jgt import PipelineConfig
from jgt.document import InputError, bind, read

from ..files.disk import open_file
from ..files.json_text import json_value

_LARGEST = 1 << 26
_PLANNED_PID = 1_000_001
_DEVICES, _STAGES = 2_000_000, 5_000_000
"""The lanes of devices and of planned stages, without their numbers: no lane has the number of another one or of a process."""


class DeviceLanes:
    """The profiled work of a process's devices. begin, end: seconds since 1970, by the process's clock; 0 without a profile."""

    def __init__(self, run: Path, process: int | str):
        self.begin = self.end = 0.0
        self.first = self.last = 0
        self._run, self._slices = run, list[tuple[int, float, float, str, str]]()
        # A file of another version or a damaged one is not a profile.
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, OverflowError):
            with open_file(run / "profile" / f"slices-{process}.json") as file:
                found: Any = json_value(file.read(_LARGEST))
            rows = [(int(device), float(at), float(us), str(signal), str(phase)) for device, at, us, signal, phase in found["slices"]]
            first, last, begin = int(found["first"]), int(found["last"]), float(found["begin"])
            if rows and 0 < begin < 1e11 and all(0 <= at < 1e13 and 0 <= us < 1e13 for _, at, us, _, _ in rows):
                self._slices, self.first, self.last = rows, first, last
                self.begin, self.end = begin + rows[0][1] / 1e6, begin + max(at + us for _, at, us, _, _ in rows) / 1e6
                self._zero = begin

    def events(self, pid: int, zero: float) -> Iterator[dict[str, object]]:
        """The slices of each device. zero: the moment 0 of the timeline, by the process's clock."""
        shift = (self._zero - zero) * 1e6 if self._slices else 0.0
        for device, at, us, signal, phase in self._slices:
            where = {"pid": pid, "tid": _DEVICES + device, "ts": round(at + shift, 1), "dur": us}
            yield {"ph": "X", "name": f"{signal}, {phase}", "cat": signal, **where, "args": {}}
        for device in sorted({row[0] for row in self._slices}):
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": _DEVICES + device, "args": {"name": f"device {device}"}}

    def planned(self, zero: float) -> Iterator[dict[str, object]]:
        """The items of the run's pipeline as its schedule plans them, from the beginning of the profile; none without a pipeline."""
        items, problems = list[tuple[int, str, float, float]](), list[str]()
        with contextlib.suppress(InputError):
            node = read(self._run / "config.yaml").find("pipeline")
            pipeline = bind(node, PipelineConfig, problems) if self._slices and node.value is not None else None
            items += [] if pipeline is None else pipeline.planned(str(self._run))
        for stage, name, start, ms in items:
            at = round((self.begin - zero) * 1e6 + start * 1e3, 1)
            yield {
                "ph": "X",
                "name": name,
                "cat": "plan",
                "pid": _PLANNED_PID,
                "tid": _STAGES + stage,
                "ts": at,
                "dur": round(ms * 1e3, 1),
                "args": {},
            }
        if items:
            yield {"ph": "M", "name": "process_name", "pid": _PLANNED_PID, "args": {"name": "the schedule, planned"}}
            for stage in sorted({item[0] for item in items}):
                yield {"ph": "M", "name": "thread_name", "pid": _PLANNED_PID, "tid": _STAGES + stage, "args": {"name": f"stage {stage}"}}
