# pyright: basic
"""XLA's partitioner computes some legal layouts wrongly, without a word. This file gives such operations another layout.

An example on a mesh (data, fsdp, tensor) of 2 x 2 x 2 devices: x [rows over data and fsdp, features over tensor] @ w [features over tensor,
columns over fsdp] with a result [rows over data and fsdp, columns over tensor] is off by as much as the result is large. Each of the three
layouts is legal.

Whether an operation is wrong depends on the layouts of its operands and of its result. Shardy chooses most of these when XLA compiles the
whole training step; the matmuls of the gradient do not even exist before. So the check takes place between lowering and compiling.
It reads the layouts that Shardy will choose (`shardy.py`) and compares them with what is known to be wrong (`faults.py`). If nothing is
wrong, XLA gets the very program that it would have got. Otherwise it gets one with sharding constraints around each such operation.
docs/partitioner.md has the report to XLA.

When XLA is mended, delete this folder: only `Sharded` and the planner call it.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jax._src import compiler
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from jgt.sharding.partitioner.faults import READERS, better_layouts
from jgt.sharding.partitioner.shardy import (
    AxisGrid,
    Splits,
    SubAxis,
    choose_layouts,
    inline_calls,
    join_parts,
    meshes_of,
    operations,
    sharding_of,
    type_shape,
)

MARK = "avoided_fault"
"""The last part of the names of the added constraints, and so of the collectives that they cause."""
_NUMBER = "jgt.number"


@dataclass(frozen=True, kw_only=True)
class Avoided:
    """An operation that got another layout.

    name: the operation with its scopes, as in the HLO. line: the file:line that it comes from. before, after: the layouts of its operands
    and of its result, as PartitionSpecs are written.
    """

    name: str
    line: str
    before: str
    after: str


_collected: ContextVar[list[Avoided] | None] = ContextVar("avoided faults", default=None)
_is_off: ContextVar[bool] = ContextVar("faults are not avoided", default=False)


@contextlib.contextmanager
def avoided_faults() -> Iterator[list[Avoided]]:
    """Collects the operations that get another layout in the programs that are compiled inside."""
    avoided: list[Avoided] = []
    token = _collected.set(avoided)
    try:
        yield avoided
    finally:
        _collected.reset(token)


@contextlib.contextmanager
def with_faults() -> Iterator[None]:
    """Compiles programs inside as XLA would, faults included: for tests, and to see whether XLA still has them."""
    token = _is_off.set(True)
    try:
        yield
    finally:
        _is_off.reset(token)


@functools.cache
def avoid_faults() -> None:
    """Has every program that this process compiles from now on checked first. A second call changes nothing."""
    compile_or_get_cached = compiler.compile_or_get_cached

    @functools.wraps(compile_or_get_cached)
    def checked(backend: Any, computation: ir.Module, *args: Any, **kwargs: Any) -> Any:
        module = computation if _is_off.get() else without_faults(computation)
        return compile_or_get_cached(backend, module, *args, **kwargs)

    compiler.compile_or_get_cached = checked


def without_faults(module: ir.Module) -> ir.Module:
    """The module itself, or a copy in which no operation has a layout that is known to be computed wrongly.

    In a copy, all matmuls, windows and gathers are constrained, the right ones to the layouts that they have anyway: Shardy might
    choose others for them in the new program.
    """
    with module.context, ir.Location.unknown():
        if not _may_have_faults(module):
            return module
        layouts = layouts_of(module)
        if all(layout.given == layout.better for layout in layouts):
            return module
        stream = io.BytesIO()
        module.operation.write_bytecode(stream)
        module = ir.Module.parse(stream.getvalue())
        inline_calls(module)
        avoided = _constrain(module, layouts)
    if (collected := _collected.get()) is not None:
        collected += avoided
    return module


@dataclass(frozen=True, kw_only=True)
class OperationLayout:
    """The layouts of an operation's arrays, as Shardy chooses them and as they should be. number: its number among those with readers."""

    number: int
    arrays: tuple[int, ...]
    given: tuple[Splits, ...]
    better: tuple[Splits, ...]
    grid: AxisGrid
    mesh: Any


def _readable(module: Any) -> list[Any]:
    return [op for op in operations(module) if op.name in READERS]


