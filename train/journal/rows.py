"""The .jsonl files of a run, read back: metrics.jsonl, experts.jsonl and the events, and the rows that a restart drops.

A file may have been cut short by a kill or a full disk, or have been edited. So readers skip whatever is not an object, and bound what they
read of it. Imports neither JAX nor numpy: commands that only read a run use it too.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jgt import document
from jgt.document import InputError

from ..files.disk import open_file, replaced
from ..files.json_text import LONGEST_LINE, read_object

LOADS = "experts.jsonl"
"""The file with the load of each expert over time. It has a few hundred steps, since a row may have thousands of numbers."""


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a metrics file. Skips lines that are cut short or damaged. Raises OSError."""
    return (row for _, row in read_lines(path) if row is not None and _has_step(row))


def read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """The lines of a file with the objects in them; None for a line that is anything else. Raises OSError."""
    with open_file(path) as file:
        # A longer line is not one that a run wrote. It is read in pieces to bound the memory, and each piece fails to parse.
        for line in iter(lambda: file.readline(LONGEST_LINE), b""):
            yield line, read_object(line)


def read_tail(path: Path, size: int) -> list[dict[str, object]]:
    """The objects in the whole lines of the last `size` bytes of a file. Raises OSError."""
    with open_file(path) as file:
        begin = max(0, os.fstat(file.fileno()).st_size - size)
        # One byte more: the first line is whole only if it begins there.
        file.seek(max(0, begin - 1))
        lines = file.read(size + 1).split(b"\n")
    return [row for line in lines[begin > 0 :] if (row := read_object(line)) is not None]


def forget_rows_after(path: Path, step: int) -> None:
    """Drops the rows of later steps, which a restart trains again: the file has each step once. Raises OSError."""
    if not path.exists():
        return
    try:
        # A restart that is killed here leaves the old file or the new one, never a part.
        with replaced(path, is_of_run=True) as new, new.open("wb") as file:
            file.writelines(line.rstrip() + b"\n" for line, row in read_lines(path) if row and _has_step(row) and row["step"] <= step)
    except OSError:
        # Without room for a second file: steps ascend, so the later rows are the end of the file.
        lines = itertools.takewhile(lambda item: not (item[1] and _has_step(item[1]) and item[1]["step"] > step), read_lines(path))
        os.truncate(path, sum(len(line) for line, _ in lines))


def _has_step(row: Mapping[str, object]) -> bool:
    # Not isinstance: True is an int.
    return type(row.get("step")) is int


def read_config(run: Path) -> Mapping[str, object]:
    """The config of a run's latest start, which may be of another version; empty if it cannot be read."""
    try:
        config = document.read(run / "config.yaml").plain()
    except InputError:
        return {}
    return config if isinstance(config, dict) else {}


def flattened(config: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """The values of nested mappings, with dotted keys."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
