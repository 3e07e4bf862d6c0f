# pyright: basic
"""The layouts that Shardy, XLA's propagation of shardings, chooses for the operations of a lowered program.

A lowered program names the layouts of some of its values. Shardy chooses the others when XLA compiles, and no API returns them. So this
file turns a copy of the program into what XLA makes of it before it calls Shardy, and runs the same passes: jaxlib has them among its MLIR
passes. tests/sharding/partitioner/test_shardy.py compares the layouts with those that XLA dumps.

A *layout* has, for each dim of an array, the parts of mesh axes that split it. Shardy may split a dim by a part of an axis, so an axis is
taken apart where one of the layouts of an operation does that. Each piece is a *sub-axis*.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy, stablehlo
from jaxlib.mlir.passmanager import PassManager

NUMBER = "jgt.number"
"""The attribute with the number of an operation, which it keeps while Shardy changes the program."""
SubAxis = tuple[str, int, int]
"""A part of a mesh axis: its name, the number of parts before it, and its own size."""
Splits = tuple[tuple[SubAxis, ...], ...]
"""The sub-axes that split each dim, major to minor."""


def operations(module: Any) -> list[Any]:
    """All operations of a module, including nested ones, in a fixed order."""
    found: list[Any] = []

    def add(op: Any) -> Any:
        found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(add)
    return found


def meshes_of(module: Any) -> dict[str, Any]:
    """The meshes that the shardings of a module name."""
    ops = [op for op in module.operation.regions[0].blocks[0].operations if op.operation.name == "sdy.mesh"]
    return {ir.StringAttr(op.attributes["sym_name"]).value: sdy.MeshAttr(op.attributes["mesh"]) for op in ops}


def inline_calls(module: Any) -> None:
    """Puts the bodies of functions where they are called, as XLA does before Shardy chooses."""
    tops = [op.operation for op in module.operation.regions[0].blocks[0].operations]
    functions = {ir.StringAttr(op.attributes["sym_name"]).value: op for op in tops if op.name == "func.func"}
    main = functions.pop("main")
    calls = [op for op in operations(main) if op.name == "func.call"]
    while calls:
        call = calls.pop()
        body = functions[ir.FlatSymbolRefAttr(call.attributes["callee"]).value].clone(ir.InsertionPoint(main))
        block = body.regions[0].blocks[0]
        calls += [op for op in operations(body) if op.name == "func.call"]
        _add_scopes(body, call.location)
        for argument, operand in zip(block.arguments, call.operands, strict=True):
            argument.replace_all_uses_with(operand)
        *inner, end = block.operations
        for op in inner:
            op.operation.move_before(call)
        for result, value in zip(call.results, end.operands, strict=True):
            result.replace_all_uses_with(value)
        call.operation.erase()
        body.erase()
    for function in functions.values():
        function.erase()


def _add_scopes(body: Any, place: Any) -> None:
    """Puts the scopes of a call before the names of its operations, as XLA does. Names inside a shard_map begin at the shard_map."""

    def add(op: Any) -> Any:
        if isinstance(op.location, ir.NameLoc):
            op.location = ir.Location.name(f"{place.name_str}/{op.location.name_str}", childLoc=op.location.child_loc)
        return ir.WalkResult.SKIP if op.name == "sdy.manual_computation" else ir.WalkResult.ADVANCE

    if isinstance(place, ir.NameLoc):
        body.walk(add, ir.WalkOrder.PRE_ORDER)


def choose_layouts(module: Any) -> None:
    """Lets Shardy choose. The module has no calls; it is changed as XLA would change it, and every operation has its layout then."""
    ops = operations(module)
    # Both before anything changes: the name of an operation that was erased cannot be read.
    broadcasts, loops = [[op for op in ops if op.name == f"stablehlo.{name}"] for name in ("broadcast_in_dim", "while")]
    _spell_out(ops)
    _reshape_broadcasts(broadcasts)
    _free_invariants(loops, next(iter(meshes_of(module))))
    passes = PassManager.parse("builtin.module(sdy-import-pipeline,sdy-apply-sharding-constraints,sdy-user-priority-propagate)")
    # Verifying a copy that is never compiled would take twice the time of all else.
    passes.enable_verifier(False)
    passes.run(module.operation)


def _spell_out(ops: Iterable[Any]) -> None:
    """Replaces the functions of numbers that Shardy does not know, such as a square. XLA writes them out before; any function will do."""
    for op in [op for op in ops if op.name.startswith("chlo.") and len(op.results) == 1]:
        kind = op.results[0].type
        if all(type_shape(operand) == type_shape(op.results[0]) for operand in op.operands):
            with ir.InsertionPoint(op):
                first, *others = (stablehlo.convert(kind, operand) for operand in op.operands)
                new = functools.reduce(stablehlo.add, others, first)
            op.results[0].replace_all_uses_with(new)
            op.operation.erase()


def _reshape_broadcasts(broadcasts: Iterable[Any]) -> None:
    """Makes reshapes of the broadcasts that only add dims of size 1. Shardy looks at reshapes first."""
    for op in broadcasts:
        if (shape := type_shape(op.operands[0])) and math.prod(shape) == math.prod(type_shape(op.results[0])):
            with ir.InsertionPoint(op):
                new = stablehlo.ReshapeOp(op.results[0].type, op.operands[0])
            if NUMBER in op.attributes:
                new.operation.attributes[NUMBER] = op.attributes[NUMBER]
            op.results[0].replace_all_uses_with(new.result)
            op.operation.erase()


def _free_invariants(loops: Iterable[Any], mesh: str) -> None:
    """Takes the values that a loop does not change out of what it carries. Each loop then chooses its own layouts for them."""
    for loop in loops:
        condition, body = (region.blocks[0] for region in loop.regions)
        end = list(body.operations)[-1]
        for n in [n for n, value in enumerate(end.operands) if value == body.arguments[n]]:
            inside = loop.operands[n]
            loop.results[n].replace_all_uses_with(inside)
            if rank := len(type_shape(inside)):
                with ir.InsertionPoint(loop):
                    dims = [sdy.DimensionShardingAttr.get([], is_closed=False)] * rank
                    inside = sdy.ShardingConstraintOp(inside, sdy.TensorShardingAttr.get(mesh, dims)).result
            condition.arguments[n].replace_all_uses_with(inside)
            body.arguments[n].replace_all_uses_except(inside, end.operation)


def sharding_of(value: Any) -> Any:
    """The sharding of a value; None if it has none, and so is whole on every device."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        # The name of a function's view is the function's own.
        op, n, name = owner.owner.operation, ir.BlockArgument(value).arg_number, "in_shardings"
        if op.name == "func.func":
            attributes = ir.DictAttr(ir.ArrayAttr(op.attributes["arg_attrs"])[n]) if "arg_attrs" in op.attributes else {}
            return sdy.TensorShardingAttr(attributes["sdy.sharding"]) if "sdy.sharding" in attributes else None
        if op.name == "stablehlo.while":
            # A value that a loop carries has its layout at the result.
            value = op.results[n]
    else:
        op, n, name = owner, ir.OpResult(value).result_number, "out_shardings"
    edge = next((use.owner for use in value.uses if use.owner.name == "sdy.data_flow_edge"), op)
    if "sharding" in edge.attributes:
        return sdy.TensorShardingAttr(edge.attributes["sharding"])
    found = next((op.attributes[key] for key in (name, "sdy.sharding") if key in op.attributes), None)
    return None if found is None else sdy.TensorShardingAttr(sdy.TensorShardingPerValueAttr(found).shardings[n])


