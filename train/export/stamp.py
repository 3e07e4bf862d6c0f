"""The stamp of an export: which run has written it, of which checkpoint, and the size and checksum of each of its files.

A folder in the place of an export may be another run's, of a step that the run has gone back behind, or damaged. Its name does not say
so. A start therefore reads the stamp before it takes a folder for its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint import manifest
from ..checkpoint.bucket_steps import SavedStep
from ..checkpoint.contents import file_entries
from ..checkpoint.manifest import BrokenError, sealed
from ..files.disk import write_whole
from ..files.json_text import read_object_file

STAMP = "export.json"
"""The file in the folder of an export."""


def origin_of(saved: SavedStep) -> dict[str, object]:
    """The origin of an export: the identity of the run, the step, and a checksum of all that its manifest says."""
    listing = saved.manifest
    return {"run": listing.kept.id, "step": listing.step, "checkpoint": manifest.digest(listing)}


def write_stamp(folder: Path, origin: Mapping[str, object]) -> None:
    """Stamps a folder whose other files are written. Raises OSError."""
    write_whole(folder / STAMP, json.dumps(_stamp(folder, origin), indent=1) + "\n")


def is_whole(folder: Path, origin: Mapping[str, object]) -> bool:
    """Whether a folder is the export of this origin, and all its files are as they were written. Raises OSError."""
    try:
        return _read(folder) == _stamp(folder, origin)
    except BrokenError:
        return False


def run_of(folder: Path) -> str | None:
    """The identity of the run that has written an export; None if there is no stamp that says it. Raises OSError."""
    values = _read(folder)
    return values["run"] if values is not None and sealed(values) == values and isinstance(values.get("run"), str) else None


def _stamp(folder: Path, origin: Mapping[str, object]) -> dict[str, object]:
    entries = [entry for entry in file_entries(folder, sha256=False) if entry.path != STAMP]
    return sealed({**origin, "files": {entry.path: [entry.size, entry.crc32] for entry in entries}})


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        return read_object_file(folder / STAMP)
    except (FileNotFoundError, NotADirectoryError):
        return None
