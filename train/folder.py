"""The run directory: what it was started with, and whether this run may go on in it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jgt import document
from jgt.document import InputError
from train.config import Run

FIXED = ("model", "data", "run.seed")
"""What must be as it was when the run started; the rest (mesh, rules, steps, batch, ...) may change between starts."""


def check_folder(run: Run) -> None:
    """Raises InputError when the run directory was started with another model or other data, naming the keys."""
    path = run.config.run.path / "config.yaml"
    if not path.is_file():
        return
    before = document.read(path).plain()
    after = document.parse(document.dump(run.resolved()), "config").plain()
    problems = [
        f"{run.where(key)}: {key}: is {new!r}, but {path} was started with {old!r}. Change it back, or give the run another name (run.name=...)"
        for section in FIXED
        for key, old, new in _differences(section, _get(before, section), _get(after, section))
    ]
    if problems:
        raise InputError(problems)


def check_data(run: Run, fingerprint: Mapping[str, Any]) -> None:
    """Raises InputError when the data's own fingerprint differs from the one that the run directory keeps."""
    path = run.config.run.path / "data.json"
    if not path.is_file():
        return
    before = json.loads(path.read_text())
    changed = [f"{key} was {before.get(key)!r}, is {fingerprint.get(key)!r}" for key in {*before, *fingerprint} if before.get(key) != fingerprint.get(key)]
    if changed:
        raise InputError(
            [f"{run.where('data')}: data: is not the data that {run.config.run.path} was started with: {'; '.join(sorted(changed))}. Give the run another name (run.name=...)"]
        )


def config_fingerprint(run: Run) -> int:
    """A CRC-32 of what must not change in a run."""
    resolved = run.resolved()
    return zlib.crc32(json.dumps({key: _get(resolved, key) for key in FIXED}, sort_keys=True, default=str).encode())


def write_folder(run: Run, fingerprint: Mapping[str, Any]) -> None:
    """Creates the run directory and notes the resolved config and the data's fingerprint."""
    folder = run.config.run.path
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / "config.yaml", document.dump(run.resolved()))
    _replace(folder / "data.json", json.dumps(dict(fingerprint), indent=1) + "\n")


def _replace(path: Path, text: str) -> None:
    # Other processes of the run may be reading it.
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


def _differences(key: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        # A key that the run's file does not have is younger than the run: its default is what the run was started with.
        for name in [name for name in old if name in new]:
            yield from _differences(f"{key}.{name}", old[name], new[name])
    elif old != new:
        yield key, old, new


def _get(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
