"""metrics.jsonl and experts.jsonl, read back: the rows of a run, and the rows that a restart drops.

A restart trains the steps after its checkpoint again, so their rows are dropped and written once more: the file has each step once. It may
have been cut short by a kill or a full disk, or have been edited. So readers skip whatever is not a row, and bound what they read of it.
Imports neither JAX nor numpy: commands that only read a run use it too.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOADS = "experts.jsonl"
"""The load of each expert over time, for models with experts: of a few hundred steps, since a row may have thousands of numbers."""
_LONGEST_LINE = 1 << 20


def forget_rows_after(path: Path, step: int) -> None:
    """Drops the rows of later steps. Raises OSError."""
    if not path.exists():
        return
    # A rename replaces the file in one step: a restart that is killed here leaves the old file or the new one, never a part.
    new = path.with_name(f"{path.name}.new")
    try:
        with new.open("wb") as file:
            file.writelines(line + b"\n" for line, row in read_metrics(path) if row["step"] <= step)
        new.replace(path)
    except OSError:
        # Without room for a second file: rows ascend, so the later ones are its end.
        with contextlib.suppress(OSError):
            new.unlink()
        os.truncate(path, _end_of(path, step))


def _end_of(path: Path, step: int) -> int:
    """The number of bytes before the first row of a later step."""
    end = 0
    with path.open("rb") as file:
        for line in iter(lambda: file.readline(_LONGEST_LINE), b""):
            row = _row(line)
            if row is not None and row["step"] > step:
                return end
            end += len(line)
    return end


def read_metrics(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines of a metrics file and their contents. Skips lines that are cut short or damaged."""
    with path.open("rb") as file:
        # A longer line is not one that `Records` wrote. It is read in pieces to bound the memory, and each piece fails to parse.
        for line in iter(lambda: file.readline(_LONGEST_LINE), b""):
            if (row := _row(line)) is not None:
                yield line.rstrip(b"\r\n"), row


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None
