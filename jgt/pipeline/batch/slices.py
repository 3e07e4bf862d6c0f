"""Rules for the primitives that take parts of a dim, or put parts and copies together: slice, split, concatenate, pad, tile.

A microbatch does not have a part of the rows, since the first half of the batch lies in other microbatches than the second. Three cases are
safe. A slice may take the whole rows' dim. It may take every n-th row where n divides both batch sizes, because n neighbours are then in
the same microbatch. And where the dim has several copies of all rows, as after concatenate([x, y]), it may take whole copies.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

from jgt.pipeline.batch.rows import MixingError, OperandRows, Rows, common_rows, refuse_columns, refuse_indices, size_of
from jgt.program import jaxpr as jx
from jgt.program.jaxpr import Equation

_OTHER_PART = "{} takes another part at another batch size"


class _Slice(NamedTuple):
    """The part of a dim of this size that a slice takes."""

    size: int
    start: int
    limit: int
    stride: int


def constant_slice(equation: Equation, twin: Equation, operand_rows: OperandRows) -> list[Rows | None]:
    """lax.slice, and lax.split, which has a result for each part of one dim: the params say what is taken."""
    rows = operand_rows[0]
    assert rows
    refuse_columns(rows)
    results: list[Rows | None] = []
    for taken, twin_taken in zip(_slices_of(equation), _slices_of(twin), strict=True):
        if any(a[1:] != b[1:] for d, (a, b) in enumerate(zip(taken, twin_taken, strict=True)) if d != rows.dim):
            raise MixingError(_OTHER_PART.format(equation.primitive.name))
        results.append(_sliced_rows(rows, taken[rows.dim], twin_taken[rows.dim]))
    return results


def _slices_of(equation: Equation) -> list[list[_Slice]]:
    """The part of each dim that each result takes."""
    shape, params = jx.shape_of(equation.invars[0]), equation.params
    if "sizes" not in params:
        strides: tuple[int, ...] = params["strides"] or (1,) * len(shape)
        return [list(map(_Slice, shape, params["start_indices"], params["limit_indices"], strides))]
    axis: int = params["axis"]
    whole = [_Slice(size, 0, size, 1) for size in shape]
    ends: list[int] = [0, *accumulate(params["sizes"])]
    return [[*whole[:axis], _Slice(shape[axis], start, end, 1), *whole[axis + 1 :]] for start, end in pairwise(ends)]


def _sliced_rows(rows: Rows, taken: _Slice, twin_taken: _Slice) -> Rows:
    """The rows after slicing their own dim, at two batch sizes. Raises MixingError if some rows are taken and others not."""
    both = (taken, twin_taken)
    if all(s[1:] == (0, s.size, 1) for s in both):
        return rows
    refuse_indices("slice", [rows])
    start, stride = taken.start, taken.stride
    # One row of each group of `stride` neighbours, the same one of every group.
    if stride > 1 and rows.copies < 2 and all(_takes_one_of_each_group(s, start, stride) for s in both):
        return rows
    # Both batch sizes count: constant bounds that cut out a whole copy at one size need not do so at the other.
    ranges = {_range_of_copies(s, rows.copies) for s in both}
    if len(ranges) > 1:
        raise MixingError(_OTHER_PART.format("slice"))
    ((first, last),) = ranges
    return Rows(rows.dim, last - first)


def _takes_one_of_each_group(taken: _Slice, start: int, stride: int) -> bool:
    return taken.size % stride == 0 and taken.start == start < stride and taken.limit > taken.size - stride + start


def _range_of_copies(taken: _Slice, copies: int) -> tuple[int, int]:
    """The first and the last copy of the rows that a slice takes."""
    copy_size = taken.size // max(copies, 1)
    if copies < 2 or taken.stride != 1 or taken.start % copy_size or taken.limit % copy_size:
        raise MixingError("it takes some rows of the batch and leaves the others")
    return taken.start // copy_size, taken.limit // copy_size


def computed_slice(equation: Equation, twin: Equation, operand_rows: OperandRows) -> Rows:
    """lax.dynamic_slice and lax.dynamic_update_slice, whose start is computed.

    The part (the result, or the update) must cover the whole dim of the rows, where the start can only be 0.
    """
    name, rows = equation.primitive.name, operand_rows[0]
    is_update = name == "dynamic_update_slice"
    part = equation.invars[1] if is_update else equation.outvars[0]
    is_whole = rows is not None and size_of(part, rows.dim) == size_of(equation.invars[0], rows.dim)
    if not is_whole or (is_update and operand_rows[1] is None):
        raise MixingError(f"{name} takes some rows of the batch and leaves the others")
    return common_rows(equation, operand_rows)


def concatenate(equation: Equation, twin: Equation, operand_rows: OperandRows) -> Rows:
    """Along another dim the rows stay; along their own, operands that each have all rows once become copies."""
    rows, dim = common_rows(equation, operand_rows), int(equation.params["dimension"])
    if dim != rows.dim:
        return rows
    # Operands of the same shape have the same number of rows; with a table or a class token the dim would not be the batch.
    if rows.copies > 1 or not all(operand_rows) or len({jx.shape_of(a) for a in equation.invars}) > 1:
        raise MixingError("it concatenates rows of the batch with others")
    return Rows(dim, len(operand_rows))


def pad(equation: Equation, twin: Equation, operand_rows: OperandRows) -> Rows:
    """Padding of other dims."""
    rows = operand_rows[0]
    if rows is None or tuple(equation.params["padding_config"][rows.dim]) != (0, 0, 0):
        raise MixingError("it adds rows to the batch")
    return common_rows(equation, operand_rows)


def tile(equation: Equation, twin: Equation, operand_rows: OperandRows) -> Rows:
    """A dim is repeated. Where it is the rows' own dim, the result has copies of the rows."""
    rows = common_rows(equation, operand_rows)
    return Rows(rows.dim, rows.copies * int(equation.params["reps"][rows.dim]))


def tiled_rows(equation: Equation, twin: Equation, num_rows: tuple[int, int]) -> Rows:
    """The rows of a tile that repeats something without rows as often as the batch has rows, or a multiple of it."""
    dim = next(d for d, (m, n) in enumerate(zip(equation.params["reps"], twin.params["reps"], strict=True)) if m != n)
    if size_of(equation.invars[0], dim) == 1:
        return Rows(dim, 0)
    # Several elements for each row: a microbatch has the same only if each row begins with the first of them.
    if equation.params["reps"][dim] % num_rows[0] or twin.params["reps"][dim] % num_rows[1]:
        raise MixingError("tile repeats something that is not the batch, and gives the rows of the batch different parts of it")
    return Rows(dim)
