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
import os
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jax._src import compiler
from jaxlib.mlir import ir

from jgt.sharding.partitioner.grid import Splits, SubAxis, join_parts
from jgt.sharding.partitioner.placed import MendedOperation, OperationLayout, Placed, may_have_faults, readable
from jgt.sharding.partitioner.shardy import inline_calls

MARK = "avoided_fault"
"""The last part of the names of the added constraints, and so of the collectives that they cause."""


@dataclass(frozen=True, kw_only=True)
class Avoided:
    """An operation that got another layout or another form.

    name: the operation with its scopes, as in the HLO.
    line: the file:line that it comes from.
    before, after: the layouts of its operands and of its result, as PartitionSpecs are written; or what XLA does, and the other form.
    is_layout: whether they are layouts.
    sends: whether devices send something for it.
    """

    name: str
    line: str
    before: str
    after: str
    is_layout: bool = True
    sends: bool = True


_collected: ContextVar[list[Avoided] | None] = ContextVar("avoided faults", default=None)
_is_off: ContextVar[bool] = ContextVar("faults are not avoided", default=False)


@contextlib.contextmanager
def avoided_faults() -> Iterator[list[Avoided]]:
    """Collects the operations that get another layout in the programs that are compiled inside."""
    token = _collected.set(avoided := list[Avoided]())
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
def avoid_faults(scope: str) -> None:
    """Has this process check each program before it is compiled in which the name of an operation has this scope.

    A second call changes nothing. With JGT_AVOID_FAULTS=0 in the environment, nothing is checked, and JAX stays as it is.
    """
    if os.environ.get("JGT_AVOID_FAULTS") == "0":
        return
    compile_or_get_cached = compiler.compile_or_get_cached

    @functools.wraps(compile_or_get_cached)
    def checked(backend: Any, computation: ir.Module, *args: Any, **kwargs: Any) -> Any:
        is_left = _is_off.get() or not _has_scope(computation, scope)
        module = computation if is_left else without_faults(computation, backend.platform)
        return compile_or_get_cached(backend, module, *args, **kwargs)

    compiler.compile_or_get_cached = checked


def _has_scope(module: ir.Module, scope: str) -> bool:
    found = False

    def look(op: Any) -> Any:
        nonlocal found
        found = isinstance(op.location, ir.NameLoc) and scope in op.location.name_str
        return ir.WalkResult.INTERRUPT if found else ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(look)
    return found


def without_faults(module: ir.Module, platform: str) -> ir.Module:
    """The module itself, or a copy in which no operation is one that XLA is known to compute wrongly on a platform (`cpu`, `gpu`).

    First operations get other forms (`mends.py`), then other layouts. In a copy with other layouts, all matmuls, windows and gathers are
    constrained, the right ones to the layouts that they have anyway: Shardy might choose others for them in the new program. Convolutions
    always are: XLA simplifies a program before it asks Shardy, which may choose other layouts for them, too, and wrong ones.
    """
    with module.context, ir.Location.unknown():
        if not may_have_faults(module, platform):
            return module
        placed, avoided = Placed.of(module), list[Avoided]()
        if mended := placed.mended(platform):
            module = _copy(module)
            avoided += _mend(module, mended)
            placed = Placed.of(module)
        layouts = placed.layouts()
        if all(layout.given == layout.better for layout in layouts):
            layouts = [layout for layout in layouts if layout.name == "stablehlo.convolution"]
        if layouts:
            module = module if mended else _copy(module)
            avoided += _constrain(module, layouts)
    if (collected := _collected.get()) is not None:
        collected += avoided
    return module


def _copy(module: ir.Module) -> ir.Module:
    stream = io.BytesIO()
    module.operation.write_bytecode(stream)
    copy = ir.Module.parse(stream.getvalue())
    inline_calls(copy)
    return copy


def _mend(module: ir.Module, mended: Sequence[MendedOperation]) -> list[Avoided]:
    ops, avoided = readable(module), list[Avoided]()
    for found in mended:
        op, mend = ops[found.number], found.mend
        name = _name_of(op)
        avoided.append(Avoided(name=name, line=_line_of(op), before=mend.fault, after=mend.form, is_layout=False, sends=mend.sends))
        with ir.Location.name(f"{name}/{MARK}", childLoc=op.location), ir.InsertionPoint(op):
            mend.apply(op)
    return avoided


def _constrain(module: ir.Module, layouts: Sequence[OperationLayout]) -> list[Avoided]:
    """Puts constraints around operations. What reads a result that has another layout now finds it as it was."""
    ops, avoided = readable(module), list[Avoided]()
    for layout in layouts:
        name = _name_of(op := ops[layout.number])
        if layout.given != layout.better:
            avoided.append(Avoided(name=name, line=_line_of(op), before=layout_text(layout.given), after=layout_text(layout.better)))
        with ir.Location.name(f"{name}/{MARK}", childLoc=op.location):
            for n, given, better in zip(layout.arrays, layout.given, layout.better, strict=True):
                if n < len(op.operands):
                    with ir.InsertionPoint(op):
                        op.operands[n] = layout.grid.move(op.operands[n], given, better, layout.mesh)
                    continue
                result = op.results[n - len(op.operands)]
                with ir.InsertionPoint.after(op):
                    first = last = layout.grid.constrain(result, better, layout.mesh)
                    if given != better:
                        last = layout.grid.move(first, better, given, layout.mesh)
                result.replace_all_uses_except(last, first.owner.operation)
    return avoided


def _name_of(op: Any) -> str:
    return op.location.name_str if isinstance(op.location, ir.NameLoc) else op.name


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
