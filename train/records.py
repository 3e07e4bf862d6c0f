"""What a run writes about itself: metrics.jsonl, events.jsonl and, where installed, TensorBoard."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train.tensorboard import open_board

_LONGEST_LINE = 1 << 20


class Records:
    """Writes one run's records. Of processes other than the first there are only events, in a file of their own each."""

    def __init__(self, folder: Path, *, process: int = 0):
        self._folder = folder
        self._is_first = process == 0
        self._events = "events.jsonl" if self._is_first else f"events-{process}.jsonl"
        self._board = open_board(folder / "tensorboard") if self._is_first else None
        _end_line(folder / self._events)

    def metrics(self, step: int, values: dict[str, Any]) -> None:
        """Appends a logged step."""
        if not self._is_first:
            return
        # JSON has no NaN and no infinity.
        plain = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        self._append("metrics.jsonl", {"step": step, **plain})
        if self._board is not None:
            self._board.write(step, plain)

    @contextlib.contextmanager
    def phase(self, name: str, **details: Any) -> Iterator[None]:
        """Appends an event with the seconds that a phase (init, compile, save, restore, ...) took."""
        started, clock = time.time(), time.perf_counter()
        yield
        self.event(name, started, time.perf_counter() - clock, **details)

    def event(self, name: str, started: float, seconds: float, **details: Any) -> None:
        """Appends an event."""
        self._append(self._events, {"phase": name, "time": round(started, 3), "seconds": round(seconds, 4), **details})

    def text(self, name: str, text: str) -> None:
        """Writes a text file."""
        if self._is_first:
            (self._folder / name).write_text(text, encoding="utf-8")

    def forget_after(self, step: int) -> None:
        """Drops logged steps after the one that a restart goes on from: they will be written again."""
        if not self._is_first or not (path := self._folder / "metrics.jsonl").exists():
            return
        new = path.with_name(f"{path.name}.new")
        with new.open("wb") as kept:
            kept.writelines(line + b"\n" for line, row in read_metrics(path) if row["step"] <= step)
        new.replace(path)

    def close(self) -> None:
        """Flushes what is buffered."""
        if self._board is not None:
            self._board.close()

    def _append(self, name: str, row: dict[str, Any]) -> None:
        with (self._folder / name).open("a") as file:
            file.write(json.dumps(row) + "\n")


def _end_line(path: Path) -> None:
    """Ends the last line of a file, in which a killed process may have stopped."""
    if path.is_file() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")


def read_metrics(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines of a metrics file and what they hold, without those that were cut short or damaged."""
    with path.open("rb") as file:
        # A line without end is one that nobody wrote here; its parts are none either.
        for line in iter(lambda: file.readline(_LONGEST_LINE), b""):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and type(row.get("step")) is int:
                yield line.rstrip(b"\r\n"), row
