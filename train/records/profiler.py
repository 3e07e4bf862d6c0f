"""Traces some steps of a run with JAX's profiler, and reports the device time of each signal.

Steps are dispatched ahead of the devices, so the training loop waits for the devices before it calls `start` and `finish`. In between,
each dispatch is annotated with its step's number, which is how the report can say when the host was late.
`jgt.planner.profile` reads the trace; here it becomes a table for a person and `signals.json` for a program. A trace that cannot be
written costs the report, never the run.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np

from jgt.planner import Profile

from ..files.disk import write_whole
from ..files.streams import say
from ..setup import Setup
from .console import Screen
from .step_range import PROFILE, StepRange

_SIGNALS_FILE = "signals.json"
_TRIAL, _TRIAL_SECONDS = "trial", 60.0
"""The file that exists while a profile that the run was asked for may still end its process: JAX's issues 40260 and 15384."""
_MOST_SLICES = 200_000
_ANNOTATION = "train"
"""The name of a step's dispatch in the trace."""
_COLUMNS = ["signal", "forward", "backward", "recompute", "exposed", "sum", "share", "collectives"]


class Profiler:
    """The profiler of one run, which does nothing if `steps` is None. Close it."""

    def __init__(self, steps: StepRange | None, run: Path, process: int, screen: Screen):
        self._steps, self._screen, self._is_first = steps, screen, process == 0
        # JAX names a trace by host and second: processes on one machine would write to the same file.
        self._folder = run / PROFILE if process == 0 else run / PROFILE / f"process-{process}"
        self._costs = run / PROFILE / f"costs-{process}.json"
        self._slices, self._begun = run / PROFILE / f"slices-{process}.json", 0.0
        # JAX 0.10 can begin no other trace in a process after one that it could not write. Nothing else writes to this folder.
        self._unfinished = self._folder / ".unfinished"
        self._trace: Path | None = None
        self.tracing = False
        """Whether a trace is running."""
        self._mark, self._known_until = run / PROFILE / _TRIAL, 0.0
        self._is_refused = self._mark.exists()
        """Whether an earlier start died soon after a profile that it was asked for."""

    def _request(self, step: int) -> None:
        """Profiles this step, unless a trace is running, or profiles end the process. No timer does so: a profile may end a run on GPUs."""
        if self._is_refused:
            why = f"a process died within {_TRIAL_SECONDS:.0f} s of the last one. To try again, remove {self._mark} and restart the run"
            say(f"the request for a profile is ignored: {why}")
        elif not self.tracing:
            self._steps = StepRange(first=step, last=step)
            if self._is_first:
                self._known_until = time.monotonic() + _TRIAL_SECONDS
                with contextlib.suppress(OSError):
                    self._mark.parent.mkdir(parents=True, exist_ok=True)
                    self._mark.touch()

    def poll(self) -> None:
        """Notes that the process has outlived its last profile."""
        if self._known_until and time.monotonic() > self._known_until:
            self._forget()

    def _forget(self) -> None:
        self._known_until = 0.0
        with contextlib.suppress(OSError):
            self._mark.unlink()

    def check(self, done: int, total: int) -> None:
        """Raises InputError if a run of `total` steps that resumes after `done` of them does not train the steps to profile."""
        if self._steps is not None:
            self._steps.check(done, total)

    def begins(self, step: int, *, is_asked_for: bool = False) -> bool:
        """Whether the trace begins with this step, as that of one step does that the run is asked for."""
        if is_asked_for:
            self._request(step)
        return self._steps is not None and step == self._steps.first

    def ends(self, step: int) -> bool:
        """Whether the trace is running and has to end with this step."""
        return self.tracing and self._steps is not None and step >= self._steps.last

    def start(self) -> None:
        """Begins the trace. No step may be running."""
        options = jax.profiler.ProfileOptions()
        # Otherwise every call of a Python function would be an event, and slow the host down.
        options.python_tracer_level = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self._unfinished, ignore_errors=True)
            self._unfinished.mkdir()
            jax.profiler.start_trace(str(self._unfinished), profiler_options=options)
            self.tracing, self._begun, self._trace = True, time.time(), None
        except (OSError, RuntimeError) as error:
            say(f"the profile could not be begun: {error}")

    def around(self, step: int) -> AbstractContextManager[object]:
        """A context for the dispatch of a step, which marks it in the trace with the step's number."""
        return jax.profiler.StepTraceAnnotation(_ANNOTATION, step_num=step) if self.tracing else contextlib.nullcontext()

    def finish(self, done: int, text: str, known_signals: Iterable[str], stages: Mapping[str, object] | None = None) -> None:
        """Ends the trace after step `done` and reports it. No step may be running.

        text: the compiled step; known_signals: the full paths of the model's signals. stages: the layers of a pipeline, whose costs are
        stored too.
        """
        self.close()
        file = self._trace
        if file is None or self._steps is None:
            return
        if stages is not None:
            self._store_costs(file, text, done + 1 - self._steps.first, stages)
        self._store_slices(file, text, known_signals, done)
        if not self._is_first:
            return
        first = self._steps.first
        try:
            profile = Profile.read(file, _ANNOTATION, text, done + 1 - first, known_signals)
        # A trace of another version of JAX, or one that the disk cut short, may fail anywhere.
        except Exception as error:
            say(f"the profile {file} could not be read: {type(error).__name__}: {error}")
            return
        title = f"Profile of steps {first} to {done}"
        if profile is None:
            self._screen.say(f"{title}: the trace {file} contains no device work of the training step")
            return
        table = self._folder / _SIGNALS_FILE
        report = {"first": first, "last": done, "trace": str(file.relative_to(self._folder)), **asdict(profile)}
        try:
            write_whole(table, json.dumps(report, indent=1) + "\n")
        except OSError as error:
            say(f"{table} cannot be written: {error.strerror or error}")
        self._screen.table(f"{title}: milliseconds per device and step", _COLUMNS, list(_rows(profile)), numbers=len(_COLUMNS) - 1)
        self._screen.say(f"Table written to {table}; traces for XProf or TensorBoard, and for Perfetto (.json.gz), to {file.parent}")

    def _store_costs(self, trace: Path, text: str, num_steps: int, stages: Mapping[str, object]) -> None:
        """Writes the costs of this process's layers, which `pipeline.costs` and `jgt schedule --costs` read."""
        try:
            costs = Profile.read_layers(trace, _ANNOTATION, text, num_steps, stages)
            if costs is not None:
                write_whole(self._costs, json.dumps(asdict(costs), indent=1) + "\n")
        # As below: a trace may fail anywhere, and so may the disk.
        except Exception as error:
            say(f"the costs of layers could not be read from {trace}: {type(error).__name__}: {error}")

    def _store_slices(self, trace: Path, text: str, known_signals: Iterable[str], done: int) -> None:
        """Writes what this process's devices did, by signal, which `jgt trace` shows."""
        with contextlib.suppress(Exception):
            slices = Profile.read_slices(trace, _ANNOTATION, text, known_signals)[:_MOST_SLICES]
            steps = {"first": self._steps and self._steps.first, "last": done}
            write_whole(self._slices, json.dumps({"begin": self._begun, **steps, "slices": slices}) + "\n")

    def close(self) -> None:
        """Ends the trace if one is running. Failing to write it does not stop the run."""
        if self._known_until and not self.tracing:
            self._forget()
        if self.tracing:
            # First: whatever fails below, the trace is not ended a second time.
            self.tracing = False
            try:
                jax.profiler.stop_trace()
                self._trace = self._moved()
            except (OSError, RuntimeError) as error:
                say(f"the profile could not be written: {error}")

    def _moved(self) -> Path | None:
        """The trace that has just been written, in the folder where the viewers look for it; None if there is none."""
        # JAX writes one trace per process and recording, in a folder that is named by the time.
        for folder in self._unfinished.glob("plugins/profile/*"):
            target = self._folder / folder.relative_to(self._unfinished)
            target.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(target)
            shutil.rmtree(self._unfinished, ignore_errors=True)
            return next(target.glob("*.xplane.pb"), None)
        return None


