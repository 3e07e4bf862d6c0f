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


class Records:
    """Writes one run's records; on processes other than the first, nothing."""

    def __init__(self, folder: Path, *, enabled: bool):
        self._folder = folder if enabled else None
        self._board = open_board(folder / "tensorboard") if enabled else None

    def metrics(self, step: int, values: dict[str, Any]) -> None:
        """Appends a logged step."""
        # JSON has no NaN and no infinity.
        plain = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        self._append("metrics.jsonl", {"step": step, **plain})
        if self._board is not None:
            self._board.write(step, plain)

    @contextlib.contextmanager
    def phase(self, name: str, **details: Any) -> Iterator[None]:
        """Appends an event with the seconds that a phase (init, compile, step, save, restore) took."""
        started, clock = time.time(), time.perf_counter()
        yield
        self.event(name, started, time.perf_counter() - clock, **details)

    def event(self, name: str, started: float, seconds: float, **details: Any) -> None:
        """Appends an event."""
        self._append("events.jsonl", {"phase": name, "time": round(started, 3), "seconds": round(seconds, 4), **details})

    def text(self, name: str, text: str) -> None:
        """Writes a text file."""
        if self._folder is not None:
            (self._folder / name).write_text(text, encoding="utf-8")

    def forget_after(self, step: int) -> None:
        """Drops logged steps after the one that a restart goes on from: they will be written again."""
        if self._folder is None or not (path := self._folder / "metrics.jsonl").exists():
            return
        kept = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
        new = path.with_name(f"{path.name}.new")
        new.write_text("".join(f"{line}\n" for line in kept))
        new.replace(path)

    def close(self) -> None:
        """Flushes what is buffered."""
        if self._board is not None:
            self._board.close()

    def _append(self, name: str, row: dict[str, Any]) -> None:
        if self._folder is not None:
            with (self._folder / name).open("a") as file:
                file.write(json.dumps(row) + "\n")


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):
        return float("inf")
