# pyright: basic
"""The layouts that Shardy, XLA's propagation of shardings, chooses for the operations of a lowered program.

A lowered program names the layouts of some of its values. Shardy chooses the others when XLA compiles, and no API returns them. So this
file turns a copy of the program into what XLA makes of it before it calls Shardy, and runs the same passes: jaxlib has them among its MLIR
passes. tests/sharding/partitioner/test_shardy.py compares the layouts with those that XLA dumps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy, stablehlo
from jaxlib.mlir.passmanager import PassManager

NUMBER = "jgt.number"
"""The attribute with the number of an operation, which it keeps while Shardy changes the program."""


def operations(module: ir.Module | ir.Operation) -> list[ir.Operation]:
    """All operations of a module, including nested ones, in a fixed order."""
    found: list[ir.Operation] = []

    def add(op: ir.Operation) -> ir.WalkResult:
        found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(add)
    return found


def meshes_of(module: ir.Module | ir.Operation) -> dict[str, sdy.MeshAttr]:
    """The meshes that the shardings of a module name."""
    ops = [op for op in module.operation.regions[0].blocks[0].operations if op.operation.name == "sdy.mesh"]
    return {ir.StringAttr(op.attributes["sym_name"]).value: sdy.MeshAttr(op.attributes["mesh"]) for op in ops}


def inline_calls(module: ir.Module | ir.Operation) -> None:
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

    def add(op: ir.Operation) -> ir.WalkResult:
        if isinstance(op.location, ir.NameLoc):
            op.location = ir.Location.name(f"{place.name_str}/{op.location.name_str}", childLoc=op.location.child_loc)
        return ir.WalkResult.SKIP if op.name == "sdy.manual_computation" else ir.WalkResult.ADVANCE

    if isinstance(place, ir.NameLoc):
        body.walk(add, ir.WalkOrder.PRE_ORDER)


def choose_layouts(module: ir.Module | ir.Operation) -> None:
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


def _spell_out(ops: Iterable[ir.Operation]) -> None:
    """Replaces the functions of numbers that Shardy does not know, such as a square. XLA writes them out before; any function will do."""
    for op in [op for op in ops if op.name.startswith("chlo.") and len(op.results) == 1]:
        kind = op.results[0].type
        if all(type_shape(operand) == type_shape(op.results[0]) for operand in op.operands):
            with ir.InsertionPoint(op):
                first, *others = (stablehlo.convert(kind, operand) for operand in op.operands)
                new = functools.reduce(stablehlo.add, others, first)
            op.results[0].replace_all_uses_with(new)
            op.operation.erase()


def _reshape_broadcasts(broadcasts: Iterable[ir.Operation]) -> None:
    """Makes reshapes of the broadcasts that only add dims of size 1. Shardy looks at reshapes first."""
    for op in broadcasts:
        if (shape := type_shape(op.operands[0])) and math.prod(shape) == math.prod(type_shape(op.results[0])):
            with ir.InsertionPoint(op):
                new = stablehlo.ReshapeOp(op.results[0].type, op.operands[0])
            if NUMBER in op.attributes:
                new.operation.attributes[NUMBER] = op.attributes[NUMBER]
            op.results[0].replace_all_uses_with(new.result)
            op.operation.erase()


def _free_invariants(loops: Iterable[ir.Operation], mesh: str) -> None:
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


def sharding_of(value: ir.Value) -> sdy.TensorShardingAttr | None:
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


def type_shape(value: ir.Value) -> tuple[int, ...]:
    """The shape of an array; () for a value without one, such as a token."""
    return tuple(ir.RankedTensorType(value.type).shape) if isinstance(value.type, ir.RankedTensorType) else ()


def made_of(value: ir.Value, most: int) -> Iterator[ir.Value]:
    """A value, and those that it is computed from. most: how many."""
    seen, left = set[ir.Value](), [value]
    while left and len(seen) < most:
        if (value := left.pop()) not in seen:
            yield value
            seen.add(value)
            left += [] if isinstance(value.owner, ir.Block) else value.owner.operands
