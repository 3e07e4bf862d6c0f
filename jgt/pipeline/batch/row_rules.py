"""Rules for the primitives that move rows to another dim or work along a dim, and the table of all rules.

A rule gets an equation, its twin at another batch size, and the rows of its operands, at least one of which has some. It returns the rows
of the results (one `Rows` if all results share them) or raises MixingError. A rule may assume that its answer is compared with the dim that
grows with the batch, so it need not check that dim itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from jgt.pipeline.batch import slices
from jgt.pipeline.batch.indexing import gather, scatter
from jgt.pipeline.batch.rows import (
    MixingError,
    OperandRows,
    Rows,
    common_copies,
    common_rows,
    names,
    refuse_columns,
    refuse_indices,
    size_of,
)
from jgt.program import jaxpr as jx
from jgt.program.jaxpr import Equation

RowRule = Callable[[Equation, Equation, OperandRows], "Rows | list[Rows | None] | None"]


def _reshape(equation: Equation, twin: Equation, operand_rows: OperandRows) -> Rows | None:
    rows = operand_rows[0]
    assert rows
    old, new = jx.shape_of(equation.invars[0]), jx.shape_of(equation.outvars[0])
    order: Sequence[int] | None = equation.params["dimensions"]
    if order is not None:
        # The dims are transposed first.
        refuse_columns(rows)
        old, rows = tuple(old[d] for d in order), rows.at(list(order).index(rows.dim))
    # The dim that grows is the dim of the rows. Without one, no result has rows and `result_rows` drops the answer.
    dim = next((d for d, (m, n) in enumerate(zip(new, jx.shape_of(twin.outvars[0]), strict=True)) if m != n), 0)
    if rows.is_index:
        # Places stay places only if the rows' dim is the same dim as before; dims of size 1 may come and go around it.
        if (old[rows.dim], math.prod(old[: rows.dim])) != (new[dim], math.prod(new[:dim])):
            refuse_indices("reshape", operand_rows)
        refuse_columns(rows)
        return rows.at(dim)
    # Dims in front of the rows' dim repeat all rows, exactly as copies inside the dim do. A reshape keeps the order of the elements,
    # so the total number of repetitions stays the same; it is only divided differently between dims in front and copies inside.
    repetitions, in_front = math.prod(old[: rows.dim]) * (rows.copies or 1), math.prod(new[:dim])
    # Equal rows fit any order, but not once each of them is several neighbouring elements.
    if not rows.copies and (repetitions, old[rows.dim]) == (in_front, new[dim]):
        return rows.at(dim)
    behind = math.prod(new[dim + 1 :])
    copies, remainder = divmod(repetitions, in_front)
    # Groups of neighbouring rows are fine (they are in one microbatch), but not across the end of a copy: there, at an odd
    # batch size, the last row of one copy would be grouped with the first row of the next.
    if remainder or (copies > 1 and math.prod(old[rows.dim + 1 :]) % behind):
        raise MixingError(
            "it reshapes the batch so that no dim of it is the rows in their order (a dim that splits rows into groups has to come second)"
        )
    return Rows(dim, copies)


def _moved_rows(rows: Rows | None, destinations: Sequence[int]) -> Rows | None:
    """The rows after each dim d of the operand has become the dim destinations[d]."""
    refuse_columns(rows)
    return rows.at(int(destinations[rows.dim])) if rows else None


def _transpose(equation: Equation, twin: Equation, operand_rows: OperandRows) -> Rows | None:
    permutation = list(equation.params["permutation"])
    return _moved_rows(operand_rows[0], [permutation.index(d) for d in range(len(permutation))])


def _broadcast(equation: Equation, twin: Equation, operand_rows: OperandRows) -> Rows | None:
    return _moved_rows(operand_rows[0], equation.params["broadcast_dimensions"])


def _without_dims(rows: Rows, removed: set[int]) -> Rows:
    """The rows after dims other than theirs were removed."""
    refuse_columns(rows)
    return rows.at(rows.dim - sum(d < rows.dim for d in removed))


def _named_dims(equation: Equation) -> set[int]:
    """The dims of the first operand along which a primitive works: those that its params name, or the last one."""
    keys = ("axes", "axis", "dimensions", "dimension", "reduction_dimension")
    value: int | Sequence[int] = next((equation.params[key] for key in keys if key in equation.params), -1)
    rank = len(jx.shape_of(equation.invars[0]))
    return {int(d) % rank for d in (value if isinstance(value, Sequence) else (value,))}


def _squeeze(equation: Equation, twin: Equation, operand_rows: OperandRows) -> Rows | None:
    """lax.squeeze, and jnp.unstack, which has a result for each element of a dim."""
    rows, dims = operand_rows[0], _named_dims(equation)
    return _without_dims(rows, dims) if rows and rows.dim not in dims else None


def _reduce(equation: Equation, twin: Equation, operand_rows: OperandRows) -> Rows | None:
    """A reduction over other dims keeps the rows. One over the rows' dim has none; `extent` judges whether it may be taken."""
    rows, dims = common_rows(equation, operand_rows), _named_dims(equation)
    return None if rows.dim in dims else _without_dims(rows, dims)


