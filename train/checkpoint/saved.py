"""A saved step that may be used: its files are whole, its arrays are the ones that a run wants, and it can be restored. Needs no Orbax.

The files of a listed step may have changed since they were written, and its arrays may belong to another model; Orbax would return other
weights, or cast another type silently. So both are checked before any array is read: the files against their checksums, and names, shapes
and types against the run's own. A step whose checksums are right may still come from a stranger, without the run's signature or with
contents that nothing can restore.

A `Search` goes from the newest step to older ones until one serves. A step with damaged files is of no use to anyone, and is set aside at
once. A step that is whole but refused may only need another key or another version of Orbax, and so may all older ones; it is set aside
only when an older one has been restored. If there is none, the start is refused, and everything stays as it is.

The invariant is that all processes use the same step. Each process checks a part of the files. The first process names the step to try,
which counts as whole only if every process finds its part whole. A process that cannot read its part ends the start of all processes.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

import jax
import jax.numpy as jnp

from jgt import path_text
from jgt.document import InputError

from ..files.disk import DiskError, describe
from ..processes.processes import number_of_first_process, true_on_all_processes
from .bucket_steps import BucketSteps, SavedStep
from .listing import ArrayEntry
from .manifest import BrokenError, UnsignedError
from .signature import Key
from .steps import Steps, find_steps

DATA = "data"
"""The folder in a step of what processes stored about the place in their data."""
MAX_DATA_BYTES = 1 << 26
_Result = TypeVar("_Result")
_CHANGE = "Give the run another name (run.name=...), or the model and the optimizer that it was started with"


class UnusableError(InputError):
    """A step whose files are whole cannot be used; `why` continues the sentence `this checkpoint ...`."""

    def __init__(self, folder: Path | str, why: str):
        super().__init__([f"{folder}: this checkpoint {why}"])
        self.why = why


class Search:
    """The steps of a folder from the newest to older ones, until one can be used. All processes make the same calls in the same order.

    is_own: the folder belongs to this run, so bad steps are set aside; another run's folder is not changed. listed(): the steps to choose
    from. reports: a line for each step that is not used, so far. DiskError is raised on all processes if one cannot read the disk.
    """

    def __init__(self, steps: Steps | BucketSteps, listed: Callable[[], list[int]] | None = None, *, is_own: bool):
        self.reports: list[str] = []
        self._steps, self._listed, self._is_own = steps, listed or steps.listed, is_own
        self._passed: set[int] = set()
        self._refused: dict[int, str] = {}

    def next(self) -> SavedStep | None:
        """The newest whole step below the earlier ones; None if there is none. Raises InputError if all were refused."""
        while step := number_of_first_process(self._newest()):
            self._passed.add(step)
            verdict = self._verdict(step)
            if isinstance(verdict, SavedStep):
                return verdict
            if isinstance(verdict, UnsignedError):
                self.refuse(step, f"is not trusted ({verdict})")
            else:
                self._drop(step, f"is damaged ({verdict})")
        if self._refused:
            remedy = "No other one can be used, and nothing was changed. --resume never starts again from step 0"
            raise InputError([f"{self._steps.path(step)}: this checkpoint {why}. {remedy}" for step, why in self._refused.items()])
        return None

    def refuse(self, step: int, why: str) -> None:
        """Notes that a whole step `cannot be restored (...)`."""
        self._refused[step] = why

    def drop_refused(self) -> None:
        """Drops the refused steps, because another one has been restored."""
        for step, why in self._refused.items():
            self._drop(step, why)
        self._refused = {}

    def _newest(self) -> int:
        return max({*_everywhere(self._listed, self._steps.folder)} - self._passed, default=0)

    def _drop(self, step: int, why: str) -> None:
        if not self._is_own:
            self.reports.append(f"the checkpoint {self._steps.path(step)} {why}; it is not used")
            return
        is_first = jax.process_index() == 0
        # The exchange inside is a barrier too: the others must not list the step once more before it is renamed.
        aside = _everywhere(lambda: self._steps.set_aside(step) if is_first else None, self._steps.folder)
        if aside is not None:
            self.reports.append(f"the checkpoint of step {step} {why}; it is not used, and was renamed to {aside}")

    def _verdict(self, step: int) -> SavedStep | BrokenError | UnsignedError:
        """A step if all processes find their part of its files whole; otherwise what is wrong, as far as this process knows."""

        def read() -> SavedStep | BrokenError | UnsignedError:
            try:
                return self._steps.open(step, (jax.process_index(), jax.process_count()))
            except (BrokenError, UnsignedError) as error:
                return error

        mine = _everywhere(read, self._steps.path(step))
        if true_on_all_processes(isinstance(mine, SavedStep)):
            return mine
        # Damage that only one process sees must lead to the same decision everywhere.
        if true_on_all_processes(not isinstance(mine, BrokenError)):
            return mine if isinstance(mine, UnsignedError) else UnsignedError("another process does not trust it")
        return mine if isinstance(mine, BrokenError) else BrokenError("another process found damage in its part of the files")


def search_elsewhere(path: Path | str, key: Key | None = None, *, before: int | None = None) -> Search:
    """A search in another run. Nothing in its folder is changed.

    path: a run directory or a run's URL, its `checkpoints` folder, or one of the steps in it. before: only steps below this number count.
    Raises InputError if there is a key: nothing in a bucket is signed.
    """
    if key is not None and isinstance(path, str):
        raise InputError([f"{path}: checkpoints in a bucket have no signatures. Copy them to a folder, or remove checkpoint.key"])
    path = path if isinstance(path, str) else path.absolute()
    steps, named = _everywhere(lambda: find_steps(path, key), path)

    def listed() -> list[int]:
        return [named] if named is not None else [step for step in steps.listed() if before is None or step < before]

    return Search(steps, listed, is_own=False)


def find_checkpoint(path: Path | str, key: Key | None = None, *, before: int | None = None) -> tuple[SavedStep | None, list[str]]:
    """The newest whole step of another run, and a line for each newer step that is damaged; as in `search_elsewhere`."""
    search = search_elsewhere(path, key, before=before)
    return search.next(), search.reports


def stored_data(saved: SavedStep) -> tuple[str, ...]:
    """Reads what each process has stored about the place in its data. Raises InputError for a file that is too large, or DiskError."""
    paths = [entry.path for entry in saved.manifest.files if entry.path.startswith(f"{DATA}/")]
    return _everywhere(lambda: tuple(saved.content(path, MAX_DATA_BYTES).decode(errors="replace") for path in paths), saved.folder)


def _everywhere(call: Callable[[], _Result], path: Path | str) -> _Result:
    """The result of a call that reads or changes what is below `path`. Raises DiskError on all processes if it fails on one of them."""
    result, failure = None, None
    try:
        result = call()
    except OSError as error:
        failure = error
    agree_on_disk(failure, path)
    return cast(_Result, result)


def agree_on_disk(failure: OSError | None, path: Path | str) -> None:
    """Returns if no process has an error of the disk. Otherwise raises DiskError on all of them."""
    if not true_on_all_processes(failure is None):
        what = f"another process cannot read its part of {path}" if failure is None else describe(failure, path)
        raise DiskError(f"{what}. No checkpoint was changed; the same command resumes when the disk can be read again")


def array_entries(tree: Mapping[str, object]) -> tuple[ArrayEntry, ...]:
    """Path, shape and type of each array of a tree. Raises ValueError for two names that would become the same file."""
    leaves = jax.tree.leaves_with_path(dict(tree))
    entries = tuple(ArrayEntry(path=path_text(path), shape=tuple(x.shape), dtype=str(x.dtype)) for path, x in leaves)
    # Orbax joins the parts of a path with dots to name a file: `a/b` and `a.b` would overwrite each other.
    files = collections.Counter(entry.path.replace("/", ".") for entry in entries)
    same = [entry.path for entry in entries if files[entry.path.replace("/", ".")] > 1]
    if same:
        raise ValueError(f"a checkpoint cannot tell these names apart: {', '.join(same)}")
    return entries


def check_arrays(where: Path | str, old: Sequence[ArrayEntry], new: Sequence[ArrayEntry], *, convert: bool) -> None:
    """Raises InputError with every array that is missing, superfluous, or of another shape or type.

    where: the checkpoint's folder; old: its arrays; new: the run's. convert: floating types may differ.
    """
    saved, wanted = ({entry.path: entry for entry in entries} for entries in (old, new))
    problems = [f"{path}: is not part of this run. {_CHANGE}" for path in sorted(saved.keys() - wanted.keys())]
    problems += [f"{path}: is missing in the checkpoint. {_CHANGE}" for path in sorted(wanted.keys() - saved.keys())]
    for path in sorted(saved.keys() & wanted.keys()):
        before, after = saved[path], wanted[path]
        difference = f"{path}: is {before.dtype}{list(before.shape)} in the checkpoint, but {after.dtype}{list(after.shape)} in this run"
        # An integer type is never converted: step counters and random keys must stay exact.
        floating = all(jnp.issubdtype(jnp.dtype(entry.dtype), jnp.floating) for entry in (before, after))
        if before.shape != after.shape or (before.dtype != after.dtype and not floating):
            problems.append(f"{difference}. {_CHANGE}")
        elif before.dtype != after.dtype and not convert:
            problems.append(f"{difference}. checkpoint.cast=true converts it")
    if problems:
        raise InputError([f"{where}: {problem}" for problem in problems])
