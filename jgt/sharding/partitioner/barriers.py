# pyright: basic
"""Barriers that hide from XLA how the operands of an operation were made: of slices, scatters, updates and reshapes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from jgt.sharding.partitioner.grid import Splits, count_parts
from jgt.sharding.partitioner.shardy import NUMBER, made_of, type_shape


def _scattered(op: ir.Operation) -> tuple[list[int], list[int]]:
    """The dims of the operand that the indices of a scatter choose from, and the dims of its updates that are not of one window."""
    numbers = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    updates = op.operands[len(op.operands) - 1]
    return [*numbers.scattered_dims_to_operand_dims], [d for d in range(len(type_shape(updates))) if d not in numbers.update_window_dims]


def has_one_window(op: ir.Operation) -> bool:
    """Whether a scatter has one window, or one in each of a batch. XLA for CPUs reads the old numbers by a slice that it does not clamp."""
    numbers = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    batch = numbers.scatter_indices_batching_dims
    shape = type_shape(op.operands[len(op.results)])
    return math.prod(size for d, size in enumerate(shape) if d not in (numbers.index_vector_dim, *batch)) == 1


def updates_wrongly(op: ir.Operation, layouts: Sequence[Splits]) -> bool:
    return any(layouts[0][d] or layouts[-1][d] for d in _scattered(op)[0])


def shares_updates(op: ir.Operation, layouts: Sequence[Splits]) -> bool:
    """Whether devices compare their updates, because the indices or the updates of a scatter are split."""
    return any(layouts[1]) or any(layouts[2][d] for d in _scattered(op)[1])


def hold_operands(op: ir.Operation) -> None:
    """Hides from XLA how the operands were made: by a slice that it would merge with a scatter's own, or by a broadcast."""
    for n, held in enumerate(stablehlo.OptimizationBarrierOp(list(op.operands)[: len(op.results)]).results):
        op.operands[n] = held


def _updated(op: ir.Operation) -> list[tuple[ir.Value, ir.Value]]:
    """Each array that a scatter or an update of a slice changes, with its updates."""
    count, first = len(op.results), 1 if op.name == "stablehlo.dynamic_update_slice" else len(op.results) + 1
    return [(op.operands[n], op.operands[first + n]) for n in range(count)]


def copies_itself(op: ir.Operation) -> bool:
    """Whether an array is updated with a part of itself, in one window. XLA may then write into the array that it still reads."""
    return (op.name == "stablehlo.dynamic_update_slice" or has_one_window(op)) and next(_sources(op), None) is not None


def _sources(op: ir.Operation) -> Iterator[ir.Value]:
    """The values behind an update that are the updated array, or are computed in the same way."""
    for operand, update in _updated(op):
        yield from (value for value in made_of(update, 64) if _is_alike(value, operand))


def _is_alike(one: ir.Value, other: ir.Value, depth: int = 8) -> bool:
    """Whether XLA merges two values, because both are computed in the same way; layouts do not count. depth: how far back to look."""
    one, other = _unconstrained(one), _unconstrained(other)
    if one == other:
        return True
    first, second = one.owner, other.owner
    if not depth or isinstance(first, ir.Block) or isinstance(second, ir.Block) or _form(first) != _form(second):
        return False
    return all(_is_alike(a, b, depth - 1) for a, b in zip(first.operands, second.operands, strict=True))


def _form(op: ir.OpView) -> object:
    """The name, type and attributes of an operation; of one with regions or several results, itself: it is like no other."""
    if len(op.regions) or len(op.results) != 1:
        return op
    return op.name, op.results[0].type, {key: op.attributes[key] for key in op.attributes if key != NUMBER}


def _unconstrained(value: ir.Value) -> ir.Value:
    """The value behind its constraints."""
    while not isinstance(value.owner, ir.Block) and value.owner.name == "sdy.sharding_constraint":
        value = value.owner.operands[0]
    return value


def hold_sources(op: ir.Operation) -> None:
    """Has all but the update itself read these arrays behind a barrier."""
    for value in [*_sources(op)]:
        owner = value.owner
        with ir.InsertionPoint.at_block_begin(owner) if isinstance(owner, ir.Block) else ir.InsertionPoint.after(owner):
            held = stablehlo.OptimizationBarrierOp([value])
        value.replace_all_uses_except(held.results[0], [op, held.operation])


def slices_nothing(op: ir.Operation, layouts: Sequence[Splits]) -> bool:
    """Whether a slice has the beginning of a dim, and devices as many elements as before.

    XLA then takes the whole array for the slice, if it has moved that to another layout already.
    """
    starts = ir.DenseI64ArrayAttr(op.attributes["start_indices"]) if op.name == "stablehlo.slice" else [0] * len(layouts[0])
    sizes = zip(starts, type_shape(op.operands[0]), type_shape(op.results[0]), map(count_parts, layouts[0]), strict=True)
    return any(not start and before != after and n > 1 and -(-before // n) == -(-after // n) for start, before, after, n in sizes)


def _repeated_dims(value: ir.Value, depth: int = 32) -> set[int]:
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


def reshapes_repeated(op: ir.Operation) -> bool:
    """Whether a reshape of a repeated value changes its rank. JAX may write it as a broadcast."""
    before, after = type_shape(op.operands[0]), type_shape(op.results[0])
    return len(before) != len(after) and math.prod(before) == math.prod(after) and bool(_repeated_dims(op.operands[0]))


def reshapes_wrongly(op: ir.Operation, layouts: Sequence[Splits]) -> bool:
    """Whether XLA may take a dim of which each device has one element for the repeated dim beside it.

    It then believes that all devices have the same, and leaves out a permutation of the elements.
    """
    return any(size == count_parts(axes) > 1 for size, axes in zip(type_shape(op.results[0]), layouts[1], strict=True))
