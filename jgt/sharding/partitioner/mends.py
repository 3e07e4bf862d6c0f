# pyright: basic
"""Operations that XLA computes wrongly in a split program, whatever their layout, and the forms of them that it computes correctly.

An example: `dynamic_slice(x, start, 4)` of an x with 16 rows that four devices share. A start of 20 means the last four rows, but XLA
compares the start with the rows of one device. `dynamic_slice(x, clamp(0, start, 12), 4)` means the same and is right.

A *mend* changes the operation and not its layout, so it sends nothing, but for the flags of NaNs. docs/partitioner.md has the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy, stablehlo

from jgt.sharding.partitioner.grid import Splits, count_parts
from jgt.sharding.partitioner.nans import add_flags, keeps_extremes, loses_nans
from jgt.sharding.partitioner.shardy import type_shape


@dataclass(frozen=True, kw_only=True)
class Mend:
    """A form of an operation that XLA computes correctly.

    fault, form: what XLA does, and what jgt writes instead, for messages.
    on_cpu: only XLA for CPUs needs it.
    sends: whether devices send more.
    concerns: whether an operation needs it in some layout.
    is_wrong: whether it does with these layouts of its operands and results.
    apply: writes it.
    """

    fault: str
    form: str
    on_cpu: bool = False
    sends: bool = False
    concerns: Callable[[Any], bool]
    is_wrong: Callable[[Any, Sequence[Splits]], bool]
    apply: Callable[[Any], None]


def has_mends(name: str) -> bool:
    """Whether operations of this name may need mends."""
    return name in _MENDS


def mends_for(op: Any, platform: str) -> list[Mend]:
    """The mends that an operation needs in some layout on a platform."""
    return [mend for mend in _MENDS.get(op.name, ()) if (platform == "cpu" or not mend.on_cpu) and mend.concerns(op)]


def _starts(op: Any) -> tuple[int, tuple[int, ...]]:
    """The number of the first start among the operands of a dynamic slice or update, and the sizes of its window."""
    return (1, type_shape(op.results[0])) if op.name == "stablehlo.dynamic_slice" else (2, type_shape(op.operands[1]))


def _may_exceed(start: Any, largest: int) -> bool:
    """Whether a start may be outside of [0, largest]. XLA does not look at the start of a window that is as large as the array."""
    number = _number(start)
    return largest > 0 and (number is None or not 0 <= number <= largest)


def _number(value: Any) -> int | None:
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


def _far_starts(op: Any) -> dict[int, int]:
    """The dims of a dynamic slice or update whose start may be too large or negative, with the largest one that fits."""
    first, sizes = _starts(op)
    room = enumerate(total - size for total, size in zip(type_shape(op.operands[0]), sizes, strict=True))
    return {d: largest for d, largest in room if _may_exceed(op.operands[first + d], largest)}


def _starts_wrongly(op: Any, layouts: Sequence[Splits]) -> bool:
    """Whether XLA cuts a dim whose start may be wrong: because the dim is split, or because a reader needs only a part of it."""
    _, sizes = _starts(op)
    is_slice = op.name == "stablehlo.dynamic_slice"
    return any(layouts[0][d] or layouts[-1][d] or (sizes[d] > 1 if is_slice else _is_cut(op.results[0], d)) for d in _far_starts(op))


def _is_cut(value: Any, d: int) -> bool:
    """Whether a reader may need a part of a dim. A loop that carries the value, and a slice of one row, do not."""
    return any(_cuts(use.owner, d) for use in value.uses)


def _cuts(reader: Any, d: int) -> bool:
    if reader.name == "sdy.sharding_constraint":
        sharding = sdy.TensorShardingAttr(reader.attributes["sharding"])
        return bool(sdy.DimensionShardingAttr(sharding.dimension_shardings[d]).axes) or _is_cut(reader.results[0], d)
    is_row = reader.name == "stablehlo.dynamic_slice" and type_shape(reader.results[0])[d] == 1
    return not is_row and not reader.name.endswith(".return")


def _clamp_starts(op: Any) -> None:
    first, _ = _starts(op)
    for d, largest in _far_starts(op).items():
        start = op.operands[first + d]
        low, high = (stablehlo.constant(_splat(start.type, n)) for n in (0, largest))
        op.operands[first + d] = stablehlo.clamp(low, start, high)


def _windows(op: Any) -> tuple[list[int], list[int], int]:
    """The sizes of the windows of a gather along the dims that its indices choose from, their largest starts, and the dim of an index."""
    numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    sizes, shape = [*ir.DenseI64ArrayAttr(op.attributes["slice_sizes"])], type_shape(op.operands[0])
    chosen = [*numbers.start_index_map]
    return [sizes[d] for d in chosen], [shape[d] - sizes[d] for d in chosen], numbers.index_vector_dim


def _has_windows(op: Any) -> bool:
    sizes, largest, _ = _windows(op)
    return any(size > 1 and room > 0 for size, room in zip(sizes, largest, strict=True))


def _clamp_indices(op: Any) -> None:
    (_, largest, dim), kind = _windows(op), ir.RankedTensorType(op.operands[1].type)
    element = ir.IntegerType(kind.element_type)
    along = np.reshape(largest, [len(largest) if d == dim else 1 for d in range(kind.rank)])
    high = np.broadcast_to(along, kind.shape).astype(f"{'u' if element.is_unsigned else 'i'}{element.width // 8}")
    low, high = (stablehlo.constant(ir.DenseElementsAttr.get(limit, signless=not element.is_unsigned)) for limit in (0 * high, high))
    op.operands[1] = stablehlo.clamp(low, op.operands[1], high)


def _scattered(op: Any) -> tuple[list[int], list[int]]:
    """The dims of the operand that the indices of a scatter choose from, and the dims of its updates that are not of one window."""
    numbers = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    updates = op.operands[len(op.operands) - 1]
    return [*numbers.scattered_dims_to_operand_dims], [d for d in range(len(type_shape(updates))) if d not in numbers.update_window_dims]


def _has_one_window(op: Any) -> bool:
    """Whether a scatter has one window, or one in each of a batch. XLA for CPUs reads the old numbers by a slice that it does not clamp."""
    numbers = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    batch = numbers.scatter_indices_batching_dims
    shape = type_shape(op.operands[len(op.results)])
    return math.prod(size for d, size in enumerate(shape) if d not in (numbers.index_vector_dim, *batch)) == 1


def _updates_wrongly(op: Any, layouts: Sequence[Splits]) -> bool:
    return any(layouts[0][d] or layouts[-1][d] for d in _scattered(op)[0])


def _shares_updates(op: Any, layouts: Sequence[Splits]) -> bool:
    """Whether devices compare their updates, because the indices or the updates of a scatter are split."""
    return any(layouts[1]) or any(layouts[2][d] for d in _scattered(op)[1])


def _hold_operands(op: Any) -> None:
    """Hides from XLA how the operands were made: by a slice that it would merge with a scatter's own, or by a broadcast."""
    held = stablehlo.OptimizationBarrierOp(list(op.operands)[: len(op.results)]).results
    for n, value in enumerate(held):
        op.operands[n] = value


