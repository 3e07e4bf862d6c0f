"""The files that a run writes about itself: metrics.jsonl, events.jsonl and, if tensorboardX is installed, TensorBoard's.

A run can be killed at any moment, so every record is one line of JSON that is appended and closed at once: a killed process
loses at most the line that it was writing. That line may end in the middle. The writer therefore first ends an open last
line, so that a restart does not continue inside of it, and readers skip lines that are not valid JSON.

Metrics and events have different histories. A restart trains the steps after its checkpoint again, so their metrics are
dropped and written once more: metrics.jsonl has each step once. Events are what really happened, the lost steps included, and
are never dropped. Process 0 writes everything; the others write only their events, each into a file of its own.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    from tensorboardX import SummaryWriter
except ImportError:
    SummaryWriter = None

_LONGEST_LINE = 1 << 20


class Records:
    """Writes the records of one process into the run directory."""

    def __init__(self, folder: Path, *, process: int = 0):
        self._folder = folder
        # The metrics are the same on all processes.
        self._is_first = process == 0
        self._events = "events.jsonl" if self._is_first else f"events-{process}.jsonl"
        self._board = SummaryWriter(str(folder / "tensorboard")) if self._is_first and SummaryWriter is not None else None
        _end_last_line(folder / self._events)

    def metrics(self, step: int, values: dict[str, Any]) -> None:
        """Appends the metrics of a step, to metrics.jsonl and TensorBoard."""
        if not self._is_first:
            return
        # JSON has no NaN and no infinity.
        plain = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        self._append("metrics.jsonl", {"step": step, **plain})
        if self._board is not None:
            for name, value in plain.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(name, value, step)

    @contextlib.contextmanager
    def phase(self, name: str, **details: Any) -> Iterator[None]:
        """Appends an event with the seconds that the phase inside took, such as init, compile, save or restore."""
        started, clock = time.time(), time.perf_counter()
        yield
        self.event(name, started, time.perf_counter() - clock, **details)

    def event(self, name: str, started: float, seconds: float, **details: Any) -> None:
        """Appends an event. started: seconds since 1970."""
        self._append(self._events, {"phase": name, "time": round(started, 3), "seconds": round(seconds, 4), **details})

    def text(self, name: str, text: str) -> None:
        """Writes a text file into the run directory; process 0 only."""
        if self._is_first:
            (self._folder / name).write_text(text, encoding="utf-8")

    def forget_after(self, step: int) -> None:
        """Drops the metrics of later steps than the one that a restart resumes from: they will be written again."""
        if not self._is_first or not (path := self._folder / "metrics.jsonl").exists():
            return
        # A rename replaces the file in one step: a restart that is killed here leaves the old file or the new one, never a part.
        new = path.with_name(f"{path.name}.new")
        with new.open("wb") as file:
            file.writelines(line + b"\n" for line, row in read_metrics(path) if row["step"] <= step)
        new.replace(path)

    def close(self) -> None:
        """Flushes what TensorBoard's writer has buffered."""
        if self._board is not None:
            self._board.close()

    def _append(self, name: str, row: dict[str, Any]) -> None:
        # Opened and closed each time: the line is with the system at once, and survives the end of the process.
        with (self._folder / name).open("a") as file:
            file.write(json.dumps(row) + "\n")


def _end_last_line(path: Path) -> None:
    """Ends the last line of a file if a killed process left it open."""
    if path.is_file() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")


def read_metrics(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines of a metrics file and their contents. Skips lines that are cut short or damaged."""
    with path.open("rb") as file:
        # A longer line is not one that `Records` wrote. It is read in pieces to bound the memory, and each piece fails to parse.
        for line in iter(lambda: file.readline(_LONGEST_LINE), b""):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and type(row.get("step")) is int:
                yield line.rstrip(b"\r\n"), row
