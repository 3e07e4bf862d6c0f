# pyright: basic
"""Operations that XLA computes wrongly in a split program, whatever their layout, and the forms of them that it computes correctly.

An example: `dynamic_slice(x, start, 4)` of an x with 16 rows that four devices share. A start of 20 means the last four rows, but XLA
compares the start with the rows of one device. `dynamic_slice(x, clamp(0, start, 12), 4)` means the same and is right.

A *mend* changes the operation and not its layout, so it sends nothing, but for the flags of NaNs. docs/partitioner.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxlib.mlir import ir

from jgt.sharding.partitioner.barriers import (
    copies_itself,
    has_one_window,
    hold_operands,
    hold_sources,
    reshapes_repeated,
    reshapes_wrongly,
    shares_updates,
    slices_nothing,
    updates_wrongly,
)
from jgt.sharding.partitioner.grid import Splits
from jgt.sharding.partitioner.nans import add_flags, keeps_extremes, loses_nans
from jgt.sharding.partitioner.windows import (
    clamp_indices,
    clamp_starts,
    far_starts,
    has_one_row,
    has_rows_of_windows,
    has_windows,
    starts_wrongly,
)


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
    concerns: Callable[[ir.Operation], bool]
    is_wrong: Callable[[ir.Operation, Sequence[Splits]], bool]
    apply: Callable[[ir.Operation], None]


def mends_for(op: ir.Operation, platform: str) -> list[Mend]:
    """The mends that an operation needs in some layout on a platform."""
    return [mend for mend in MENDS.get(op.name, ()) if (platform == "cpu" or not mend.on_cpu) and mend.concerns(op)]


_CLAMP = Mend(
    fault="reads or writes elsewhere if the start is outside of the array",
    form="a start that is clamped first",
    concerns=lambda op: bool(far_starts(op)),
    is_wrong=starts_wrongly,
    apply=clamp_starts,
)
_CLAMP_INDICES = Mend(
    fault="reads elsewhere if a window begins outside of the array",
    form="indices that are clamped first",
    concerns=has_windows,
    is_wrong=lambda op, layouts: True,
    apply=clamp_indices,
)
_CLAMP_ROWS = Mend(
    fault="reads elsewhere if an index is outside of a window that was cut out before",
    form="indices that are clamped first",
    concerns=has_rows_of_windows,
    is_wrong=has_one_row,
    apply=clamp_indices,
)
_HOLD = Mend(
    fault="reads another row where it updates one row of a split dim",
    form="the operand behind a barrier",
    on_cpu=True,
    concerns=has_one_window,
    is_wrong=updates_wrongly,
    apply=hold_operands,
)
_COPY = Mend(
    fault="overwrites rows that it has not read yet where an array is updated with a part of itself",
    form="the part of an array behind a barrier",
    on_cpu=True,
    concerns=copies_itself,
    is_wrong=lambda op, layouts: any(layouts[0]),
    apply=hold_sources,
)
_FORGET = Mend(
    fault="takes a dim of which each device has one element for one that was broadcast, and does not permute it",
    form="the operand behind a barrier",
    concerns=reshapes_repeated,
    is_wrong=reshapes_wrongly,
    apply=hold_operands,
)
_SLICE = Mend(
    fault="takes the whole array for a slice of which each device has as many elements",
    form="the operand behind a barrier",
    concerns=lambda op: op.operands[0].type != op.results[0].type,
    is_wrong=slices_nothing,
    apply=hold_operands,
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
    for name, is_wrong in (("reduce", loses_nans), ("scatter", shares_updates))
}
MENDS: dict[str, tuple[Mend, ...]] = {
    "stablehlo.dynamic_slice": (_CLAMP, _SLICE),
    "stablehlo.dynamic_update_slice": (_CLAMP, _COPY),
    "stablehlo.gather": (_CLAMP_INDICES, _CLAMP_ROWS),
    "stablehlo.reduce": (_NANS["reduce"],),
    "stablehlo.reshape": (_FORGET,),
    "stablehlo.broadcast_in_dim": (_FORGET,),
    "stablehlo.scatter": (_COPY, _HOLD, _NANS["scatter"]),
    "stablehlo.slice": (_SLICE,),
}