def _may_have_faults(module: Any) -> bool:
    """Whether it is worth asking Shardy: a matmul or a gather can be wrong only where there are two axes."""
    axes = max((sum(sdy.MeshAxisAttr(axis).size > 1 for axis in mesh.axes) for mesh in meshes_of(module).values()), default=0)
    return axes > 0 and any(
        axes > 1 if op.name in ("stablehlo.dot_general", "stablehlo.gather") else _has_moving(op) for op in _readable(module)
    )


def _has_moving(op: Any) -> bool:
    dims, values = READERS[op.name](op), [*op.operands, *op.results]
    return any(dims.moving(n, len(type_shape(values[array]))) for n, array in enumerate(dims.arrays))


def layouts_of(module: ir.Module) -> list[OperationLayout]:
    """The layouts of the operations that have readers."""
    copy = module.operation.clone()
    inline_calls(copy)
    meshes = meshes_of(copy)
    integer = ir.IntegerType.get_signless(64)
    for number, op in enumerate(_readable(copy)):
        op.attributes[_NUMBER] = ir.IntegerAttr.get(integer, number)
    choose_layouts(copy)
    return [layout for op in _readable(copy) if (layout := _layout_of(op, meshes)) is not None]


def _layout_of(op: Any, meshes: dict[str, Any]) -> OperationLayout | None:
    dims = READERS[op.name](op)
    values = [[*op.operands, *op.results][n] for n in dims.arrays]
    shardings = [sharding_of(value) for value in values]
    mesh = next((sharding.mesh_or_ref for sharding in shardings if sharding is not None), None)
    if mesh is None:
        return None
    grid = AxisGrid.around(op, meshes[mesh.value] if isinstance(mesh, ir.FlatSymbolRefAttr) else mesh, shardings)
    shapes = [type_shape(value) for value in values]
    given = tuple(grid.layout(sharding, len(shape)) for sharding, shape in zip(shardings, shapes, strict=True))
    better = better_layouts(dims, given, shapes, grid)
    number = ir.IntegerAttr(op.attributes[_NUMBER]).value
    return OperationLayout(number=number, arrays=dims.arrays, given=given, better=better, grid=grid, mesh=mesh)


def _constrain(module: ir.Module, layouts: Sequence[OperationLayout]) -> list[Avoided]:
    """Puts constraints around operations. What reads a result that has another layout now finds it as it was."""
    readable = _readable(module)
    avoided: list[Avoided] = []
    for layout in layouts:
        op = readable[layout.number]
        name = op.location.name_str if isinstance(op.location, ir.NameLoc) else op.name
        if layout.given != layout.better:
            avoided.append(Avoided(name=name, line=_line_of(op), before=layout_text(layout.given), after=layout_text(layout.better)))
        with ir.Location.name(f"{name}/{MARK}", childLoc=op.location):
            for n, given, better in zip(layout.arrays, layout.given, layout.better, strict=True):
                if n < len(op.operands):
                    with ir.InsertionPoint(op):
                        op.operands[n] = layout.grid.constrain(op.operands[n], better, layout.mesh)
                    continue
                result = op.results[n - len(op.operands)]
                with ir.InsertionPoint.after(op):
                    first = last = layout.grid.constrain(result, better, layout.mesh)
                    if given != better:
                        last = layout.grid.constrain(first, given, layout.mesh)
                result.replace_all_uses_except(last, first.owner.operation)
    return avoided


def _line_of(op: Any) -> str:
    """The file:line of the innermost user code that an operation comes from; empty if it is not known."""
    place = op.location
    while not isinstance(place, ir.FileLineColLoc):
        if isinstance(place, ir.NameLoc):
            place = place.child_loc
        elif isinstance(place, ir.CallSiteLoc):
            place = place.callee
        else:
            return ""
    return f"{place.filename}:{place.start_line}"


def layout_text(layouts: Sequence[Splits]) -> str:
    """Layouts as PartitionSpecs are written: `[d, f], [f, null] -> [d, null]`."""

    def dim(axes: Sequence[SubAxis]) -> str:
        names = [name for name, _, _ in join_parts(axes)]
        return "null" if not names else names[0] if len(names) == 1 else f"[{', '.join(names)}]"

    *operands, result = ("[" + ", ".join(map(dim, layout)) + "]" for layout in layouts)
    return f"{', '.join(operands)} -> {result}"
