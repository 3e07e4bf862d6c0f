"""Whether an equation leaves the rows of a batch alone: row i of its results comes from row i of its operands and nothing else.

Which dim holds the rows is seen by comparing the equation at two batch sizes: it is the one that grows. If rows were merged
with other dims they are its major part, [batch * seq, ...].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jgt import jaxpr as jx
from jgt.jaxpr import Equation

INDEXED = "it indexes the rows of the batch. Use jnp.take_along_axis, which stays within a row"


def growing(var: Any, twin: Any) -> list[int]:
    """The dims of a value that differ between two batch sizes."""
    a, b = shape_of(var), shape_of(twin)
    return [dim for dim, (m, n) in enumerate(zip(a, b, strict=False)) if m != n] if len(a) == len(b) else [0, 1]


def shape_of(var: Any) -> tuple[int, ...]:
    """The shape of a variable or literal."""
    return tuple(getattr(var.aval, "shape", ()))


def mixing(equation: Equation, twin: Equation) -> str | None:
    """Why an equation whose results have rows mixes or moves them; None when it does not."""
    given = [growing(a, b) for a, b in zip(equation.invars, twin.invars, strict=True)]
    made = [growing(a, b) for a, b in zip(equation.outvars, twin.outvars, strict=True)]
    if any(len(dims) > 1 for dims in made):
        return "it pairs rows of the batch with each other: two dims of its result grow with the batch"
    operands = [dims[0] if dims else None for dims in given]
    results = [dims[0] if dims else None for dims in made]
    check = _CHECKS.get(equation.primitive.name)
    if check is not None:
        return check(equation, twin, operands, results[0])
    rows = {d for d in operands if d is not None}
    if not rows or {*rows, *(d for d in results if d is not None)} == {0}:
        # What is not known (a kernel) is taken to work row by row if the rows come first.
        return None
    same = {shape_of(v) for v in [*equation.invars, *equation.outvars] if shape_of(v)}
    if jx.is_elementwise(equation) and len(same) == 1:
        return None
    return f"{equation.primitive.name} of a batch that is not the first dim is not known to keep rows apart"


Check = Callable[[Equation, Equation, Sequence[int | None], int | None], str | None]


def _touching(*keys: str) -> Check:
    """Primitives that work along dims given by a parameter, which must not be the rows'."""

    def check(equation: Equation, twin: Equation, operands: Sequence[int | None], result: int | None) -> str | None:
        del twin, result
        value = next(equation.params[key] for key in keys if key in equation.params)
        dims = set(value) if isinstance(value, tuple | list) else {int(value)}
        if any(d in dims for d in operands if d is not None):
            return f"{equation.primitive.name} works along the batch"
        return None

    return check


def _nothing(equation: Equation, twin: Equation, operands: Sequence[int | None], result: int | None) -> str | None:
    del equation, twin, operands, result


def _reshape(equation: Equation, twin: Equation, operands: Sequence[int | None], result: int | None) -> str | None:
    del twin
    before, after = shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    if operands[0] is None or result is None or math.prod(before[: operands[0]]) == math.prod(after[:result]):
        return None
    return "it reshapes the batch so that a dim of it is no longer rows in their order"


def _iota(equation: Equation, twin: Equation, operands: Sequence[int | None], result: int | None) -> str | None:
    del twin, operands
    return "it numbers the rows of the batch, and a microbatch does not know which rows it has" if equation.params["dimension"] == result else None


def _windows(equation: Equation, twin: Equation, operands: Sequence[int | None], result: int | None) -> str | None:
    """slice, dynamic_slice, pad: whole along the rows."""
    del twin
    dim, params = operands[0], equation.params
    if dim is None or result is None:
        return None
    size = shape_of(equation.invars[0])[dim]
    whole = {
        "slice": lambda: (params["start_indices"][dim], params["limit_indices"][dim], (params["strides"] or {dim: 1})[dim]) == (0, size, 1),
        "dynamic_slice": lambda: params["slice_sizes"][dim] == size,
        "pad": lambda: tuple(params["padding_config"][dim]) == (0, 0, 0),
        "dynamic_update_slice": lambda: shape_of(equation.invars[1])[dim] == size,
    }[equation.primitive.name]
    return None if whole() else f"{equation.primitive.name} takes some rows of the batch"


def _update_slice(equation: Equation, twin: Equation, operands: Sequence[int | None], result: int | None) -> str | None:
    if operands[0] is None or operands[1] not in (None, operands[0]):
        return "dynamic_update_slice moves rows of the batch"
    return _windows(equation, twin, operands, result)


def _gather(equation: Equation, twin: Equation, operands: Sequence[int | None], result: int | None) -> str | None:
    del twin, result
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    rows, indices = operands[0], operands[1]
    if rows is None:
        return None
    if rows in numbers.operand_batching_dims:
        own = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(rows)]
        return None if indices == own else INDEXED
    whole = sizes[rows] == shape_of(equation.invars[0])[rows]
    return None if whole and rows not in numbers.collapsed_slice_dims and indices is None else INDEXED


def _scatter(equation: Equation, twin: Equation, operands: Sequence[int | None], result: int | None) -> str | None:
    del twin, result
    numbers = equation.params["dimension_numbers"]
    rows, indices = operands[0], operands[1]
    if rows is None:
        return None
    if rows in numbers.operand_batching_dims:
        own = numbers.scatter_indices_batching_dims[numbers.operand_batching_dims.index(rows)]
        return None if indices == own else INDEXED
    whole = rows not in numbers.scatter_dims_to_operand_dims and rows not in numbers.inserted_window_dims
    return None if whole and indices is None else INDEXED


def _convolution(equation: Equation, twin: Equation, operands: Sequence[int | None], result: int | None) -> str | None:
    del twin, result
    numbers = equation.params["dimension_numbers"]
    is_batch = operands[0] == numbers.lhs_spec[0] and operands[1] is None and equation.params["batch_group_count"] == 1
    return None if is_batch else "a convolution over the batch"


def _last(equation: Equation, twin: Equation, operands: Sequence[int | None], result: int | None) -> str | None:
    """Primitives that work along the last dim, or along the one their params name."""
    del twin, result
    axis = equation.params.get("axis", -1)
    rank = len(shape_of(equation.invars[0]))
    return f"{equation.primitive.name} works along the batch" if operands[0] == axis % rank else None


_REDUCTIONS = "sum max min prod and or xor".split()

_CHECKS: dict[str, Check] = {
    # Pairing rows shows in the result's shape, a contraction of them in a result without rows.
    **dict.fromkeys(("dot_general", "transpose", "squeeze", "broadcast_in_dim", "expand_dims", "select_n", "clamp"), _nothing),
    **dict.fromkeys(("convert_element_type", "name", "sharding_constraint", "optimization_barrier", "stop_gradient", "copy"), _nothing),
    **dict.fromkeys([f"reduce_{kind}" for kind in _REDUCTIONS], _touching("axes")),
    **dict.fromkeys(("argmax", "argmin"), _touching("axes")),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "split"), _touching("axis")),
    **dict.fromkeys(("sort", "concatenate"), _touching("dimension")),
    **dict.fromkeys(("slice", "dynamic_slice", "pad"), _windows),
    **dict.fromkeys([f"scatter{kind}" for kind in ("", "-add", "_add", "_mul", "_min", "_max", "-mul", "-min", "-max")], _scatter),
    "rev": _touching("dimensions"),
    "dynamic_update_slice": _update_slice,
    "reshape": _reshape,
    "iota": _iota,
    "gather": _gather,
    "conv_general_dilated": _convolution,
    "top_k": _last,
    "approx_top_k": _last,
}
