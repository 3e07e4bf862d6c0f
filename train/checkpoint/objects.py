"""The arrays of a step on a bucket: cut into pieces when they are saved, and put together from the pieces that a part of one overlaps.

The devices of a run may be others when it is restored. So a reader asks for parts of an array, whatever they are, and gets them from the
pieces that they overlap. A piece is read once for all the parts of a process, and as a whole, because its checksum covers the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .bucket_steps import SavedStep, content_of, piece_grid, piece_name
from .listing import ArrayEntry
from .manifest import BrokenError

_PIECE_BYTES = 1 << 24
_THREADS = 16
Region = tuple[range, ...]
"""A part of an array: the indices of each dim."""


def span_of(index: Sequence[slice], shape: Sequence[int]) -> Region:
    """The part of an array [*shape] that slices name."""
    return tuple(range(*part.indices(size)) for part, size in zip(index, shape, strict=True))


def piece_shape(shape: Sequence[int], shard: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The shape of the pieces of an array [*shape] whose devices have [*shard]: whole shards, or equal parts of them."""
    piece = [max(1, size) for size in shard]
    while (bytes_ := math.prod(piece) * itemsize) > _PIECE_BYTES:
        wanted = [max(1, size * _PIECE_BYTES // bytes_) for size in piece]
        # A shard that is a part of the array must be cut evenly, so that no piece belongs to two shards.
        parts = [
            want if whole == size else next(n for n in range(want, 0, -1) if size % n == 0)
            for want, size, whole in zip(wanted, piece, shape, strict=True)
        ]
        # The first dim that can be cut well; otherwise the one that can be cut the least.
        gains = [part / want if part < size else 0 for part, want, size in zip(parts, wanted, piece, strict=True)]
        dim = next((dim for dim, gain in enumerate(gains) if gain > 0.5), max(range(len(gains)), key=gains.__getitem__))
        piece[dim] = parts[dim]
    return tuple(piece)


class Objects:
    """The arrays of a step on a bucket."""

    def __init__(self, saved: SavedStep):
        assert saved.bucket is not None and saved.manifest.objects is not None
        self._bucket, entry = saved.bucket, saved.manifest.objects
        self._folder = entry.folder
        self._pieces = {array.path: piece for array, piece in zip(saved.manifest.arrays, entry.pieces, strict=True)}

    def piece(self, path: str) -> tuple[int, ...]:
        """The shape of the pieces of an array."""
        return self._pieces[path]

    def read(self, array: ArrayEntry, spans: Sequence[Region]) -> list[np.ndarray]:
        """Parts of an array. Each piece that they overlap is read once. Raises BrokenError or OSError."""
        dtype, size = np.dtype(array.dtype), self._pieces[array.path]
        results = [np.empty([len(part) for part in span], dtype) for span in spans]

        def copy(index: tuple[int, ...]) -> None:
            begin = [n * part for n, part in zip(index, size, strict=True)]
            shape = [min(part, whole - at) for part, whole, at in zip(size, array.shape, begin, strict=True)]
            wanted = [(span, result) for span, result in zip(spans, results, strict=True) if all(map(_overlap, span, begin, shape))]
            if not wanted:
                return
            name = piece_name(self._folder, array.path, index)
            content = content_of(self._bucket, name)
            if len(content) != math.prod(shape) * dtype.itemsize:
                raise BrokenError(f"{name} has {len(content):,} bytes instead of {math.prod(shape) * dtype.itemsize:,}")
            piece = np.frombuffer(content, dtype).reshape(shape)
            for span, result in wanted:
                low = [max(part.start, at) for part, at in zip(span, begin, strict=True)]
                high = [min(part.stop, at + n) for part, at, n in zip(span, begin, shape, strict=True)]
                there = tuple(slice(a - part.start, b - part.start) for a, b, part in zip(low, high, span, strict=True))
                here = tuple(slice(a - at, b - at) for a, b, at in zip(low, high, begin, strict=True))
                result[there] = piece[here]

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(copy, piece_grid(array.shape, size)))
        return results


def _overlap(span: range, begin: int, size: int) -> bool:
    return span.start < begin + size and begin < span.stop
