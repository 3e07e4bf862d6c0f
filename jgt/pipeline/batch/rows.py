"""Where a value has the rows of the batch, and what must hold of them so that a microbatch can compute its own.

A primitive or a case that has no rule is assumed to mix rows, because a wrong refusal costs the user a line and a wrong acceptance costs
them a model. Most functions here take the equation together with its `twin`: the same equation, traced at another batch size. What differs
between the two is what depends on the batch size, so no dim has to be guessed from its length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

import numpy as np

from jgt.program import jaxpr as jx
from jgt.program.jaxpr import Atom, Equation


class MixingError(Exception):
    """An equation combines rows of the batch with each other, or may do so; the message says how."""


@dataclass(frozen=True)
class Rows:
    """Dim `dim` of a value runs through all rows of the batch in order, `copies` times.

    [batch, embed] has Rows(0). After reshape(-1) it still has: each row is now `embed` neighbouring elements. [heads, batch]
    after reshape(-1) has Rows(0, copies=heads): all rows, then all rows again. A microbatch has the same dim, but shorter.

    copies: 0 if all rows are equal, or random, so that they fit any order.
    index: "place" if each value is its own place along the dim (arange); "never" if it is False everywhere because it says that
    such a place is negative; "lost" if it was made of places in a way that is not followed.
    columns: the entries of the last dim of an index into several dims that are places.
    """

    dim: int
    copies: int = 1
    index: Literal["", "place", "never", "lost"] = ""
    columns: frozenset[int] = field(default_factory=frozenset[int])

    @property
    def is_index(self) -> bool:
        """Whether the values are places in the batch. A microbatch counts its places from 0, so they are wrong for it."""
        return bool(self.index or self.columns)

    def at(self, dim: int) -> Rows:
        """The same rows in another dim."""
        return replace(self, dim=dim)


OperandRows = Sequence[Rows | None]
"""The rows of each operand of an equation; None for an operand that has none."""


def names(text: str) -> frozenset[str]:
    """The words of a text, as a set: for tables of primitives and of params."""
    return frozenset(text.split())


def size_of(atom: Atom, dim: int) -> int:
    """The size of one dim of a variable or literal."""
    return jx.shape_of(atom)[dim]


def differs_in_shape(atom: Atom, twin: Atom) -> bool:
    """Whether the shape of a value depends on the batch size."""
    return jx.shape_of(atom) != jx.shape_of(twin)


def grown_dim(var: Atom, twin: Atom, num_rows: tuple[int, int]) -> int | None:
    """The dim whose size is proportional to the batch size, None if no dim depends on it.

    num_rows: the batch sizes at which `var` and `twin` were traced. Raises MixingError if the shape depends on the batch size in
    any other way.
    """
    a, b = jx.shape_of(var), jx.shape_of(twin)
    if len(a) != len(b):
        raise MixingError("its rank depends on the batch size")
    dims = [dim for dim, (m, n) in enumerate(zip(a, b, strict=True)) if m != n]
    if not dims:
        return None
    if len(dims) > 1:
        raise MixingError("it pairs rows of the batch with each other: two dims of its result grow with the batch")
    (dim,) = dims
    # Cross-multiplied, because the quotient of two sizes may not be a whole number.
    if a[dim] * num_rows[1] != b[dim] * num_rows[0]:
        raise MixingError(
            f"it adds rows to the batch or leaves some out: {a[dim]} for a batch of {num_rows[0]}, {b[dim]} for one of {num_rows[1]}"
        )
    return dim


def common_copies(name: str, operand_rows: Iterable[Rows | None]) -> int:
    """The number of copies of the rows that each operand of a primitive has. Raises MixingError if operands differ."""
    # Equal or random rows (0 copies) fit any order.
    copies = {rows.copies for rows in operand_rows if rows and rows.copies}
    if len(copies) > 1:
        raise MixingError(f"{name} takes rows of the batch in different orders")
    return copies.pop() if copies else 0


def refuse_indices(name: str, operand_rows: Iterable[Rows | None]) -> None:
    """Raises MixingError if an operand contains places in the batch."""
    if any(rows and rows.is_index for rows in operand_rows):
        raise MixingError(f"{name} uses the place of a row in the batch, and a microbatch does not know which rows it has")


def refuse_columns(rows: Rows | None) -> None:
    """Raises MixingError for an index into several dims: its columns are entries of the last dim, which must not move."""
    if rows and rows.columns:
        refuse_indices("an index", [rows])


def common_rows(equation: Equation, operand_rows: Iterable[Rows | None]) -> Rows:
    """The rows of a result made of operands that have theirs in the same dim, as in x + y. Raises MixingError if they don't fit."""
    name = equation.primitive.name
    present = [rows for rows in operand_rows if rows]
    refuse_indices(name, present)
    if len({rows.dim for rows in present}) > 1:
        raise MixingError(f"{name} takes rows of the batch from different dims")
    return Rows(present[0].dim, common_copies(name, present))


def merged_rows(a: Rows, b: Rows) -> Rows:
    """The rows of a value that comes from one of two places, such as the branches of a cond. Raises MixingError if they don't fit."""
    if a == b:
        return a
    if a.dim != b.dim or (a.copies and b.copies and a.copies != b.copies):
        raise MixingError("it has the rows of the batch in one order or in another, depending on the branch or the iteration")
    # Where the two places differ, nothing is known of an index any more.
    return Rows(a.dim, max(a.copies, b.copies), "lost" if a.is_index or b.is_index else "")


SIZE_PARAMS = names("shape new_sizes limit_indices start_indices slice_sizes sizes sharding out_sharding feature_group_count")
"""Params that depend on the batch size because the rows' dim is among them. The rules check their other dims."""


def refuse_params(equation: Equation, twin: Equation, *, has_rows: bool) -> None:
    """Raises MixingError if a param depends on the batch size: x ** batch_size has its exponent in a param."""
    for key, value in equation.params.items():
        # Functions and programs cannot be compared here. The walk enters programs.
        if (has_rows and key in SIZE_PARAMS) or not (_is_plain(value) and _is_plain(twin.params.get(key))):
            continue
        # Compared as text, because nan != nan.
        if repr(value) != repr(twin.params[key]):
            raise MixingError(f"{equation.primitive.name} has {key}={value} at one batch size and {twin.params[key]} at another")


def _is_plain(value: object) -> bool:
    """Whether a param is a number or text, so that two of them can be compared; functions and programs are not."""
    if isinstance(value, tuple):
        return all(map(_is_plain, cast(tuple[object, ...], value)))
    return isinstance(value, int | float | bool | str | np.generic)
