"""The .jsonl files of a run, read back: metrics.jsonl, experts.jsonl and the events, and the rows that a restart drops.

A file may have been cut short by a kill or a full disk, or have been edited. So readers skip whatever is not an object, and bound what they
read of it. Imports neither JAX nor numpy: commands that only read a run use it too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jgt import document
from jgt.document import InputError

LOADS = "experts.jsonl"
"""The load of each expert over time, for models with experts: of a few hundred steps, since a row may have thousands of numbers."""
_LONGEST_LINE = 1 << 20


def read_metrics(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The rows of a metrics file, each with its line. Skips lines that are cut short or damaged."""
    for line, row in read_lines(path):
        if row is not None and type(row.get("step")) is int:
            yield line.rstrip(b"\r\n"), row


def read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """The lines of a file with the objects in them; None for a line that is anything else. Raises OSError."""
    with path.open("rb") as file:
        # A longer line is not one that a run wrote. It is read in pieces to bound the memory, and each piece fails to parse.
        for line in iter(lambda: file.readline(_LONGEST_LINE), b""):
            yield line, read_object(line)


def read_object(line: bytes) -> dict[str, Any] | None:
    """The JSON object in a line; None if there is anything else."""
    try:
        row = json.loads(line)
    # RecursionError: a damaged line may be a hundred thousand open brackets.
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def forget_rows_after(path: Path, step: int) -> None:
    """Drops the rows of later steps, which a restart trains again: the file has each step once. Raises OSError."""
    if not path.exists():
        return
    end = 0
    for line, row in read_lines(path):
        if row is not None and type(row.get("step")) is int and row["step"] > step:
            # Steps ascend, so the later ones are the end of the file.
            os.truncate(path, end)
            return
        end += len(line)


def read_config(run: Path) -> Mapping[str, Any]:
    """The config of a run's latest start, which may be of another version; empty if it cannot be read."""
    try:
        config = document.read(run / "config.yaml").plain()
    except InputError:
        return {}
    return config if isinstance(config, dict) else {}


def flattened(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings, with dotted keys."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