def _repeated_dims(value: Any, depth: int = 32) -> set[int]:
    """The dims along which XLA may know that a value repeats itself, because it was broadcast. depth: how far back to look."""
    op, shape = value.owner, type_shape(value)
    if isinstance(op, ir.Block) or not shape:
        return set()
    if not depth:
        return set(range(len(shape)))
    operands = [operand for operand in op.operands if type_shape(operand)]
    if op.name == "stablehlo.broadcast_in_dim":
        kept = ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"])
        return set(range(len(shape))) - {d for d, size in zip(kept, type_shape(op.operands[0]), strict=True) if size == shape[d]}
    if op.name == "stablehlo.transpose":
        before = _repeated_dims(operands[0], depth - 1)
        return {d for d, source in enumerate(ir.DenseI64ArrayAttr(op.attributes["permutation"])) if source in before}
    if op.name == "stablehlo.reshape":
        # More dims than XLA may know.
        return set(range(len(shape))) if operands and _repeated_dims(operands[0], depth - 1) else set()
    if op.name not in ("stablehlo.slice", "stablehlo.pad") and any(type_shape(operand) != shape for operand in operands):
        return set()
    found = set(range(len(shape))) if operands else set[int]()
    for operand in operands:
        found &= _repeated_dims(operand, depth - 1) if found else found
    return found


def _reshapes_repeated(op: Any) -> bool:
    """Whether a reshape of a repeated value changes its rank. JAX may write it as a broadcast."""
    before, after = type_shape(op.operands[0]), type_shape(op.results[0])
    return len(before) != len(after) and math.prod(before) == math.prod(after) and bool(_repeated_dims(op.operands[0]))


def _reshapes_wrongly(op: Any, layouts: Sequence[Splits]) -> bool:
    """Whether XLA may take a dim of which each device has one element for the repeated dim beside it.

    It then believes that all devices have the same, and leaves out a permutation of the elements.
    """
    return any(size == count_parts(axes) > 1 for size, axes in zip(type_shape(op.results[0]), layouts[1], strict=True))


def _splat(kind: Any, number: int) -> Any:
    return ir.DenseElementsAttr.get_splat(kind, ir.IntegerAttr.get(ir.RankedTensorType(kind).element_type, number))


_CLAMP = Mend(
    fault="reads or writes elsewhere if the start is outside of the array",
    form="a start that is clamped first",
    concerns=lambda op: bool(_far_starts(op)),
    is_wrong=_starts_wrongly,
    apply=_clamp_starts,
)
_CLAMP_INDICES = Mend(
    fault="reads elsewhere if a window begins outside of the array",
    form="indices that are clamped first",
    concerns=_has_windows,
    is_wrong=lambda op, layouts: True,
    apply=_clamp_indices,
)
_HOLD = Mend(
    fault="reads another row where it updates one row of a split dim",
    form="the operand behind a barrier",
    on_cpu=True,
    concerns=_has_one_window,
    is_wrong=_updates_wrongly,
    apply=_hold_operands,
)
_FORGET = Mend(
    fault="takes a dim of which each device has one element for one that was broadcast, and does not permute it",
    form="the operand behind a barrier",
    concerns=_reshapes_repeated,
    is_wrong=_reshapes_wrongly,
    apply=_hold_operands,
)
_NANS = {
    name: Mend(
        fault="loses NaNs where devices compare their maxima or minima",
        form="flags of NaNs beside them",
        on_cpu=True,
        sends=True,
        concerns=keeps_extremes,
        is_wrong=is_wrong,
        apply=add_flags,
    )
    for name, is_wrong in (("reduce", loses_nans), ("scatter", _shares_updates))
}
_MENDS: dict[str, tuple[Mend, ...]] = {
    "stablehlo.dynamic_slice": (_CLAMP,),
    "stablehlo.dynamic_update_slice": (_CLAMP,),
    "stablehlo.gather": (_CLAMP_INDICES,),
    "stablehlo.reduce": (_NANS["reduce"],),
    "stablehlo.reshape": (_FORGET,),
    "stablehlo.broadcast_in_dim": (_FORGET,),
    "stablehlo.scatter": (_HOLD, _NANS["scatter"]),
}
