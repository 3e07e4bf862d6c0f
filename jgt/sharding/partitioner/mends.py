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
from importlib import metadata
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from jgt.sharding.partitioner.shardy import Splits, type_shape

_MERGES_SLICES = tuple(int(part) for part in metadata.version("jaxlib").split(".")[:2]) < (0, 12)
"""Whether XLA makes one slice of two without clamping the second (openxla/xla#49121)."""


@dataclass(frozen=True, kw_only=True)
class Mend:
    """A form of an operation that XLA computes correctly.

    fault, form: what XLA does, and what jgt writes instead, for messages. on_cpu: only XLA for CPUs needs it. sends: whether devices send
    more. is_wrong: whether the operation needs it, by the layouts of its operands and results. apply: writes it.
    """

    fault: str
    form: str
    on_cpu: bool
    sends: bool
    is_wrong: Callable[[Any, Sequence[Splits]], bool]
    apply: Callable[[Any], None]


def mends_for(name: str, platform: str) -> tuple[Mend, ...]:
    """The mends that operations of this name may need on a platform."""
    return tuple(mend for mend in _MENDS.get(name, ()) if platform == "cpu" or not mend.on_cpu)


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


def _starts_wrongly(op: Any, layouts: Sequence[Splits]) -> bool:
    first, sizes = _starts(op)
    room = [total - size for total, size in zip(type_shape(op.operands[0]), sizes, strict=True)]
    return any((layouts[0][d] or layouts[-1][d]) and _may_exceed(op.operands[first + d], most) for d, most in enumerate(room))


def _clamp_starts(op: Any) -> None:
    first, sizes = _starts(op)
    for d, (size, total) in enumerate(zip(sizes, type_shape(op.operands[0]), strict=True)):
        start = op.operands[first + d]
        if _may_exceed(start, total - size):
            low, high = (stablehlo.constant(_splat(start.type, n)) for n in (0, total - size))
            op.operands[first + d] = stablehlo.clamp(low, start, high)


def _scattered(op: Any) -> tuple[list[int], list[int]]:
    """The dims of the operand that the indices of a scatter choose from, and the dims of its updates that are not of one window."""
    numbers = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    updates = op.operands[len(op.operands) - 1]
    return [*numbers.scattered_dims_to_operand_dims], [d for d in range(len(type_shape(updates))) if d not in numbers.update_window_dims]


def _updates_wrongly(op: Any, layouts: Sequence[Splits]) -> bool:
    """Whether a scatter has one window, along a split dim. XLA for CPUs reads the old numbers by a slice whose start it does not clamp."""
    chosen, many = _scattered(op)
    shape = type_shape(op.operands[len(op.operands) - 1])
    return math.prod(shape[d] for d in many) == 1 and any(layouts[0][d] or layouts[-1][d] for d in chosen)


def _hold_operands(op: Any) -> None:
    """Keeps the slice that makes a device's part of the operand apart from the scatter's own."""
    count = len(op.results)
    held = stablehlo.OptimizationBarrierOp(list(op.operands)[:count]).results
    for n in range(count):
        op.operands[n] = held[n]


def _combines_extremes(op: Any) -> bool:
    """Whether a reduction or a scatter of floating-point numbers keeps the larger or the smaller of two."""
    inside = [inner.name for inner in op.regions[0].blocks[0].operations]
    return len(op.results) == 1 and _is_float(op.results[0]) and inside[:-1] in (["stablehlo.maximum"], ["stablehlo.minimum"])


def _reduces_wrongly(op: Any, layouts: Sequence[Splits]) -> bool:
    return _combines_extremes(op) and any(layouts[0][d] for d in ir.DenseI64ArrayAttr(op.attributes["dimensions"]))


def _scatters_wrongly(op: Any, layouts: Sequence[Splits]) -> bool:
    return _combines_extremes(op) and any(layouts[2][d] for d in _scattered(op)[1])


def _add_nans(op: Any) -> None:
    """Has the same operation tell beside it which results are of a NaN: by flags, 1 for a NaN where it keeps the larger of two, else 0."""
    of_nan = float(next(iter(op.regions[0].blocks[0].operations)).name == "stablehlo.maximum")
    flags = op.clone(ir.InsertionPoint(op))
    for n, value in enumerate(op.operands):
        if _is_float(value):
            with ir.InsertionPoint(flags):
                flags.operands[n] = stablehlo.convert(value.type, _compare(value, value, "NE" if of_nan else "EQ"))
    result = op.results[0]
    with ir.InsertionPoint.after(op):
        nan, flag = (stablehlo.constant(_splat(result.type, number)) for number in (math.nan, of_nan))
        chosen = stablehlo.select(_compare(flags.results[0], flag, "EQ"), nan, result)
    result.replace_all_uses_except(chosen, chosen.owner.operation)


def _is_float(value: Any) -> bool:
    return isinstance(ir.RankedTensorType(value.type).element_type, ir.FloatType)


def _compare(a: Any, b: Any, how: str) -> Any:
    return stablehlo.compare(a, b, stablehlo.ComparisonDirectionAttr.get(how))


def _splat(kind: Any, number: float) -> Any:
    element = ir.RankedTensorType(kind).element_type
    scalar = ir.FloatAttr.get(element, number) if isinstance(element, ir.FloatType) else ir.IntegerAttr.get(element, int(number))
    return ir.DenseElementsAttr.get_splat(kind, scalar)


_CLAMP = Mend(
    fault="reads or writes elsewhere if the start is outside of a split dim",
    form="a start that is clamped first",
    on_cpu=False,
    sends=False,
    is_wrong=_starts_wrongly,
    apply=_clamp_starts,
)
_HOLD = Mend(
    fault="reads another row where it updates one row of a split dim",
    form="the operand behind a barrier",
    on_cpu=True,
    sends=False,
    is_wrong=_updates_wrongly,
    apply=_hold_operands,
)
_NANS = {
    name: Mend(
        fault="loses NaNs where devices compare their maxima or minima",
        form="flags of NaNs beside them",
        on_cpu=True,
        sends=True,
        is_wrong=is_wrong,
        apply=_add_nans,
    )
    for name, is_wrong in (("reduce", _reduces_wrongly), ("scatter", _scatters_wrongly))
}
_MENDS: dict[str, tuple[Mend, ...]] = {
    "stablehlo.dynamic_slice": (_CLAMP,),
    "stablehlo.dynamic_update_slice": (_CLAMP,),
    "stablehlo.reduce": (_NANS["reduce"],),
    "stablehlo.scatter": (*([_HOLD] if _MERGES_SLICES else []), _NANS["scatter"]),
}
