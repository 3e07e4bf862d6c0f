"""Rows of the batch that are looked up: gather and scatter, and the indices of rows, jnp.arange(batch), that go into them.

x[jnp.arange(batch), i] takes from each row its own: the index holds the places of the rows in one of its columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jgt import jaxpr as jx
from jgt.jaxpr import Equation
from jgt.pipeline.rows import MixingError, Rows, copies_of, refuse_indices, shape_of, size_of

Given = Sequence[Rows | None]

BY_INDEX = (
    "it takes rows of the batch by an index, which may be of any row. Use jnp.take_along_axis, jax.vmap, or jnp.arange over "
    "the rows, where each row is its own"
)


def of_places(equation: Equation, twin: Equation, given: Given) -> Rows | None:
    """The result of an equation of which an operand holds places of rows; None where it is nothing special.

    These are the steps of which JAX makes an index of several dims: negative places count from the end, then all are
    concatenated.
    """
    name, first = equation.primitive.name, given[0]
    if name == "concatenate":
        return _columns(equation, given)
    if not first or first.columns:
        return None
    if name in ("convert_element_type", "copy", "copy_p", "stop_gradient") and jx.is_integer(equation.outvars[0]):
        return first
    if name == "select_n" and first.index == "never" and given[1]:
        return given[1]
    if first.index != "place":
        return None
    value, other = _number(equation.invars[1:]), _number(twin.invars[1:])
    if name == "lt" and value == other == 0:
        return replace(first, index="never")
    if name == "add" and value is not None:
        return replace(first, index="lost")
    return None


def _number(atoms: Sequence[Any]) -> int | float | None:
    """The number that the only atom is, if it is a literal."""
    if len(atoms) != 1 or jx.is_var(atoms[0]) or shape_of(atoms[0]):
        return None
    return atoms[0].val


def _columns(equation: Equation, given: Given) -> Rows | None:
    """Columns side by side in a last dim, places in some of them."""
    dim = equation.params["dimension"]
    kept = [rows for rows in given if rows]
    is_index = dim == len(shape_of(equation.outvars[0])) - 1 and all(size_of(a, dim) == 1 for a in equation.invars)
    if not is_index or any(rows.columns or rows.index in ("never", "lost") for rows in kept) or len({rows.dim for rows in kept}) > 1:
        return None
    columns = frozenset(i for i, rows in enumerate(given) if rows and rows.index == "place")
    return Rows(kept[0].dim, copies_of("concatenate", kept), columns=columns)


def gather(equation: Equation, twin: Equation, given: Given) -> Rows | None:
    """[rows, ...] by an index for each row, or a table by an index that has rows."""
    del twin
    operand, indices = equation.invars[:2]
    x, index = given[:2]
    numbers = equation.params["dimension_numbers"]
    refuse_indices("gather", [x])
    outside = [d for d in range(len(shape_of(equation.outvars[0]))) if d not in numbers.offset_dims]
    is_inside = index is not None and index.dim < len(shape_of(indices)) - 1
    if x is None:
        refuse_indices("gather", [index])
        if index is None or not is_inside:
            raise MixingError(BY_INDEX)
        return index.at(outside[index.dim])
    if x.dim in numbers.operand_batching_dims:
        own = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(x.dim)]
        if index is None or index.dim != own or index.is_index:
            raise MixingError(BY_INDEX)
        return Rows(outside[own], copies_of("gather", [x, index]))
    if x.dim not in numbers.collapsed_slice_dims:
        if index is not None or equation.params["slice_sizes"][x.dim] != size_of(operand, x.dim):
            raise MixingError(BY_INDEX)
        kept = [d for d in range(len(shape_of(operand))) if d not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
        return x.at(numbers.offset_dims[kept.index(x.dim)])
    if index is None or not is_inside or not _is_own(index, operand, indices, x.dim, numbers.start_index_map):
        raise MixingError(BY_INDEX)
    return Rows(outside[index.dim], x.copies)


def _is_own(index: Rows, operand: Any, indices: Any, dim: int, columns: Sequence[int]) -> bool:
    """Whether an index finds for each row that row, in dim `dim` of the operand; columns: the dim that each column is for."""
    if size_of(operand, dim) != size_of(indices, index.dim) or dim not in columns:
        return False
    return index.columns == {list(columns).index(dim)} or (index.index == "place" and len(columns) == 1)


def scatter(equation: Equation, twin: Equation, given: Given) -> Rows | None:
    """Updates for each row into that row, or rows added up by an index."""
    del twin
    operand, indices, updates = equation.invars[:3]
    x, index, update = given[:3]
    numbers = equation.params["dimension_numbers"]
    refuse_indices("scatter", [x, update])
    # Dims of the updates that are no windows are the dims of the indices, in order.
    outside = [d for d in range(len(shape_of(updates))) if d not in numbers.update_window_dims]
    is_paired = index is not None and update is not None and index.dim < len(outside) and outside[index.dim] == update.dim
    if x is None:
        refuse_indices("scatter", [index])
        if not is_paired:
            raise MixingError("it writes rows of the batch into something that has none")
        copies_of("scatter", [index, update])
        return None
    if x.dim in numbers.operand_batching_dims:
        own = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(x.dim)]
        if is_paired and index and index.dim == own and not index.is_index:
            return Rows(x.dim, copies_of("scatter", [x, index, update]))
    elif x.dim in numbers.inserted_window_dims:
        if is_paired and index and _is_own(index, operand, indices, x.dim, numbers.scatter_dims_to_operand_dims):
            return Rows(x.dim, copies_of("scatter", [x, update]))
    elif index is None and update is not None:
        kept = [d for d in range(len(shape_of(operand))) if d not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)]
        is_whole = size_of(updates, update.dim) == size_of(operand, x.dim)
        if is_whole and update.dim == numbers.update_window_dims[kept.index(x.dim)]:
            return Rows(x.dim, copies_of("scatter", [x, update]))
    raise MixingError("it writes into rows of the batch by an index, which may be of any row")
