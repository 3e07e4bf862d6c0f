"""What a state holds, by name: lists of arrays for a manifest, and one held against another. Free of Orbax."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jgt.document import InputError
from jgt.placement import path_text
from train.manifest import ArrayEntry

_CHANGE = "Give the run another name (run.name=...), or the model it was started with"


def array_entries(tree: Mapping[str, Any]) -> tuple[ArrayEntry, ...]:
    """The arrays of a tree. Raises ValueError for names that Orbax would take for one another."""
    leaves = jax.tree.leaves_with_path(dict(tree))
    entries = tuple(ArrayEntry(path=path_text(path), shape=tuple(x.shape), dtype=str(x.dtype)) for path, x in leaves)
    files = collections.Counter(entry.path.replace("/", ".") for entry in entries)
    twice = [entry.path for entry in entries if files[entry.path.replace("/", ".")] > 1]
    if twice:
        raise ValueError(f"a checkpoint cannot tell these names apart: {', '.join(twice)}")
    return entries


def check_arrays(where: Path, old: Sequence[ArrayEntry], new: Sequence[ArrayEntry], *, cast: bool) -> None:
    """Raises InputError with each array that is missing, new, or of another shape or type: Orbax would cast it silently."""
    saved, wanted = ({entry.path: entry for entry in entries} for entries in (old, new))
    problems = [f"{path}: is not part of this model. {_CHANGE}" for path in sorted(saved.keys() - wanted.keys())]
    problems += [f"{path}: is missing in the checkpoint. {_CHANGE}" for path in sorted(wanted.keys() - saved.keys())]
    for path in sorted(saved.keys() & wanted.keys()):
        before, after = saved[path], wanted[path]
        what = f"{path}: is {before.dtype}{list(before.shape)} in the checkpoint, but {after.dtype}{list(after.shape)} in this run"
        floating = all(jnp.issubdtype(jnp.dtype(entry.dtype), jnp.floating) for entry in (before, after))
        if before.shape != after.shape or (before.dtype != after.dtype and not floating):
            problems.append(f"{what}. {_CHANGE}")
        elif before.dtype != after.dtype and not cast:
            problems.append(f"{what}. checkpoint.cast=true converts it")
    if problems:
        raise InputError([f"{where}: {problem}" for problem in problems])
