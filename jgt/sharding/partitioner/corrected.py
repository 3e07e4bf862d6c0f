# pyright: basic
"""A program without operations that XLA computes wrongly. What Shardy chooses (`shardy.py`) is compared with `faults.py` and `mends.py`."""

from __future__ import annotations

import io
from collections.abc import Sequence

from jaxlib.mlir import ir

from jgt.sharding.partitioner.avoided import MARK, Avoided, collected
from jgt.sharding.partitioner.grid import Splits, SubAxis, join_parts
from jgt.sharding.partitioner.placed import MendedOperation, OperationLayout, Placed, may_have_faults, readable
from jgt.sharding.partitioner.shardy import inline_calls


def without_faults(module: ir.Module, platform: str) -> ir.Module:
    """The module, or a copy without operations that XLA is known to compute wrongly on a platform (`cpu`, `gpu`).

    First operations get other forms (`mends.py`), then other layouts. In a copy with other layouts, all matmuls, windows and gathers are
    constrained, the right ones to the layouts that they have anyway: Shardy might choose others for them in the new program. Convolutions,
    windows and pads always are, where something moves along a dim: XLA simplifies a program before it asks Shardy, which may choose other
    layouts for them, too, and wrong ones.
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
            layouts = [layout for layout in layouts if layout.moves]
        if layouts:
            module = module if mended else _copy(module)
            avoided += _constrain(module, layouts)
    if (found := collected.get()) is not None:
        found += avoided
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


def _name_of(op: ir.Operation) -> str:
    return op.location.name_str if isinstance(op.location, ir.NameLoc) else op.name


def _line_of(op: ir.Operation) -> str:
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
