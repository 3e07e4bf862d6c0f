"""Rules for gather and scatter, and for the indices of rows that go into them.

A lookup by a computed index may read any row, so it is refused, with two exceptions. The lookup may happen within each row:
jnp.take_along_axis and jax.vmap make the rows a batching dim of the gather. Or the index may contain each row's own place:
x[jnp.arange(batch), targets] takes one element from each row. JAX builds the index of the second kind in several steps (negative places
count from the end, the indices of all dims are concatenated), and `index_rows` follows a place through exactly those steps.

XLA's gather and scatter define the terms offset, collapsed, batching and window dims: https://openxla.org/stablehlo/spec#gather
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jax.lax import GatherDimensionNumbers, ScatterDimensionNumbers

from jgt.pipeline.batch.rows import MixingError, OperandRows, Rows, common_copies, refuse_indices, size_of
from jgt.program import jaxpr as jx
from jgt.program.jaxpr import Atom, Equation

BY_INDEX = (
    "it takes rows of the batch by an index, which may point to any row. Use jnp.take_along_axis, jax.vmap, or jnp.arange over "
    "the rows, where each row looks up itself"
)


def index_rows(equation: Equation, twin: Equation, operand_rows: OperandRows) -> Rows | None:
    """The result of a step by which JAX makes an index out of places; None if the equation is not such a step.

    The steps for i = jnp.arange(batch) are: i < 0 ("never"), i + batch ("lost"), select_n of the two (a place again), casts, a
    broadcast to [batch, 1], and the concatenation with the indices of other dims to [batch, num_dims].
    """
    name, first = equation.primitive.name, operand_rows[0]
    if name == "concatenate":
        return _column_rows(equation, operand_rows)
    if not first or first.columns:
        return None
    if name in ("convert_element_type", "copy", "copy_p", "stop_gradient") and jx.is_integer(equation.outvars[0]):
        return first
    # The condition is False everywhere, so the result is the first case.
    if name == "select_n" and first.index == "never" and operand_rows[1]:
        return operand_rows[1]
    if first.index != "place":
        return None
    value, twin_value = _only_number(equation.invars[1:]), _only_number(twin.invars[1:])
    if name == "lt" and value == twin_value == 0:
        return replace(first, index="never")
    if name == "add" and value is not None:
        return replace(first, index="lost")
    return None


def _only_number(atoms: Sequence[Atom]) -> int | float | None:
    """The number that the only operand is, if it is a literal."""
    if len(atoms) != 1 or jx.is_var(atoms[0]) or jx.shape_of(atoms[0]):
        return None
    return atoms[0].val


def _column_rows(equation: Equation, operand_rows: OperandRows) -> Rows | None:
    """The concatenation of columns [batch, 1] to an index [batch, num_dims]: some of the columns are places."""
    dim = equation.params["dimension"]
    present = [rows for rows in operand_rows if rows]
    # XLA's indices have their columns in the last dim, one column for each dim that is indexed.
    is_index = dim == len(jx.shape_of(equation.outvars[0])) - 1 and all(size_of(a, dim) == 1 for a in equation.invars)
    if not is_index or any(rows.columns or rows.index in ("never", "lost") for rows in present) or len({rows.dim for rows in present}) > 1:
        return None
    columns = frozenset(i for i, rows in enumerate(operand_rows) if rows and rows.index == "place")
    return Rows(present[0].dim, common_copies("concatenate", present), columns=columns)


def _points_to_itself(index: Rows, operand: Atom, indices: Atom, dim: int, columns: Sequence[int]) -> bool:
    """Whether an index points, for each row, to that row in dim `dim` of the operand; `columns` has the dim of each column."""
    if size_of(operand, dim) != size_of(indices, index.dim) or dim not in columns:
        return False
    return index.columns == frozenset([list(columns).index(dim)]) or (index.index == "place" and len(columns) == 1)


def _dims_except(atom: Atom, *excluded: Sequence[int]) -> list[int]:
    return [d for d in range(len(jx.shape_of(atom))) if all(d not in dims for dims in excluded)]


def gather(equation: Equation, twin: Equation, operand_rows: OperandRows) -> Rows | None:
    """A lookup: in rows by an index that each of them has, or in a table without rows by an index that has rows."""
    operand, indices = equation.invars[:2]
    x, index = operand_rows[:2]
    numbers: GatherDimensionNumbers = equation.params["dimension_numbers"]
    refuse_indices("gather", [x])
    # The result has the dims of the slices that are taken (offset dims) and, in order, the dims of the indices except the last.
    index_dims = _dims_except(equation.outvars[0], numbers.offset_dims)
    # The last dim of the indices has the columns, so rows must be in another one.
    is_inside = index is not None and index.dim < len(jx.shape_of(indices)) - 1
    if x is None:
        # table[arange(batch)] gives each row its own entry, but every microbatch would begin at entry 0.
        refuse_indices("gather", [index])
        if index is None or not is_inside:
            raise MixingError(BY_INDEX)
        return index.at(index_dims[index.dim])
    if x.dim in numbers.operand_batching_dims:
        batching_dim = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(x.dim)]
        if index is None or index.dim != batching_dim or index.is_index:
            raise MixingError(BY_INDEX)
        return Rows(index_dims[batching_dim], common_copies("gather", [x, index]))
    if x.dim not in numbers.collapsed_slice_dims:
        # The rows are in the slice: it must take all of them.
        if index is not None or equation.params["slice_sizes"][x.dim] != size_of(operand, x.dim):
            raise MixingError(BY_INDEX)
        slice_dims = _dims_except(operand, numbers.collapsed_slice_dims, numbers.operand_batching_dims)
        return x.at(numbers.offset_dims[slice_dims.index(x.dim)])
    if index is None or not is_inside or not _points_to_itself(index, operand, indices, x.dim, numbers.start_index_map):
        raise MixingError(BY_INDEX)
    return Rows(index_dims[index.dim], x.copies)


def scatter(equation: Equation, twin: Equation, operand_rows: OperandRows) -> Rows | None:
    """Updates of each row within that row; or rows added into a table without rows, which is a sum over the batch."""
    operand, indices, updates = equation.invars[:3]
    x, index, update = operand_rows[:3]
    numbers: ScatterDimensionNumbers = equation.params["dimension_numbers"]
    refuse_indices("scatter", [x, update])
    # Dims of the updates that are not windows are the dims of the indices, in order.
    index_dims = _dims_except(updates, numbers.update_window_dims)
    is_paired = index is not None and update is not None and index.dim < len(index_dims) and index_dims[index.dim] == update.dim
    if x is None:
        refuse_indices("scatter", [index])
        if not is_paired:
            raise MixingError("it writes rows of the batch into something that has none")
        # Called for its check alone: index and update have to go through the rows in the same order.
        common_copies("scatter", [index, update])
        return None
    if _is_within_rows(x, index if is_paired else None, operand, indices, numbers):
        by_batching = x.dim in numbers.operand_batching_dims
        return Rows(x.dim, common_copies("scatter", [x, index, update] if by_batching else [x, update]))
    if index is None and update is not None and _is_window_of_rows(x, update, operand, updates, numbers):
        return Rows(x.dim, common_copies("scatter", [x, update]))
    raise MixingError("it writes into rows of the batch by an index, which may point to any row")


def _is_within_rows(x: Rows, index: Rows | None, operand: Atom, indices: Atom, numbers: ScatterDimensionNumbers) -> bool:
    if index is None:
        return False
    if x.dim in numbers.operand_batching_dims:
        batching_dim = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(x.dim)]
        return index.dim == batching_dim and not index.is_index
    is_indexed = x.dim in numbers.inserted_window_dims
    return is_indexed and _points_to_itself(index, operand, indices, x.dim, numbers.scatter_dims_to_operand_dims)


def _is_window_of_rows(x: Rows, update: Rows, operand: Atom, updates: Atom, numbers: ScatterDimensionNumbers) -> bool:
    """Whether each update has all rows, so that its index chooses among the other dims only."""
    window_dims = _dims_except(operand, numbers.inserted_window_dims, numbers.operand_batching_dims)
    is_whole = size_of(updates, update.dim) == size_of(operand, x.dim)
    return x.dim in window_dims and is_whole and update.dim == numbers.update_window_dims[window_dims.index(x.dim)]
