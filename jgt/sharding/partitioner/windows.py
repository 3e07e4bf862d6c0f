# pyright: basic
"""Windows whose start is inside of an array: of dynamic slices, of their updates, and of gathers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy, stablehlo

from jgt.sharding.partitioner.grid import Splits, count_parts
from jgt.sharding.partitioner.shardy import made_of, type_shape


def _starts(op: ir.Operation) -> tuple[int, tuple[int, ...]]:
    """The number of the first start among the operands of a dynamic slice or update, and the sizes of its window."""
    return (1, type_shape(op.results[0])) if op.name == "stablehlo.dynamic_slice" else (2, type_shape(op.operands[1]))


def _may_exceed(start: ir.Value, largest: int) -> bool:
    """Whether a start may be outside of [0, largest]. XLA does not look at the start of a window that is as large as the array."""
    number = _number(start)
    return largest > 0 and (number is None or not 0 <= number <= largest)


def _number(value: ir.Value) -> int | None:
    """The number that a scalar is for certain. JAX counts negative starts from the end by `select(start < 0, start + size, start)`."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        return None
    if owner.name in ("stablehlo.constant", "sdy.constant"):
        return next(iter(ir.DenseIntElementsAttr(owner.attributes["value"])))
    if owner.name == "stablehlo.select" and owner.operands[0].owner.name == "stablehlo.compare":
        # The compared start and the chosen one are two constants of the same number.
        start, chosen = _number(owner.operands[0].owner.operands[0]), _number(owner.operands[2])
        return chosen if chosen is not None and chosen == start and chosen >= 0 else None
    return None


def far_starts(op: ir.Operation) -> dict[int, int]:
    """The dims of a dynamic slice or update whose start may be too large or negative, with the largest one that fits."""
    first, sizes = _starts(op)
    room = enumerate(total - size for total, size in zip(type_shape(op.operands[0]), sizes, strict=True))
    return {d: largest for d, largest in room if _may_exceed(op.operands[first + d], largest)}


def starts_wrongly(op: ir.Operation, layouts: Sequence[Splits]) -> bool:
    """Whether XLA cuts a dim whose start may be wrong: because the dim is split, or because a reader needs only a part of it."""
    (_, sizes), is_update = _starts(op), op.name == "stablehlo.dynamic_update_slice"
    merges = not is_update and _is_cut_out(op.operands[0])
    needs = [_is_cut(op.results[0], d) if is_update else merges or size > 1 for d, size in enumerate(sizes)]
    return any(layouts[0][d] or layouts[-1][d] or needs[d] for d in far_starts(op))


def _is_cut(value: ir.Value, d: int) -> bool:
    """Whether a reader may need a part of a dim. A loop that carries the value, and a slice of one row, do not."""
    return any(_cuts(use.owner, d) for use in value.uses)


def _cuts(reader: ir.Operation | ir.OpView, d: int) -> bool:
    if reader.name == "sdy.sharding_constraint":
        sharding = sdy.TensorShardingAttr(reader.attributes["sharding"])
        return bool(sdy.DimensionShardingAttr(sharding.dimension_shardings[d]).axes) or _is_cut(reader.results[0], d)
    is_row = reader.name == "stablehlo.dynamic_slice" and type_shape(reader.results[0])[d] == 1
    return not is_row and not reader.name.endswith(".return")


def clamp_starts(op: ir.Operation) -> None:
    first, _ = _starts(op)
    for d, largest in far_starts(op).items():
        start = op.operands[first + d]
        low, high = (stablehlo.constant(_splat(start.type, n)) for n in (0, largest))
        op.operands[first + d] = stablehlo.clamp(low, start, high)


def _windows(op: ir.Operation) -> tuple[list[int], list[int], int]:
    """The sizes of the windows of a gather along the dims that its indices choose from, their largest starts, and the dim of an index."""
    numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    sizes, shape = [*ir.DenseI64ArrayAttr(op.attributes["slice_sizes"])], type_shape(op.operands[0])
    chosen = [*numbers.start_index_map]
    return [sizes[d] for d in chosen], [shape[d] - sizes[d] for d in chosen], numbers.index_vector_dim


def has_windows(op: ir.Operation) -> bool:
    sizes, largest, _ = _windows(op)
    return any(size > 1 and room > 0 for size, room in zip(sizes, largest, strict=True))


def _is_cut_out(value: ir.Value) -> bool:
    """Whether a value may be a window of another one. XLA makes one slice of two, and then does not clamp the start of the second one."""
    found = [value.owner for value in made_of(value, 8) if not isinstance(value.owner, ir.Block)]
    return any(op.name in ("stablehlo.gather", "stablehlo.dynamic_slice") for op in found)


def has_rows_of_windows(op: ir.Operation) -> bool:
    return not has_windows(op) and any(room > 0 for room in _windows(op)[1]) and _is_cut_out(op.operands[0])


def has_one_row(op: ir.Operation, layouts: Sequence[Splits]) -> bool:
    """Whether a gather is a slice on each device."""
    within = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"]).offset_dims
    sizes = enumerate(zip(type_shape(op.results[0]), layouts[-1], strict=True))
    return math.prod(size // count_parts(axes) for d, (size, axes) in sizes if d not in within) == 1


def clamp_indices(op: ir.Operation) -> None:
    (_, largest, dim), kind = _windows(op), ir.RankedTensorType(op.operands[1].type)
    element = ir.IntegerType(kind.element_type)
    along = np.reshape(largest, [len(largest) if d == dim else 1 for d in range(kind.rank)])
    high = np.broadcast_to(along, kind.shape).astype(f"{'u' if element.is_unsigned else 'i'}{element.width // 8}")
    low, high = (stablehlo.constant(ir.DenseElementsAttr.get(limit, signless=not element.is_unsigned)) for limit in (0 * high, high))
    op.operands[1] = stablehlo.clamp(low, op.operands[1], high)


def _splat(kind: ir.Type, number: int) -> ir.Attribute:
    return ir.DenseElementsAttr.get_splat(kind, ir.IntegerAttr.get(ir.RankedTensorType(kind).element_type, number))