def layers_of_devices(setup: Setup) -> dict[str, object] | None:
    """The layers of a run's pipeline, for `Profile.read_layers`; None if it cannot measure them: chunks or weight gradients are apart."""
    pipeline, mesh = setup.run.pipeline, setup.mesh
    table = None if pipeline is None else pipeline.table(mesh.shape[pipeline.axis])
    if table is None or pipeline is None or table.virtual > 1 or table.weight is not None:
        return None
    under = f"{pipeline.signal}/"
    num_layers = [p.shape[0] for p in setup.storage.model.parameters if any(f"{name}/".startswith(under) for name in p.signals)]
    if not num_layers:
        return None
    sizes, axis, devices = pipeline.sizes(table, num_layers[0]), list(mesh.axis_names).index(pipeline.axis), dict[int, object]()
    local = {device: number for number, device in enumerate(jax.local_devices())}
    for place, device in np.ndenumerate(mesh.devices):
        if device in local:
            chunk = table.stages.index(place[axis])
            layers = range(sum(sizes[:chunk]), sum(sizes[: chunk + 1]))
            counts = {"forward": table.counts(place[axis], "F"), "backward": table.counts(place[axis], "B")}
            devices[local[device]] = {"stage": place[axis], "layers": layers, "most": max(sizes), **counts}
    return {
        "signal": pipeline.signal,
        "microbatches": pipeline.microbatches,
        "parts": setup.run.config.train.accumulate,
        "by_stage": pipeline.remat == "stage",
        "devices": devices,
    }


def _rows(profile: Profile) -> Iterator[list[str]]:
    """The table's rows: signals and three kinds of idle time, which add up to the last row, the step."""
    for row in profile.signals:
        times = (row.forward_ms, row.backward_ms, row.recompute_ms, row.exposed_ms)
        yield [row.signal, *map(_ms, times), _ms(sum(times)), f"{row.share:.1%}", _ms(row.collectives_ms)]
    idle = (
        ("idle within steps", profile.idle_ms - profile.between_ms),
        ("idle between steps", profile.between_ms - profile.late_ms),
        ("idle, host is late", profile.late_ms),
    )
    for name, ms in (*idle, ("step", profile.step_ms)):
        yield [name, "", "", "", "", f"{ms:.2f}", f"{ms / profile.step_ms:.1%}", ""]


def _ms(ms: float) -> str:
    return f"{ms:.2f}" if ms else ""
