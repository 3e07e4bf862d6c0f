# pyright: basic
"""NaNs that XLA for CPUs loses where devices compare their maxima or minima, and the flags that bring them back.

A device's part has the maximum NaN if it has a NaN, but the larger of NaN and a number is the number there. So the same operation is
computed on flags beside it: which numbers are NaN, and which results are of one.

A softmax needs no flags. It subtracts the maximum of a row from the row, and divides by the sum of the row. If the row has a NaN, so has
everything that is computed from the maximum: the sum is NaN. `_shows_anyway` proves that from the operations behind the maximum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from jgt.sharding.partitioner.grid import Splits
from jgt.sharding.partitioner.shardy import type_shape

_OF_NAN = "abs add subtract multiply divide negate exponential exponential_minus_one log log_plus_one tanh sqrt rsqrt convert"
_KEEPS = {f"stablehlo.{name}" for name in _OF_NAN.split()} | {"sdy.sharding_constraint", "stablehlo.optimization_barrier"}
"""Operations number by number whose result is NaN where an operand is."""
_BY_NUMBER = _KEEPS | {f"stablehlo.{name}" for name in ("compare", "select", "is_finite", "maximum", "minimum", "and", "or", "not")}
_MOST = 200
"""The most operations behind a maximum that a proof looks at."""

_Place = tuple[int | None, ...]
"""The dim of the reduced array that each dim of a value belongs to."""


def keeps_extremes(op: ir.Operation) -> bool:
    """Whether a reduction or a scatter of floating-point numbers keeps the larger or the smaller of two."""
    return len(op.results) == 1 and is_float(op.results[0]) and _combiner(op) in ("stablehlo.maximum", "stablehlo.minimum")


def is_float(value: ir.Value) -> bool:
    """Whether an array has floating-point numbers."""
    return isinstance(ir.RankedTensorType(value.type).element_type, ir.FloatType)


def loses_nans(op: ir.Operation, layouts: Sequence[Splits]) -> bool:
    """Whether a reduction with these layouts loses a NaN that is seen."""
    return any(layouts[0][d] for d in _reduced(op)) and not _shows_anyway(op)


def _combiner(op: ir.Operation | ir.OpView) -> str:
    """The only operation that combines two numbers; empty if there are several."""
    inside = list(op.regions[0].blocks[0].operations)
    return inside[0].name if len(inside) == 2 else ""


def _reduced(op: ir.Operation | ir.OpView) -> tuple[int, ...]:
    return tuple(ir.DenseI64ArrayAttr(op.attributes["dimensions"]))


def _shows_anyway(op: ir.Operation) -> bool:
    """Whether everything that is computed from a reduction is NaN anyway if its operand has a NaN."""
    kept: _Place = tuple(d for d in range(len(type_shape(op.operands[0]))) if d not in _reduced(op))
    spoiled = _spoiled(op, kept)
    waiting: list[tuple[ir.Value, _Place]] = [(op.results[0], kept)]
    seen: set[ir.Value] = set()
    while waiting:
        value, place = waiting.pop()
        for use in value.uses:
            result, moved = _behind(use, place)
            if result is None or len(seen) > _MOST:
                return False
            if result not in seen and not _covers(spoiled.get(result), moved, kept):
                seen.add(result)
                waiting.append((result, moved))
    return True


def _covers(spoiled: _Place | None, place: _Place, kept: _Place) -> bool:
    """Whether a value that is NaN in the rows of one place covers one that was computed in the rows of another."""
    return spoiled is not None and all(d in spoiled and d in place and spoiled.index(d) == place.index(d) for d in kept)


def _spoiled(op: ir.Operation, kept: _Place) -> dict[ir.Value, _Place]:
    """The values that are NaN all along a row that has a NaN in the operand of a reduction, with the places of their dims."""
    whole: _Place = tuple(range(len(type_shape(op.operands[0]))))
    # Values that are NaN where the operand is; their sums, which are NaN all along the row; and what is computed from these.
    marked = _reached({op.operands[0]: whole}, _KEEPS)
    uses = [use for value in marked for use in value.uses if use.owner.name == "stablehlo.reduce" and use.operand_number == 0]
    sums = [use.owner for use in uses if _combiner(use.owner) == "stablehlo.add" and _reduced(use.owner) == _reduced(op)]
    return _reached({found.results[0]: kept for found in sums}, _KEEPS | {"stablehlo.broadcast_in_dim", "stablehlo.reshape"})


def _reached(values: dict[ir.Value, _Place], through: set[str]) -> dict[ir.Value, _Place]:
    """These values and the floating-point ones that these operations compute from them."""
    found, waiting = dict(values), list(values.items())
    while waiting and len(found) <= _MOST:
        value, place = waiting.pop()
        for use in value.uses:
            passes = use.owner.name in through or (use.operand_number == 2 and _is_chosen(use.owner, found))
            result, moved = _behind(use, place) if passes else (None, place)
            if result is not None and result not in found and is_float(result):
                found[result] = moved
                waiting.append((result, moved))
    return found


def _is_chosen(op: ir.Operation | ir.OpView, nans: dict[ir.Value, _Place]) -> bool:
    """Whether an operation is `select(a < b, x, y)` with a NaN in the comparison, which is false then."""
    condition = op.operands[0].owner if op.name == "stablehlo.select" else None
    if condition is None or isinstance(condition, ir.Block) or condition.name != "stablehlo.compare":
        return False
    how = stablehlo.ComparisonDirectionAttr(condition.attributes["comparison_direction"]).value
    return how != "NE" and any(operand in nans for operand in condition.operands)


def _behind(use: ir.OpOperand, place: _Place) -> tuple[ir.Value | None, _Place]:
    """The result of an operation that reads a value, and the place of its dims; None if it is not known."""
    op, number = use.owner.operation, use.operand_number
    if op.name in _BY_NUMBER:
        return op.results[number if op.name == "stablehlo.optimization_barrier" else 0], place
    if op.name == "stablehlo.broadcast_in_dim":
        moved: list[int | None] = [None] * len(type_shape(op.results[0]))
        for d, to in enumerate(ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"])):
            moved[to] = place[d]
        return op.results[0], tuple(moved)
    if op.name == "stablehlo.reshape":
        return _reshaped(op, place)
    if op.name == "stablehlo.reduce" and number == 0 and len(op.results) == 1:
        return op.results[0], tuple(axis for d, axis in enumerate(place) if d not in _reduced(op))
    return None, place


def _reshaped(op: ir.Operation, place: _Place) -> tuple[ir.Value | None, _Place]:
    """A reshape that adds or removes dims of size 1 moves the others."""
    before, after = type_shape(op.operands[0]), type_shape(op.results[0])
    large = [axis for size, axis in zip(before, place, strict=True) if size > 1]
    if [size for size in before if size > 1] != [size for size in after if size > 1]:
        return None, place
    return op.results[0], tuple(large.pop(0) if size > 1 else None for size in after)


def add_flags(op: ir.Operation) -> None:
    """Adds the flags to a reduction or a scatter: 1 for a NaN where it keeps the larger of two numbers, else 0."""
    of_nan = float(_combiner(op) == "stablehlo.maximum")
    flags = op.clone(ir.InsertionPoint(op))
    for n, value in enumerate(op.operands):
        if is_float(value):
            with ir.InsertionPoint(flags):
                flags.operands[n] = stablehlo.convert(value.type, _compare(value, value, "NE" if of_nan else "EQ"))
    result = op.results[0]
    with ir.InsertionPoint.after(op):
        nan, flag = (stablehlo.constant(_splat(result.type, number)) for number in (math.nan, of_nan))
        chosen = stablehlo.select(_compare(flags.results[0], flag, "EQ"), nan, result)
    result.replace_all_uses_except(chosen, chosen.owner.operation)


def _compare(a: ir.Value, b: ir.Value, how: str) -> ir.Value:
    return stablehlo.compare(a, b, stablehlo.ComparisonDirectionAttr.get(how))


def _splat(kind: ir.Type, number: float) -> ir.Attribute:
    return ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get(ir.RankedTensorType(kind).element_type, number))
