"""JSON that someone else may have written or a kill may have cut short: one reader, whose only error is ValueError."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .disk import open_file

LONGEST_LINE = 1 << 20
"""The bytes of a line, or of a small file, that a run writes about itself. A longer one is not its own."""


class NestedError(ValueError):
    """JSON that is nested too deeply to be read."""


def json_value(text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value that a JSON text is. pairs: makes a mapping of its keys and values. Raises ValueError, NestedError among them."""
    try:
        return json.loads(text, object_pairs_hook=pairs)
    # Python's parser recurses once per level, and a damaged line may be a hundred thousand open brackets.
    except RecursionError:
        raise NestedError("it is nested too deeply") from None


def read_object(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object that a text is; None if it is anything else."""
    try:
        found = json_value(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def read_object_file(path: Path, most: int = LONGEST_LINE) -> dict[str, Any] | None:
    """The JSON object that a file is; None if it is anything else, or longer than `most` bytes. Raises OSError."""
    with open_file(path) as file:
        return read_object(file.read(most))
