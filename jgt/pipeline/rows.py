"""Where a value holds the rows of a batch.

A microbatch is some neighbouring rows of the batch. What it computes for its rows is what the whole batch would have, if
every equation makes row i of its results of row i of its operands. So the dim of the rows is followed through a program,
equation by equation (`primitives`, `moves`, `indexing`); whatever is not known to keep rows apart, and in their order, counts as
mixing them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from jgt.jaxpr import Equation


class MixingError(Exception):
    """Rows of the batch meet, or may; the message says how."""


@dataclass(frozen=True)
class Rows:
    """Dim `dim` is `copies` times all rows of the batch in their order, each with the same number of elements in a row.

    copies 0: all rows are alike (or random), so any order is theirs.
    index: "place" where each value is its place along the dim (arange), "never" where it is False because such places are
    not negative, "lost" where it was made of places in a way that is not followed.
    columns: for an index into several dims, the entries of its last dim that are places.
    """

    dim: int
    copies: int = 1
    index: Literal["", "place", "never", "lost"] = ""
    columns: frozenset[int] = field(default_factory=frozenset)

    @property
    def is_index(self) -> bool:
        """Whether the values speak of places in the batch, which are others in a microbatch."""
        return bool(self.index or self.columns)

    def at(self, dim: int) -> Rows:
        """The same rows in another dim."""
        return replace(self, dim=dim)


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


def size_of(atom: Any, dim: int) -> int:
    """The size of a dim of a variable or literal."""
    return atom.aval.shape[dim]


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of a variable or literal."""
    return tuple(getattr(atom.aval, "shape", ()))


def grown_dim(var: Any, twin: Any, num_rows: tuple[int, int]) -> int | None:
    """The dim that differs between two batch sizes, of `num_rows` rows; None if none does. Raises MixingError if it is no dim of rows."""
    a, b = shape_of(var), shape_of(twin)
    if len(a) != len(b):
        raise MixingError("it has another rank at another batch size")
    dims = [dim for dim, (m, n) in enumerate(zip(a, b, strict=True)) if m != n]
    if not dims:
        return None
    if len(dims) > 1:
        raise MixingError("it pairs rows of the batch with each other: two dims of its result grow with the batch")
    (dim,) = dims
    if a[dim] * num_rows[1] != b[dim] * num_rows[0]:
        raise MixingError(f"it adds rows to the batch or leaves some out: {a[dim]} for a batch of {num_rows[0]}, {b[dim]} for one of {num_rows[1]}")
    return dim


def copies_of(name: str, given: Iterable[Rows | None]) -> int:
    """How often each operand of a primitive has all rows. Raises MixingError if that differs."""
    found = {rows.copies for rows in given if rows and rows.copies}
    if len(found) > 1:
        raise MixingError(f"{name} takes rows of the batch in different orders")
    return found.pop() if found else 0


def refuse_indices(name: str, given: Iterable[Rows | None]) -> None:
    """Raises MixingError if an operand speaks of places in the batch."""
    if any(rows and rows.is_index for rows in given):
        raise MixingError(f"{name} uses the place of a row in the batch, and a microbatch does not know which rows it has")


def together(equation: Equation, given: Iterable[Rows | None]) -> Rows:
    """The rows of a result whose operands have theirs in the same dim."""
    name = equation.primitive.name
    kept = [rows for rows in given if rows]
    refuse_indices(name, kept)
    if len({rows.dim for rows in kept}) > 1:
        raise MixingError(f"{name} takes rows of the batch from different dims")
    return Rows(kept[0].dim, copies_of(name, kept))


def either(a: Rows, b: Rows) -> Rows:
    """The rows of a value that is one of two. Raises MixingError if they don't fit."""
    if a == b:
        return a
    if a.dim != b.dim or (a.copies and b.copies and a.copies != b.copies):
        raise MixingError("it holds rows of the batch in one order, or in another")
    return Rows(a.dim, max(a.copies, b.copies), "lost" if a.is_index or b.is_index else "")


_SIZES = names("shape new_sizes limit_indices start_indices slice_sizes sizes sharding out_sharding")
"""Params that may be others at another batch size, because the dim of the rows is among them; rules look at the other dims."""


def refuse_other_params(equation: Equation, twin: Equation, *, has_rows: bool) -> None:
    """Raises MixingError if an equation is another one at another batch size: x ** batch_size."""
    for key, value in equation.params.items():
        if (has_rows and key in _SIZES) or not (_is_plain(value) and _is_plain(twin.params.get(key))):
            continue
        if repr(value) != repr(twin.params[key]):  # nan is not itself
            raise MixingError(f"{equation.primitive.name} has {key}={value} at one batch size and {twin.params[key]} at another")


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | bool | str | np.generic) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def each(rows: Rows | None, given: Sequence[Any]) -> list[Rows | None]:
    """The same rows for each result."""
    return [rows] * len(given)
