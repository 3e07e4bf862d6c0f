"""The mesh axes that shard each dim of an array, and how to convert them from and to JAX's specs and the YAML's.

`[[data, fsdp], null]` in a rules file is `(("data", "fsdp"), ())` here and `PartitionSpec(("data", "fsdp"), None)` in JAX.
A PartitionSpec may omit trailing dims and write one axis in two ways. A tuple of tuples always has one entry for each dim, so that
dims can be compared, sliced and extended.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import cast

from jax.sharding import NamedSharding, PartitionSpec

Dims = tuple[tuple[str, ...], ...]
"""The mesh axes of each dim, major to minor; () for a dim that is not sharded."""


def partition_spec(dims: Dims, *, free: int = 0) -> PartitionSpec:
    """JAX's spec of these dims. The first `free` dims are left to the partitioner; a vmap puts such dims in front."""
    named = [axes[0] if len(axes) == 1 else axes or None for axes in dims[free:]]
    # UNCONSTRAINED and not None: None would replicate the dim that a vmap added, whatever it was mapped over.
    return PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * free, *named)


def sharding_dims(sharding: NamedSharding, rank: int) -> Dims:
    """The dims of the sharding of an array of this rank; () also for a dim that the sharding leaves to the partitioner."""
    entries: Sequence[object] = [*sharding.spec.partitions, *[None] * rank][:rank]
    return tuple((e,) if isinstance(e, str) else cast(tuple[str, ...], e) if isinstance(e, tuple) else () for e in entries)


def show_dims(dims: Dims) -> str:
    """Dims as the YAML writes them: `[data, [fsdp, tensor], null]`."""
    return "[" + ", ".join("null" if not axes else axes[0] if len(axes) == 1 else f"[{', '.join(axes)}]" for axes in dims) + "]"


def num_parts(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    """Into how many parts these axes split a dim, on a mesh of these sizes."""
    return math.prod(sizes.get(axis, 1) for axis in axes)


def even_dims(dims: Dims, shape: Sequence[int], sizes: Mapping[str, int], fixed: Collection[int] = ()) -> Dims:
    """Dims that split an array of this shape evenly, as an array between two programs must be: `dims`, if they do.

    An axis that does not divide its dim splits another dim instead, but none in `fixed`. If there is none, it splits nothing.
    """
    even: list[tuple[str, ...]] = []
    loose: list[str] = []
    for axes, size in zip(dims, shape, strict=True):
        kept: tuple[str, ...] = ()
        for axis in axes:
            if size % num_parts((*kept, axis), sizes):
                loose.append(axis)
            else:
                kept = (*kept, axis)
        even.append(kept)
    for axis in loose:
        fits = [d for d, size in enumerate(shape) if d not in fixed and size % num_parts((*even[d], axis), sizes) == 0]
        if fits:
            even[fits[0]] = (*even[fits[0]], axis)
    return tuple(even)


def coarse_dims(dims: Dims, shape: Sequence[int], sizes: Mapping[str, int]) -> Dims:
    """Dims for a value within a program: one that its axes do not divide is split by the first axes that do, or else by the first alone.

    XLA pads such a dim on its own and masks what it adds, but not if partial sums over one axis are to be split by it and by another: then
    it brings all of the factors together.
    """

    def coarse(axes: tuple[str, ...], size: int) -> tuple[str, ...]:
        # The size of a dim of jax.export's symbolic shapes is an expression, which its axes divide.
        if len(axes) < 2 or not isinstance(cast(object, size), int) or size % num_parts(axes, sizes) == 0:
            return axes
        return next((axes[:n] for n in range(len(axes) - 1, 0, -1) if size % num_parts(axes[:n], sizes) == 0), axes[:1])

    return tuple(coarse(axes, size) for axes, size in zip(dims, shape, strict=True))


def reshape_runs(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[range, range]]:
    """The shortest runs of neighbouring dims that a reshape from one shape to another maps to each other; together they are all dims."""
    start = first = 0
    while start < len(old) or first < len(new):
        end, last = start, first
        # A run of one side alone is a dim of size 1. In an empty array the last sizes may differ.
        while (end, last) != (len(old), len(new)):
            if (end, last) != (start, first) and math.prod(old[start:end]) == math.prod(new[first:last]):
                break
            if last == len(new) or (end < len(old) and math.prod(old[start:end]) <= math.prod(new[first:last])):
                end += 1
            else:
                last += 1
        yield range(start, end), range(first, last)
        start, first = end, last
