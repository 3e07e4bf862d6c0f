"""Records the trace of a run's steps by JAX's profiler, and writes and prints device time by signal."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

from jgt.plan.hlo import Module
from jgt.profile.events import read_trace
from jgt.profile.signals import Profile, profile
from train.console import Screen
from train.folder import PROFILE
from train.profile.steps import Steps

TABLE = "signals.json"
ANNOTATION = "train"
"""Of a step, in the trace."""
COLUMNS = ["signal", "forward", "backward", "recompute", "exposed", "sum", "share", "collectives"]


class Profiler:
    """The profile of one run, of no steps maybe. Close it."""

    def __init__(self, steps: Steps | None, run: Path, process: int, screen: Screen):
        self._steps, self._screen, self._is_first = steps, screen, process == 0
        # Processes on one machine would write to one file.
        self._folder = run / PROFILE if process == 0 else run / PROFILE / f"process-{process}"
        self._before: set[Path] = set()
        self._tracing = False

    def check(self, done: int) -> None:
        """Raises InputError where a start that goes on after `done` steps does not train these."""
        if self._steps is not None:
            self._steps.check(done)

    def begins(self, step: int) -> bool:
        """Whether the trace begins with this step."""
        return self._steps is not None and step == self._steps.first

    def ends(self, step: int) -> bool:
        """Whether it ends with this step, at the latest."""
        return self._tracing and self._steps is not None and step >= self._steps.last

    @property
    def tracing(self) -> bool:
        """Whether a trace is under way."""
        return self._tracing

    def start(self) -> None:
        """Begins the trace; call it when no step is under way."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._before = set(self._traces())
        options = jax.profiler.ProfileOptions()
        # Every call of Python would be an event, and slow the host down.
        options.python_tracer_level = 0
        jax.profiler.start_trace(str(self._folder), profiler_options=options)
        self._tracing = True

    def around(self, step: int) -> AbstractContextManager[Any]:
        """Around the dispatch of a step, which has its number in the trace."""
        return jax.profiler.StepTraceAnnotation(ANNOTATION, step_num=step) if self._tracing else contextlib.nullcontext()

    def finish(self, done: int, text: str, known: Iterable[str]) -> None:
        """Ends the trace after step `done`, and says what is in it; call it when no step is under way.

        text: of the compiled step; known: the whole names of signals.
        """
        self.close()
        new = [path for path in self._traces() if path not in self._before]
        if not self._is_first or not new or self._steps is None:
            return
        (file,), first = new, self._steps.first
        found = profile(read_trace(file, ANNOTATION), Module.of(text), done + 1 - first, known)
        title = f"Profile of steps {first} to {done}"
        if found is None:
            self._screen.say(f"{title}: no device tells in {file} what it did")
            return
        table = self._folder / TABLE
        table.write_text(json.dumps({"first": first, "last": done, "trace": str(file.relative_to(self._folder)), **found.to_json()}, indent=1) + "\n")
        self._screen.table(f"{title}: milliseconds of a device in a step", COLUMNS, list(rows(found)), numbers=len(COLUMNS) - 1)
        self._screen.say(f"Written to {table}; the trace for XProf and TensorBoard, and one for Perfetto (.json.gz), to {file.parent}")

    def close(self) -> None:
        """Ends the trace if one is under way; a run goes on when it cannot be written."""
        if self._tracing:
            self._tracing = False
            try:
                jax.profiler.stop_trace()
            except (OSError, RuntimeError) as error:
                print(f"jgt: the profile could not be written: {error}", file=sys.stderr)

    def _traces(self) -> Iterator[Path]:
        return self._folder.glob("plugins/profile/*/*.xplane.pb")


def rows(found: Profile) -> Iterator[list[str]]:
    """The table for a person: signals and idle time, which add up to the step."""
    for row in found.signals:
        kernels = (row.forward_ms, row.backward_ms, row.recompute_ms, row.exposed_ms)
        yield [row.signal, *map(_ms, kernels), _ms(sum(kernels)), f"{row.share:.1%}", _ms(row.collectives_ms)]
    idle = (
        ("idle within a step", found.idle_ms - found.between_ms),
        ("idle between steps", found.between_ms - found.late_ms),
        ("idle, the host is late", found.late_ms),
    )
    for name, ms in (*idle, ("step", found.step_ms)):
        yield [name, "", "", "", "", f"{ms:.2f}", f"{ms / found.step_ms:.1%}", ""]


def _ms(ms: float) -> str:
    return f"{ms:.2f}" if ms else ""