def _manual_axes(op: Any) -> set[str]:
    """The axes of the shard_maps around an operation, which split nothing inside."""
    found: set[str] = set()
    while (op := op.operation.parent) is not None:
        if op.name == "sdy.manual_computation":
            found |= set(cast(Any, sdy.ManualAxesAttr(op.attributes["manual_axes"])))
    return found


@dataclass(frozen=True, kw_only=True)
class AxisGrid:
    """The devices of a mesh, seen from an operation: its sub-axes, and the ids of the devices, with one dim for each sub-axis."""

    sub_axes: tuple[SubAxis, ...]
    devices: np.ndarray

    @classmethod
    def around(cls, op: Any, mesh: Any, shardings: Sequence[Any]) -> AxisGrid:
        """The grid for an operation whose arrays have these shardings."""
        axes = [sdy.MeshAxisAttr(axis) for axis in mesh.axes]
        cuts = {axis.name: {1, axis.size} for axis in axes}
        for ref in (ref for sharding in shardings for dim in _references(sharding) for ref in dim):
            if ref.sub_axis_info is not None:
                info = sdy.SubAxisInfoAttr(ref.sub_axis_info)
                cuts[ref.name] |= {info.pre_size, info.pre_size * info.size}
        pairs = [(axis.name, pair) for axis in axes for pair in itertools.pairwise(sorted(cuts[axis.name]))]
        sub_axes = [(name, low, high // low) for name, (low, high) in pairs]
        manual = _manual_axes(op)
        ids = np.array(list(mesh.device_ids) or range(math.prod(size for _, _, size in sub_axes)))
        ids = ids.reshape([size for _, _, size in sub_axes])[tuple(0 if name in manual else slice(None) for name, _, _ in sub_axes)]
        return cls(sub_axes=tuple(sub_axis for sub_axis in sub_axes if sub_axis[0] not in manual), devices=ids)

    def layout(self, sharding: Any, rank: int) -> Splits:
        """The layout of an array of this rank."""
        if sharding is None:
            return ((),) * rank
        return tuple(tuple(sub_axis for ref in dim for sub_axis in self._parts(ref)) for dim in _references(sharding))

    def _parts(self, ref: Any) -> Iterator[SubAxis]:
        info = None if ref.sub_axis_info is None else sdy.SubAxisInfoAttr(ref.sub_axis_info)
        for name, low, size in self.sub_axes:
            if name == ref.name and (info is None or info.pre_size <= low < info.pre_size * info.size):
                yield name, low, size

    def groups(self, layout: Splits, dims: Sequence[int], and_copies: bool = False) -> list[list[int]]:
        """The devices that have the same part of these dims, in the order of the other dims.

        and_copies: devices that have the same part of the whole array are in different groups.
        """
        used = {sub_axis for axes in layout for sub_axis in axes}
        whole = [sub_axis for sub_axis in self.sub_axes if sub_axis not in used]
        front = [sub_axis for d in dims for sub_axis in layout[d]] + (whole if and_copies else [])
        inner = [sub_axis for d, axes in enumerate(layout) if d not in dims for sub_axis in axes] + ([] if and_copies else whole)
        order = [self.sub_axes.index(sub_axis) for sub_axis in (*front, *inner)]
        return self.devices.transpose(order).reshape(count_parts(front), -1).tolist()

    def constrain(self, value: Any, layout: Splits, mesh: Any) -> Any:
        """A value that is constrained to a layout, where operations are inserted now."""
        dims = [
            sdy.DimensionShardingAttr.get([self._reference(sub_axis) for sub_axis in join_parts(axes)], is_closed=True) for axes in layout
        ]
        return sdy.ShardingConstraintOp(value, sdy.TensorShardingAttr.get(mesh, dims)).result

    def _reference(self, sub_axis: SubAxis) -> Any:
        name, low, size = sub_axis
        is_whole = size == count_parts(a for a in self.sub_axes if a[0] == name)
        return sdy.AxisRefAttr.get(name, None if is_whole else sdy.SubAxisInfoAttr.get(low, size))


def count_parts(sub_axes: Iterable[SubAxis]) -> int:
    """The number of parts into which these sub-axes split a dim."""
    return math.prod(size for _, _, size in sub_axes)


def join_parts(axes: Sequence[SubAxis]) -> list[SubAxis]:
    """The sub-axes of a dim, with neighbouring parts of one axis as one."""
    result: list[SubAxis] = []
    for name, low, size in axes:
        if result and result[-1][0] == name and result[-1][1] * result[-1][2] == low:
            result[-1] = (name, result[-1][1], result[-1][2] * size)
        else:
            result.append((name, low, size))
    return result


def _references(sharding: Any) -> list[list[Any]]:
    """The axes, or parts of axes, that a sharding names for each dim."""
    if sharding is None:
        return []
    return [[sdy.AxisRefAttr(ref) for ref in sdy.DimensionShardingAttr(dim).axes] for dim in sharding.dimension_shardings]


def type_shape(value: Any) -> tuple[int, ...]:
    """The shape of an array; () for a value that is none, such as a token."""
    return tuple(ir.RankedTensorType(value.type).shape) if isinstance(value.type, ir.RankedTensorType) else ()
