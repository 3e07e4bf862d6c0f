"""A saved step that may be used: its files are whole, and its arrays are the ones that a run wants. Needs no Orbax.

Two things can be wrong with a checkpoint that is listed. Its files may have changed since they were written: a disk flips bits, a copy
is cut short, and Orbax would return the result as other weights. Or its arrays may belong to another model; Orbax would cast another
type silently. Both are checked here before any array is read: the files against their checksums, and names, shapes and types against the
run's own.

The invariant is that all processes use the same step. Each process checks a part of the files, so one of them may see damage that the
others cannot. The first process therefore names the step to try, and the step counts as whole only if every process finds its part whole.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jgt.document import InputError, is_folder
from jgt.sharding.placement import path_text
from train.checkpoint import manifest
from train.checkpoint.manifest import ArrayEntry, BrokenError, Manifest
from train.checkpoint.steps import FOLDER, Steps
from train.processes.processes import number_of_first_process, true_on_all_processes

_CHANGE = "Give the run another name (run.name=...), or the model it was started with"


@dataclass(frozen=True, kw_only=True)
class SavedStep:
    """A step whose files match the checksums in its manifest."""

    folder: Path
    manifest: Manifest


def newest_whole(steps: Steps, newest: Callable[[], int], reject: Callable[[int, str], None]) -> SavedStep | None:
    """The first whole step that `newest` returns; None when it returns 0.

    newest(): the next step to try, as this process sees it. reject(step, problem) is called on every process for a step that is damaged;
    `newest` must not return that step again.
    """
    while step := number_of_first_process(newest()):
        saved, problem = _read(steps, step)
        if saved is not None:
            return saved
        reject(step, problem)
    return None


def find_checkpoint(path: Path, *, before: int | None = None) -> tuple[SavedStep | None, list[str]]:
    """The newest whole step of another run, and a line for each newer step that is damaged. Nothing in the folder is changed.

    path: a run directory, its `checkpoints` folder, or one of the steps in it. before: only steps below this one count.
    """
    # A relative path may be `.`, which has no name, and a step is recognised by its name.
    path = path.absolute()
    if not is_folder(path):
        return None, []
    # A step has a number for a name, but so may a run directory; only a step has a manifest.
    if path.name.isdecimal() and (path / manifest.NAME).exists():
        steps, numbers = Steps(path.parent), [int(path.name)]
    else:
        steps = Steps(path / FOLDER if (path / FOLDER).is_dir() else path)
        numbers = [step for step in steps.listed() if before is None or step < before]
    reports: list[str] = []

    def reject(step: int, problem: str) -> None:
        reports.append(f"the checkpoint {steps.path(step)} is damaged ({problem}); it is not used")

    return newest_whole(steps, lambda: numbers.pop() if numbers else 0, reject), reports


def array_entries(tree: Mapping[str, Any]) -> tuple[ArrayEntry, ...]:
    """Path, shape and type of each array of a tree. Raises ValueError for two names that would become the same file."""
    leaves = jax.tree.leaves_with_path(dict(tree))
    entries = tuple(ArrayEntry(path=path_text(path), shape=tuple(x.shape), dtype=str(x.dtype)) for path, x in leaves)
    # Orbax joins the parts of a path with dots to name a file: `a/b` and `a.b` would overwrite each other.
    files = collections.Counter(entry.path.replace("/", ".") for entry in entries)
    same = [entry.path for entry in entries if files[entry.path.replace("/", ".")] > 1]
    if same:
        raise ValueError(f"a checkpoint cannot tell these names apart: {', '.join(same)}")
    return entries


def check_arrays(where: Path, old: Sequence[ArrayEntry], new: Sequence[ArrayEntry], *, cast: bool) -> None:
    """Raises InputError with every array that is missing, superfluous, or of another shape or type.

    where: the checkpoint's folder; old: its arrays; new: the run's. cast: floating types may differ.
    """
    saved, wanted = ({entry.path: entry for entry in entries} for entries in (old, new))
    problems = [f"{path}: is not part of this model. {_CHANGE}" for path in sorted(saved.keys() - wanted.keys())]
    problems += [f"{path}: is missing in the checkpoint. {_CHANGE}" for path in sorted(wanted.keys() - saved.keys())]
    for path in sorted(saved.keys() & wanted.keys()):
        before, after = saved[path], wanted[path]
        difference = f"{path}: is {before.dtype}{list(before.shape)} in the checkpoint, but {after.dtype}{list(after.shape)} in this run"
        # An integer type is never converted: step counters and random keys must stay exact.
        floating = all(jnp.issubdtype(jnp.dtype(entry.dtype), jnp.floating) for entry in (before, after))
        if before.shape != after.shape or (before.dtype != after.dtype and not floating):
            problems.append(f"{difference}. {_CHANGE}")
        elif before.dtype != after.dtype and not cast:
            problems.append(f"{difference}. checkpoint.cast=true converts it")
    if problems:
        raise InputError([f"{where}: {problem}" for problem in problems])


def _read(steps: Steps, step: int) -> tuple[SavedStep | None, str]:
    """A step if all processes find their part of its files whole; otherwise what is wrong, as far as this process knows."""
    # An error raised here would leave the other processes waiting in the exchange below.
    saved, problem = None, "another process found damage in its part of the files"
    try:
        saved = SavedStep(folder=steps.path(step), manifest=steps.read(step, (jax.process_index(), jax.process_count())))
    except (BrokenError, OSError) as error:
        problem = str(error)
    return (saved, "") if true_on_all_processes(saved is not None) else (None, problem)
