"""The files that a run writes about itself: metrics.jsonl, events.jsonl, experts.jsonl, and the metrics of its loggers (`loggers.py`).

A run can be killed at any moment, so every record is appended and the file closed at once: a killed process loses at most the record that
it was writing. A record may also be impossible to write, because the disk is full or fails. So each file is a sink (`train.sink`): the
record is then lost as a whole, and the run goes on. Readers skip lines that are not valid JSON.

Metrics and events have different histories. A restart trains the steps after its checkpoint again, so their metrics are
dropped and written once more: metrics.jsonl has each step once. Events are what really happened, the lost steps included, and
are never dropped. Process 0 writes everything; the others write only their events, each into a file of its own.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..report.rows import LOADS, forget_rows_after
from ..sink import AppendedFile, Sink
from .loggers import Logger


class Records:
    """Writes the records of one process into the run directory. No method raises an error of the disk.

    loggers: get the metrics too; only process 0 has any.
    """

    def __init__(self, folder: Path, *, process: int = 0, loggers: Sequence[Logger] = ()):
        self._folder, self._loggers = folder, loggers
        # The metrics are the same on all processes.
        self._is_first = process == 0
        self._metrics = _lines(folder / "metrics.jsonl")
        self._events = _lines(folder / ("events.jsonl" if self._is_first else f"events-{process}.jsonl"))
        self._loads = _lines(folder / LOADS)
        self._sample = Sink("sample.txt", AppendedFile(folder / "sample.txt"))

    @property
    def lost(self) -> dict[str, int]:
        """The number of lost records of each sink that lost any."""
        sinks = [self._metrics, self._events, self._loads, self._sample, *(logger.sink for logger in self._loggers)]
        return {sink.name: sink.lost for sink in sinks if sink.lost}

    def metrics(self, step: int, values: dict[str, Any]) -> None:
        """Appends the metrics of a step, to metrics.jsonl and for all loggers."""
        if not self._is_first:
            return
        # JSON has no NaN and no infinity.
        plain = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        self._metrics.put(_line({"step": step, **plain}))
        for logger in self._loggers:
            logger.add(step, plain)

    def loads(self, step: int, loads: Sequence[Sequence[float]]) -> None:
        """Appends the load of each expert, by layer, to experts.jsonl."""
        if self._is_first:
            plain = [[round(x, 3) if math.isfinite(x) else None for x in layer] for layer in loads]
            self._loads.put(_line({"step": step, "load": plain}))

    @contextlib.contextmanager
    def phase(self, name: str, **details: Any) -> Iterator[None]:
        """Appends an event with the seconds that the phase inside took, such as init, compile, save or restore."""
        started, clock = time.time(), time.perf_counter()
        yield
        self.event(name, started, time.perf_counter() - clock, **details)

    def event(self, name: str, started: float, seconds: float, **details: Any) -> None:
        """Appends an event. started: seconds since 1970."""
        self._events.put(_line({"phase": name, "time": round(started, 3), "seconds": round(seconds, 4), **details}))

    def text(self, name: str, text: str) -> None:
        """Writes a text file into the run directory; process 0 only."""
        if self._is_first:
            self._sample.attempt(lambda: _write_text(self._folder / name, text))

    def forget_after(self, step: int) -> None:
        """Drops the metrics of later steps than the one that a restart resumes from: they will be written again."""
        if self._is_first:
            self._metrics.attempt(lambda: forget_rows_after(self._folder / "metrics.jsonl", step))
            self._loads.attempt(lambda: forget_rows_after(self._folder / LOADS, step))
        for logger in self._loggers:
            logger.forget_after(step)

    def close(self) -> None:
        """No more metrics will come. Waits for services, but not for ever."""
        for logger in self._loggers:
            logger.close()


def _lines(path: Path) -> Sink:
    return Sink(path.name, AppendedFile(path))


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
