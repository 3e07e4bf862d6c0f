"""Restoring a saved step. It never changes a checkpoint, and it keeps three failures apart.

The config may differ from the checkpoint: that is found before any array is read, and reported array by array. The disk may fail: that says
nothing about the step, and is tried again. Or the files, though their checksums are right, may not contain the arrays that the manifest
lists, because someone has forged them or because this version of Orbax reads them differently: then another step may serve. Orbax and the
library below it report the second and the third alike, by errors of many types, so this file looks for the system's error in them.

The invariant: all processes return, or all raise the same kind of error. So no process waits in a barrier of Orbax for one that has failed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jgt import path_text
from jgt.document import shown

from ..files.disk import is_damage, patiently
from ..processes.processes import true_on_all_processes
from ..step.state import State, Tree
from ..step.trained import divided, merged
from .bucket_steps import SavedStep
from .objects import Objects, span_of
from .saved import UnusableError, agree_on_disk, array_entries, check_arrays

ARRAYS = "state"
"""The folder of the arrays in a step."""
_KEYS = "uint32"
"""The type in which a state has random keys and their counts, and nothing else."""
_READERS = 8
_MAX_REASON = 500
_MAX_CAUSES = 20
_LATE_SECONDS = 0.3
# As tensorstore writes it: "[os_error_code='5']".
_SYSTEM_ERROR = re.compile(r"os_error_code='?(\d+)")


def restore(saved: SavedStep, shapes: State, shardings: State, *, cast: bool = False) -> State:
    """The state of a step, laid out by `shardings`, whatever mesh it was saved on.

    Parts of `shapes` without arrays are not read. cast: floating arrays of another type are converted. Raises InputError if the
    checkpoint's arrays differ from `shapes`, UnusableError if they cannot be restored, and DiskError if the disk cannot be read; each on
    all processes.
    """
    return replace(shapes, **restore_parts(saved, shapes.arrays(), shardings.arrays(), cast=cast))


def restore_params(saved: SavedStep, shapes: Tree, shardings: Tree, *, cast: bool = False) -> Tree:
    """The parameters alone, as in `restore`, whichever of them were frozen. A run with phases has them from the last exchange."""
    paths = {entry.path for entry in saved.manifest.arrays}
    name = "anchor" if any(path.startswith("anchor/") for path in paths) else "params"

    def by_part(tree: Any) -> dict[str, Tree]:
        frozen, others = divided(tree, lambda path: f"frozen/{path}" in paths)
        return {part: tree for part, tree in ((name, others), ("frozen", frozen)) if tree}

    parts = restore_parts(saved, by_part(shapes), by_part(shardings), cast=cast)
    return merged(parts.get(name, {}), parts.get("frozen", {}))


def without_keys(shapes: Any, tree: Any) -> Any:
    """A model's variables without its random keys. shapes: their shapes, in nested dicts; tree: their values, or shardings."""
    if not isinstance(shapes, Mapping):
        return tree
    kept = {name: without_keys(x, tree[name]) for name, x in shapes.items() if isinstance(x, Mapping) or x.dtype != _KEYS}
    return {name: x for name, x in kept.items() if not isinstance(x, Mapping) or x}


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def restore_parts(
    saved: SavedStep, shapes: dict[str, Tree], shardings: dict[str, Tree], *, cast: bool, keys: bool = True
) -> dict[str, Tree]:
    """Some parts of a state, by the names of their fields. keys: whether they include random keys. Raises as `restore` does."""
    # The first level of an array's path is the field of State that contains it.
    parts = [entry for entry in saved.manifest.arrays if entry.path.partition("/")[0] in shapes]
    arrays = [entry for entry in parts if keys or entry.dtype != _KEYS]
    check_arrays(saved.folder, arrays, array_entries(shapes), convert=cast)
    target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    read = _read_files if saved.bucket is None else _read_objects
    with _quiet_callbacks():
        restored, failure, why = _outcome(partial(read, saved, target, is_part=len(arrays) < len(saved.manifest.arrays)), saved.folder)
        if failure is not None or why is not None:
            _let_go()
    agree_on_disk(failure, saved.folder)
    if not true_on_all_processes(why is None):
        raise UnusableError(saved.folder, f"cannot be restored ({why or 'another process failed'})")
    assert restored is not None
    return restored


