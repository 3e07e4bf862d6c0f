"""Specs: which mesh axes shard which dim of a tensor. JAX's PartitionSpec, plus `...`, as plain tuples."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import EllipsisType

Entry = str | tuple[str, ...] | None | EllipsisType
Spec = tuple[Entry, ...]
"""One entry a dim: an axis, several axes (major to minor), None for no axis; one `...` stands for any dims."""


@dataclass(frozen=True, kw_only=True)
class SpecRule:
    """A pattern and the spec of what it matches. `where` is file:line and takes no part in comparison."""

    pattern: str
    spec: Spec
    where: str = field(default="rules", compare=False)


@dataclass(frozen=True)
class Misfit:
    """A dim that its axes (those of size above 1) do not divide."""

    dim: int
    size: int
    axes: tuple[str, ...]
    parts: int


def axes_of(entry: Entry) -> tuple[str, ...]:
    """The axes of one spec entry, major to minor."""
    if isinstance(entry, tuple):
        return entry
    return (entry,) if isinstance(entry, str) else ()


def axes_in(spec: Spec) -> Iterator[str]:
    """Every axis that a spec names."""
    for entry in spec:
        yield from axes_of(entry)


def min_rank(spec: Spec) -> int:
    """The number of dims that a spec names: the least rank of a tensor it fits."""
    return len(spec) - spec.count(...)


def fits_rank(spec: Spec, rank: int) -> bool:
    """Whether a spec speaks of tensors of exactly this rank."""
    return rank >= min_rank(spec) if ... in spec else rank == len(spec)


def expand(spec: Spec, rank: int, skip: Collection[int] = ()) -> tuple[tuple[str, ...], ...]:
    """The axes of each of `rank` dims; the spec does not know of those in `skip`, which get none.

    Raises ValueError when the spec is longer than what is left.
    """
    room = rank - len(skip) - min_rank(spec)
    if room < 0:
        raise ValueError(f"the spec has {min_rank(spec)} dims, the tensor {rank - len(skip)}")
    known: list[tuple[str, ...]] = []
    for entry in spec:
        known += [()] * room if entry is ... else [axes_of(entry)]
    entries = iter(known)
    return tuple(() if dim in skip else next(entries, ()) for dim in range(rank))


def misfits(dims: tuple[tuple[str, ...], ...], shape: tuple[int, ...], mesh: Mapping[str, int]) -> Iterator[Misfit]:
    """The dims of `shape` that the axes of `dims` do not divide on a mesh of these sizes; an unknown axis counts 1."""
    for dim, (axes, size) in enumerate(zip(dims, shape, strict=True)):
        parts = math.prod(mesh.get(axis, 1) for axis in axes)
        if size % parts:
            yield Misfit(dim, size, tuple(axis for axis in axes if mesh.get(axis, 1) > 1), parts)


def show(spec: Spec) -> str:
    """A spec as the YAML writes it."""
    return "[" + ", ".join(_show_entry(entry) for entry in spec) + "]"


def show_dims(dims: tuple[tuple[str, ...], ...]) -> str:
    """Expanded dims as the YAML writes them."""
    return show(tuple(axes[0] if len(axes) == 1 else axes or None for axes in dims))


def _show_entry(entry: Entry) -> str:
    if entry is None:
        return "null"
    if entry is ...:
        return "..."
    return entry if isinstance(entry, str) else "[" + ", ".join(entry) + "]"
