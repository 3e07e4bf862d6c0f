"""The arrays of a saved step, piece by piece: for readers that have neither the run's devices nor the memory for a whole array.

A run's devices save their shards as the chunks of an array, so a piece is a few neighbouring chunks, and each chunk is read once. Orbax
restores whole arrays only; its files are those of tensorstore, which reads any part of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tensorstore

from ..files.disk import DiskError, describe, patiently
from .bucket_steps import SavedStep
from .listing import ArrayEntry
from .objects import Objects, span_of
from .restore import ARRAYS, disk_errors, first_line
from .saved import UnusableError

PIECE_BYTES = 1 << 24
Span = tuple[slice, ...]
_Result = TypeVar("_Result")


def pieces(
    saved: SavedStep, entry: ArrayEntry, *, whole: Collection[int] = (), most: int = PIECE_BYTES
) -> Iterator[tuple[Span, np.ndarray]]:
    """All parts of an array, each with its place. A part has at most `most` bytes, or it is one chunk.

    whole: the numbers of dims that are whole in each part. Raises UnusableError if the files do not have the array, and DiskError if the
    disk cannot be read.
    """
    chunks, read = _files(saved, entry) if saved.bucket is None else _objects(saved, entry)
    chunk = tuple(size if dim in whole else part for dim, (size, part) in enumerate(zip(entry.shape, chunks, strict=True)))
    step = _grown(entry.shape, chunk, np.dtype(entry.dtype).itemsize, most)
    for begin in itertools.product(*(range(0, size, part) for size, part in zip(entry.shape, step, strict=True))):
        place = tuple(slice(at, min(at + part, size)) for at, part, size in zip(begin, step, entry.shape, strict=True))
        yield place, read(place)


_Read = Callable[[Span], np.ndarray]


def _files(saved: SavedStep, entry: ArrayEntry) -> tuple[tuple[int, ...], _Read]:
    """The shape of the chunks of an array in a folder, and a function that reads a part of it."""
    folder = Path(saved.folder, ARRAYS)
    array = _attempt(saved, folder, lambda: _open(folder, entry))
    # Orbax may restore what is read here; the manifest has the shape and type that both must find.
    if (tuple(array.shape), array.dtype.name) != (entry.shape, entry.dtype):
        raise UnusableError(saved.folder, f"has other arrays in its files than its manifest lists ({entry.path})")
    chunks = array.chunk_layout.read_chunk.shape or entry.shape
    return chunks, lambda place: _attempt(saved, folder, lambda: np.asarray(array[place].read().result()))


def _objects(saved: SavedStep, entry: ArrayEntry) -> tuple[tuple[int, ...], _Read]:
    """As `_files`, for an array in a bucket."""
    objects = Objects(saved)

    def read(place: Span) -> np.ndarray:
        return _attempt(saved, saved.folder, lambda: objects.read(entry, [span_of(place, entry.shape)])[0])

    return objects.piece(entry.path), read


def _open(folder: Path, entry: ArrayEntry) -> Any:
    # Orbax joins the parts of a path with dots.
    place = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder.absolute()}/"}, "path": f"{entry.path.replace('/', '.')}/"}
    # Without a cache, memory is that of the chunks that are being read.
    return tensorstore.open({"driver": "auto", "kvstore": place}, open=True, read=True).result()


def _grown(shape: tuple[int, ...], chunk: tuple[int, ...], itemsize: int, most: int) -> list[int]:
    """The shape of a piece: the shape of a chunk, doubled along one dim after another while it has at most `most` bytes."""
    step = [min(part, size) for part, size in zip(chunk, shape, strict=True)]
    dims = [dim for dim in reversed(range(len(shape))) if step[dim] < shape[dim]]
    while dims:
        dims = [dim for dim in dims if 2 * math.prod(step) * itemsize <= most and step[dim] < shape[dim]]
        for dim in dims:
            if 2 * math.prod(step) * itemsize <= most:
                step[dim] *= 2
    return step


def _attempt(saved: SavedStep, folder: Path | str, call: Callable[[], _Result]) -> _Result:
    """The result of a call that reads, which is repeated after errors of the disk."""

    def attempt() -> _Result:
        with disk_errors(folder):
            return call()

    try:
        return patiently(attempt, folder)
    except OSError as error:
        raise DiskError(describe(error, folder)) from error
    except Exception as error:
        # tensorstore raises errors of several types for contents that it does not understand.
        raise UnusableError(saved.folder, f"cannot be read ({first_line(error)})") from error
