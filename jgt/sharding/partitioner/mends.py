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

from jgt.sharding.partitioner import barriers, windows
from jgt.sharding.partitioner.grid import Splits
from jgt.sharding.partitioner.nans import add_flags, keeps_extremes, loses_nans


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
    concerns=lambda op: bool(windows.far_starts(op)),
    is_wrong=windows.starts_wrongly,
    apply=windows.clamp_starts,
)
_CLAMP_INDICES = Mend(
    fault="reads elsewhere if a window begins outside of the array",
    form="indices that are clamped first",
    concerns=windows.has_windows,
    is_wrong=lambda op, layouts: True,
    apply=windows.clamp_indices,
)
_CLAMP_ROWS = Mend(
    fault="reads elsewhere if an index is outside of a window that was cut out before",
    form="indices that are clamped first",
    concerns=windows.has_rows_of_windows,
    is_wrong=windows.has_one_row,
    apply=windows.clamp_indices,
)
_HOLD = Mend(
    fault="reads another row where it updates one row of a split dim",
    form="the operand behind a barrier",
    on_cpu=True,
    concerns=barriers.has_one_window,
    is_wrong=barriers.updates_wrongly,
    apply=barriers.hold_operands,
)
_COPY = Mend(
    fault="overwrites rows that it has not read yet where an array is updated with a part of itself",
    form="the part of an array behind a barrier",
    on_cpu=True,
    concerns=barriers.copies_itself,
    is_wrong=lambda op, layouts: any(layouts[0]),
    apply=barriers.hold_sources,
)
_FORGET = Mend(
    fault="takes a dim of which each device has one element for one that was broadcast, and does not permute it",
    form="the operand behind a barrier",
    concerns=barriers.reshapes_repeated,
    is_wrong=barriers.reshapes_wrongly,
    apply=barriers.hold_operands,
)
_SLICE = Mend(
    fault="takes the whole array for a slice of which each device has as many elements",
    form="the operand behind a barrier",
    concerns=lambda op: op.name == "stablehlo.slice" or not windows.far_starts(op),
    is_wrong=barriers.slices_nothing,
    apply=barriers.hold_operands,
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
    for name, is_wrong in (("reduce", loses_nans), ("scatter", barriers.shares_updates))
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