def _collective(equation: Equation, twin: Equation, operand_rows: OperandRows) -> list[Rows | None]:
    """A psum, say, over the axis of a jax.vmap, which is a reduction; over a mesh axis, the devices may have other rows."""
    if any(isinstance(axis, str) for axis in equation.params["axes"]):
        raise MixingError(f"{equation.primitive.name} combines what devices have, which may be rows of the batch")
    return [_reduce(equation, twin, [rows]) if rows else None for rows in operand_rows]


def _along(equation: Equation, twin: Equation, operand_rows: OperandRows) -> Rows:
    """A primitive that combines the elements of some dims, such as a sort."""
    dims = _named_dims(equation)
    if any(rows and rows.dim in dims for rows in operand_rows):
        raise MixingError(f"{equation.primitive.name} works along the rows of the batch")
    return common_rows(equation, operand_rows)


def _dot(equation: Equation, twin: Equation, operand_rows: OperandRows) -> Rows | None:
    """A matmul: rows times weights keeps rows, rows paired row by row (batch dims) too, and a sum over rows has none."""
    refuse_indices("dot_general", operand_rows)
    contracting, batch = equation.params["dimension_numbers"]
    copies = common_copies("dot_general", operand_rows)
    result_dims: set[int] = set()
    # The contracting dim that has the rows of each operand, so that two operands are summed over the same rows.
    summed: list[int | None] = []
    # The result's dims are the batch dims, the free dims of the first operand and the free dims of the second.
    offset = len(batch[0])
    for atom, rows, contracted, shared in zip(equation.invars, operand_rows, contracting, batch, strict=True):
        free = [d for d in range(len(jx.shape_of(atom))) if d not in (*contracted, *shared)]
        if rows:
            summed.append(list(contracted).index(rows.dim) if rows.dim in contracted else None)
            if rows.dim not in contracted:
                result_dims.add(list(shared).index(rows.dim) if rows.dim in shared else offset + free.index(rows.dim))
        offset += len(free)
    # Either rows survive in one dim and nothing is summed over them, or both operands are summed over the same rows.
    if result_dims and summed == [None] * len(summed) and len(result_dims) == 1:
        return Rows(result_dims.pop(), copies)
    if not result_dims and len(summed) == 2 and len(set(summed)) == 1:
        return None
    raise MixingError("it multiplies rows of the batch with each other")


def _convolution(equation: Equation, twin: Equation, operand_rows: OperandRows) -> Rows:
    numbers, (image, kernel) = equation.params["dimension_numbers"], operand_rows[:2]
    refuse_indices("conv_general_dilated", operand_rows)
    # The groups of features are as large at every batch size, so a row that has kernels of its own has groups of its own.
    sizes = [size_of(e.invars[0], numbers.lhs_spec[1]) // e.params["feature_group_count"] for e in (equation, twin)]
    if image is not None and sizes[0] == sizes[1] and equation.params["batch_group_count"] == 1:
        if kernel is None and image.dim == numbers.lhs_spec[0]:
            return image.at(numbers.out_spec[0])
        if kernel is not None and (image.dim, kernel.dim) == (numbers.lhs_spec[1], numbers.rhs_spec[0]):
            return Rows(numbers.out_spec[1], common_copies("conv_general_dilated", operand_rows))
    raise MixingError("it is a convolution over the rows of the batch")


_SINGLE_ROW_WINDOW = {"window_dimensions": 1, "window_strides": 1, "base_dilation": 1, "window_dilation": 1, "padding": (0, 0)}
"""The params, in the rows' dim, of a window that covers one row."""


def _window(equation: Equation, twin: Equation, operand_rows: OperandRows) -> Rows:
    rows = common_rows(equation, operand_rows)
    for key, single in _SINGLE_ROW_WINDOW.items():
        value = equation.params.get(key)
        if value is not None and value[rows.dim] != single:
            raise MixingError(f"{equation.primitive.name} has a window over the rows of the batch")
    return rows


def _stack(equation: Equation, twin: Equation, operand_rows: OperandRows) -> Rows:
    rows = common_rows(equation, operand_rows)
    return rows.at(rows.dim + (int(equation.params["axis"]) <= rows.dim))


_REDUCTIONS = "reduce reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin"
_SCATTERS = "scatter scatter-add scatter_add scatter-sub scatter-mul scatter_mul scatter-min scatter_min scatter-max scatter_max"
_WINDOWS = "reduce_window reduce_window_sum reduce_window_max reduce_window_min select_and_gather_add select_and_scatter_add"

RULES: dict[str, RowRule] = {
    **dict.fromkeys(names(_REDUCTIONS), _reduce),
    **dict.fromkeys(names("pmax pmin psum"), _collective),
    **dict.fromkeys(names("approx_top_k cumsum cumprod cummax cummin cumlogsumexp rev sort top_k"), _along),
    **dict.fromkeys(names("slice split"), slices.constant_slice),
    **dict.fromkeys(names("dynamic_slice dynamic_update_slice"), slices.computed_slice),
    **dict.fromkeys(names("squeeze unstack"), _squeeze),
    **dict.fromkeys(names(_WINDOWS), _window),
    **dict.fromkeys(names(_SCATTERS), scatter),
    "broadcast_in_dim": _broadcast,
    "concatenate": slices.concatenate,
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "gather": gather,
    "pad": slices.pad,
    "reshape": _reshape,
    "stack": _stack,
    "tile": slices.tile,
    "transpose": _transpose,
}
