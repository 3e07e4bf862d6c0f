"""Specs: which mesh axes shard which dim of a tensor.

A spec is JAX's PartitionSpec as a plain tuple, plus `...` for any number of dims that are not sharded, so that it can be
read, compared and checked without JAX. `[[data, fsdp], null, ...]` in a rules file is `(("data", "fsdp"), None, ...)`.

A spec is written for the dims that the model uses, and fits tensors with exactly that many dims. `expand` turns it into
the axes of each dim of one tensor; from then on there is no `...` and no short form. `misfits` compares these with the
tensor's shape. A dim whose size the axes do not divide is an error, with the sizes that would fit: XLA would pad it and
move padding between devices in every step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import EllipsisType
from typing import cast

Entry = str | tuple[str, ...] | None | EllipsisType
Spec = tuple[Entry, ...]
"""One entry for each dim: an axis, several axes (major to minor), or None for no axis. One entry may be `...`, for any number of dims."""


@dataclass(frozen=True, kw_only=True)
class SpecRule:
    """A pattern, and the spec of everything that it matches. `where` is its file:line, which does not count when rules are compared."""

    pattern: str
    spec: Spec
    where: str = field(default="rules", compare=False)


@dataclass(frozen=True)
class Misfit:
    """A dim of a tensor whose size its axes do not divide: `parts` is the product of their sizes. Axes of size 1 are left out."""

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
    """The number of dims that a spec names, which is the smallest rank of a tensor that it fits."""
    return len(spec) - spec.count(...)


def fits_rank(spec: Spec, rank: int) -> bool:
    """Whether a spec can lay out a tensor of this rank: with `...` any larger rank will do."""
    return rank >= min_rank(spec) if ... in spec else rank == len(spec)


def expand(spec: Spec, rank: int, skip: Collection[int] = ()) -> tuple[tuple[str, ...], ...]:
    """The axes of each of `rank` dims. The dims in `skip` have no entry in the spec and are not sharded.

    expand(("data", ...), 3) is (("data",), (), ()). Raises ValueError if the spec names more dims than there are.
    """
    # The number of dims that `...` stands for, or that a spec without it leaves unnamed.
    room = rank - len(skip) - min_rank(spec)
    if room < 0:
        raise ValueError(f"the spec has {min_rank(spec)} dims, the tensor {rank - len(skip)}")
    known: list[tuple[str, ...]] = []
    for entry in spec:
        known += [()] * room if entry is ... else [axes_of(entry)]
    entries = iter(known)
    # The entries may end early: an input may have more dims than the spec, and those are not sharded.
    return tuple(() if dim in skip else next(entries, ()) for dim in range(rank))


def misfits(dims: tuple[tuple[str, ...], ...], shape: tuple[int, ...], mesh: Mapping[str, int]) -> Iterator[Misfit]:
    """The dims of `shape` that their axes do not divide on a mesh of these sizes. An axis that the mesh does not have counts as 1."""
    for dim, (axes, size) in enumerate(zip(dims, shape, strict=True)):
        # `Rules.axis_problems` reports a missing axis, so it must not cause a misfit as well.
        parts = math.prod(mesh.get(axis, 1) for axis in axes)
        if size % parts:
            yield Misfit(dim, size, tuple(axis for axis in axes if mesh.get(axis, 1) > 1), parts)


def show(spec: Spec) -> str:
    """A spec as the YAML writes it."""
    return "[" + ", ".join(_show_entry(entry) for entry in spec) + "]"


def _show_entry(entry: Entry) -> str:
    if entry is None:
        return "null"
    if entry is ...:
        return "..."
    return entry if isinstance(entry, str) else "[" + ", ".join(entry) + "]"


def misfit_problems(
    rule: SpecRule, dims: tuple[tuple[str, ...], ...], shape: tuple[int, ...], mesh: Mapping[str, int], what: str, *, label: str = ""
) -> Iterator[str]:
    """One problem for each dim of `shape` that its axes do not divide. `label` replaces a pattern that would say nothing."""
    for misfit in misfits(dims, shape, mesh):
        yield misfit_problem(rule, misfit, shape, mesh, what, label=label)


def misfit_problem(rule: SpecRule, misfit: Misfit, shape: tuple[int, ...], mesh: Mapping[str, int], what: str, *, label: str = "") -> str:
    """`file:line: pattern: dim 1 of ... has size 6, which tensor=4 does not divide. ...`"""
    axes = " x ".join(f"{axis}={mesh[axis]}" for axis in misfit.axes)
    product = f" (= {misfit.parts})" if len(misfit.axes) > 1 else ""
    # The size of a dim of jax.export's symbolic shapes is an expression.
    if not isinstance(cast(object, misfit.size), int):
        size = f"mod({misfit.size}, {misfit.parts}) == 0"
        return (
            f"{rule.where}: {label or rule.pattern}: dim {misfit.dim} of the {what} [{', '.join(map(str, shape))}] has the symbolic size "
            f"{misfit.size}, and nothing says that {axes}{product} divides it. Add the constraint {size!r} to the symbolic shape"
        )
    return (
        f"{rule.where}: {label or rule.pattern}: dim {misfit.dim} of the {what} {list(shape)} has size {misfit.size}, "
        f"which {axes}{product} does not divide. {remedy(misfit)}"
    )


def remedy(misfit: Misfit) -> str:
    """The remedy of a misfit: the nearest sizes of the dim, and the products of axis sizes that divide it."""
    below = misfit.size - misfit.size % misfit.parts
    sizes = f"{below} or {below + misfit.parts}" if below else f"{misfit.parts}"
    # Divisors come in pairs around the square root, so that a vocabulary of millions takes a thousand steps.
    low = [n for n in range(1, math.isqrt(misfit.size) + 1) if misfit.size % n == 0]
    divisors = ", ".join(str(n) for n in sorted({*low, *(misfit.size // n for n in low)}) if n < misfit.parts)
    over = " x ".join(misfit.axes)
    return f"A size of {sizes} would fit, or {over} of {divisors}"