def _read_files(saved: SavedStep, target: dict[str, Tree], *, is_part: bool) -> dict[str, Tree]:
    """The arrays of a step in a folder, by Orbax."""
    # Orbax declares another class of paths, and takes any.
    folder: Any = Path(saved.folder, ARRAYS)
    arguments = ocp.checkpoint_utils.construct_restore_args(target)
    # Orbax' Checkpointer would wait for the other processes, which may have failed.
    with contextlib.closing(ocp.PyTreeCheckpointHandler()) as reader, disk_errors(folder):
        _check_contents(reader.metadata(folder).tree, saved)
        return reader.restore(folder, args=ocp.args.PyTreeRestore(target, restore_args=arguments, partial_restore=is_part))


def _read_objects(saved: SavedStep, target: dict[str, Tree], *, is_part: bool) -> dict[str, Tree]:
    """The arrays of a step in a bucket. Each process reads the pieces that its devices need."""
    objects, entries = Objects(saved), {entry.path: entry for entry in saved.manifest.arrays}

    def read(item: tuple[jax.tree_util.KeyPath, jax.ShapeDtypeStruct]) -> jax.Array:
        (path, x), sharding = item, item[1].sharding
        assert sharding is not None
        indices: Mapping[Any, Any] = sharding.addressable_devices_indices_map(x.shape)
        places = {device: span_of(index, x.shape) for device, index in indices.items()}
        spans = list(dict.fromkeys(places.values()))
        parts = dict(zip(spans, objects.read(entries[path_text(path)], spans), strict=True))
        # A copy: the state is donated to the step, and its memory must be the devices' own.
        values = [jax.device_put(parts[span].astype(x.dtype, copy=False), device, may_alias=False) for device, span in places.items()]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, values)

    leaves, structure = jax.tree.flatten_with_path(target)
    with ThreadPoolExecutor(_READERS) as pool:
        return jax.tree.unflatten(structure, list(pool.map(read, leaves)))


def _outcome(read: Callable[[], dict[str, Tree]], folder: Path | str) -> tuple[dict[str, Tree] | None, OSError | None, str | None]:
    """The result of `read`, or the error of the disk that ended it, or why the step cannot be restored."""

    def attempt() -> dict[str, Tree]:
        try:
            return read()
        except Exception:
            _let_go()
            raise

    try:
        return patiently(attempt, folder), None, None
    except jax.errors.JaxRuntimeError:
        # The devices or another process failed; that says nothing about the step.
        raise
    except Exception as error:
        # Orbax raises errors of any type for contents that it does not understand; nested ones even a RecursionError.
        if isinstance(error, OSError) and not is_damage(error):
            # Anew, without the traceback that keeps what is left of the attempt alive.
            return None, OSError(error.errno, error.strerror, error.filename), None
        return None, None, shown(first_line(error), _MAX_REASON, quotes=False)


@contextlib.contextmanager
def disk_errors(folder: Path | str) -> Iterator[None]:
    """Inside, an error of the disk is raised as an OSError, however the libraries that read arrays have wrapped it."""
    try:
        yield
    except Exception as error:
        for cause in _causes(error):
            if isinstance(cause, OSError) and not is_damage(cause):
                raise cause from error
            if number := _SYSTEM_ERROR.search(str(cause)):
                raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error
        raise


@contextlib.contextmanager
def _quiet_callbacks() -> Iterator[None]:
    """Inside, what is left of a failed attempt prints nothing.

    Orbax closes its event loop at the first read that fails. The callbacks of all other reads, and coroutines without an awaiter, would
    each print a traceback.
    """
    hooks = sys.excepthook, sys.unraisablehook
    # Only native code calls them while this thread runs.
    sys.excepthook, sys.unraisablehook = lambda *_: None, lambda _: None
    try:
        yield
    finally:
        sys.excepthook, sys.unraisablehook = hooks


def _let_go() -> None:
    """After a failed attempt: waits for the reads that are under way, and destroys coroutines while the hooks are quiet."""
    time.sleep(_LATE_SECONDS)
    gc.collect()


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it was raised from, with a bound because errors may refer to each other."""
    for _ in range(_MAX_CAUSES):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _check_contents(tree: Tree, saved: SavedStep) -> None:
    """Raises ValueError if the arrays in a step's files are not those that its manifest lists."""
    stored = {x.name: (tuple(x.shape), str(x.dtype)) for x in jax.tree.leaves(tree)}
    # Orbax joins the parts of a path with dots.
    listed = {entry.path.replace("/", "."): (entry.shape, entry.dtype) for entry in saved.manifest.arrays}
    for name in sorted(stored.keys() | listed.keys()):
        if stored.get(name) != listed.get(name):
            inside, outside = ("absent" if x is None else f"{x[1]}{list(x[0])}" for x in (stored.get(name), listed.get(name)))
            raise ValueError(f"{name} is {inside} in its files, but {outside} in its manifest")
