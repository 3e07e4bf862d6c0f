"""A table as arrays, which a loop over its ticks reads as `lax.scan` reads its inputs.

A schedule with many ticks must not unroll into many copies of the layers, so the table goes into the program as data. A scan has one body,
but warm-up ticks have no backward items and drain ticks no forward items. The table is therefore cut into segments of consecutive ticks
with the same kinds of items, and each segment is a separate scan. 1f1b on 2 stages with 3 microbatches has three segments: tick 0, ticks 1
to 3, and tick 4.

    tick         0      1      2      3      4
    stage 0      F0     F1     F2 B0  B1     B2
    stage 1      -      F0 B0  F1 B1  F2 B2  -

Whatever one tick computes and a later tick reads must be in the carry of the scan, at a fixed shape. Values that wait are in buffers with
as many slots as the table ever needs at once (`jgt.schedule.buffers` assigns the slots), so memory does not grow with the number of
microbatches unless the schedule itself does, as gpipe. Everything else that is carried is a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any, Generic, Literal, TypeVar, cast

import jax
import numpy as np
from numpy.typing import NDArray

from jgt.pipeline.arrays import Arrays, Flags, Integers
from jgt.pipeline.ends import Batch
from jgt.schedule.buffers import Buffer, Buffers, Sends, allocate_buffers
from jgt.schedule.table import KINDS, Item, Row, Table

EndName = Literal["embed", "embed_back", "head"]
ENDS: tuple[EndName, ...] = ("embed", "embed_back", "head")
ItemName = Literal["backward", "forward", "weight"]

_T = TypeVar("_T")
_Scalar = TypeVar("_Scalar", bound=np.generic)


def _register(cls: type[_T]) -> type[_T]:
    """Registers a dataclass with its fields in alphabetical order, whichever class they come from.

    They are operands of the compiled loops in this order: another order would change the text of every compiled pipeline.
    """
    names = sorted(field.name for field in fields(cast(Any, cls)))
    return jax.tree_util.register_dataclass(cls, data_fields=names, meta_fields=[])


@_register
@dataclass(frozen=True, kw_only=True)
class EndItem:
    """One microbatch in the embedding or the head. on: False where a tick has none."""

    microbatch: Integers
    on: Flags


@_register
@dataclass(frozen=True, kw_only=True)
class StageItem:
    """One microbatch in one of a stage's chunks. on: False where the stage is idle.

    chunk: the position among the stage's chunks. saved: the buffer slot of the residuals. stashed: the slot for what a backward item leaves
    for the weight gradients besides residuals; None for forward items.
    """

    chunk: Integers
    microbatch: Integers
    on: Flags
    saved: Integers
    stashed: Integers | None = None


@_register
@dataclass(frozen=True, kw_only=True)
class SendingItem(StageItem):
    """A forward or backward item, which reads what another stage sent, and sends something itself.

    first, last: whether the chunk is the model's first or last. read: the inbox slot of its input. into[shift]: the inbox
    slot for what arrives from the stage that is `shift` stages before. from_head: the slot of the backward inbox for the head's cotangent,
    for forward items of tables where that waits for a later tick.
    """

    first: Flags
    into: dict[int, Integers]
    last: Flags
    read: Integers
    from_head: Integers | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Work:
    """Everything that a tick does; None for what none of a segment's ticks does.

    Arrays are [ticks] for embedding and head and [ticks, stages] for the items of stages. A tick of the scan sees them
    without the first dim, and a stage sees scalars.
    """

    embed: EndItem | None
    embed_back: EndItem | None
    head: EndItem | None
    backward: SendingItem | None
    forward: SendingItem | None
    weight: StageItem | None


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive ticks with the same kinds of items.

    branches: the ends that a branch skips in ticks without a microbatch for them; the others compute and drop the results.
    """

    work: Work
    branches: frozenset[EndName]

    def share(self, name: EndName | ItemName) -> Fraction:
        """The share of this work that is wanted: items over ticks, and over stages where each stage has items."""
        # [ticks] for embedding and head, [ticks, stages] for the items of stages.
        on = np.asarray(getattr(self.work, name).on)
        return Fraction(int(np.sum(on)), on.size)


@dataclass(frozen=True, kw_only=True)
class Ticks:
    """A table ready to run.

    apart: weight gradients have items of their own. skips: idle stages skip their layers.
    """

    buffers: Buffers
    segments: tuple[Segment, ...]
    apart: bool
    skips: bool


def arrays_of(table: Table, *, skips: bool, embeds_back: bool) -> Ticks:
    """The arrays of a verified table. skips: idle stages skip their layers. embeds_back: the embedding has gradients."""
    buffers = allocate_buffers(table)
    whole = _work(table, buffers)
    whole = whole if embeds_back else replace(whole, embed_back=None)

    # Ticks in which no stage has an item, which a table of the user may contain, do nothing.
    segments = tuple(_segment(whole, ticks) for kinds, ticks in table.segments if kinds)
    return Ticks(buffers=buffers, segments=segments, apart=table.weight is not None, skips=skips)


def _segment(whole: Work, ticks: list[int]) -> Segment:
    def during(x: NDArray[np.generic]) -> NDArray[np.generic]:
        return x[ticks]

    work: Work = jax.tree.map(during, whole)
    on = {name: np.asarray(item is not None and item.on) for name, item in vars(work).items()}
    return Segment(
        # None, and not False in every tick: the body of the segment's scan then has no code for that kind.
        work=replace(work, **{name: None for name, wanted in on.items() if not wanted.any()}),
        branches=frozenset(name for name in ENDS if on[name].any() and not on[name].all()),
    )


def _work(table: Table, buffers: Buffers) -> Work:
    forward, backward, weight = map(table.rows, KINDS)
    last = table.num_chunks - 1
    # All other items get the slot for garbage, because the head runs in their ticks too.
    only_last = tuple(tuple(item if item and item.chunk == last else None for item in row) for row in forward)
    return Work(
        embed=_end(forward, 0),
        embed_back=_end(backward, 0),
        head=_end(forward, last),
        forward=SendingItem(
            **_sending(table, forward, buffers.saved, buffers.forward),
            from_head=_slots(buffers.backward.inbox, only_last) if buffers.head_waits else None,
        ),
        backward=SendingItem(**_sending(table, backward, buffers.saved, buffers.backward), stashed=_slots(buffers.stashed, backward)),
        weight=StageItem(**_staged(table, weight, buffers.saved), stashed=_slots(buffers.stashed, weight)),
    )


def _sending(table: Table, rows: tuple[Row, ...], saved: Buffer, sends: Sends) -> dict[str, Any]:
    return _staged(table, rows, saved) | {
        "first": _grid(rows, lambda item: item.chunk == 0, np.bool_),
        "into": {shift: np.asarray(grid, np.int32) for shift, grid in sends.into.items()},
        "last": _grid(rows, lambda item: item.chunk == table.num_chunks - 1, np.bool_),
        "read": _slots(sends.inbox, rows),
    }


def _staged(table: Table, rows: tuple[Row, ...], saved: Buffer) -> dict[str, Any]:
    return {
        "chunk": _grid(rows, lambda item: table.local_chunk(item.chunk), np.int32),
        "microbatch": _grid(rows, lambda item: item.microbatch, np.int32),
        "on": _grid(rows, lambda item: True, np.bool_),
        "saved": _slots(saved, rows),
    }


def _end(rows: Sequence[Row], chunk: int) -> EndItem:
    """The microbatch of the item at a chunk, tick by tick."""
    # A chunk lives on one stage, so no more than one item of a tick is at a chunk.
    items = [next((item for item in row if item and item.chunk == chunk), None) for row in rows]
    return EndItem(
        # Microbatch 0 is the index where a tick has none: an index has to be valid even if its result is dropped.
        microbatch=np.asarray([item.microbatch if item else 0 for item in items], np.int32),
        on=np.asarray([item is not None for item in items], np.bool_),
    )


def _slots(buffer: Buffer, rows: Sequence[Row]) -> Integers:
    return np.asarray(buffer.at(rows), np.int32)


def _grid(rows: Sequence[Row], value: Callable[[Item], int], dtype: type[_Scalar]) -> NDArray[_Scalar]:
    """A value of each item, 0 or False where there is none."""
    return np.asarray([[0 if item is None else value(item) for item in row] for row in rows], dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StageBuffers:
    """The buffers of the stages, or some of them. An empty list is a buffer that does not exist or is not passed.

    inbox: activations from another stage, [slots, ...]. inbox_back: cotangents from another stage or from the head. saved: residuals of
    layers, [slots, layers of a chunk, ...]. stashed: inputs of weight gradients that are not residuals. sums: the gradients of a stage's
    weights, then of the common values that its layers read, where these have gradients, added up over microbatches; those of common values
    over the stage's layers, too.
    """

    inbox: Arrays = field(default_factory=Arrays)
    inbox_back: Arrays = field(default_factory=Arrays)
    saved: Arrays = field(default_factory=Arrays)
    stashed: Arrays = field(default_factory=Arrays)
    sums: Arrays = field(default_factory=Arrays)

    def updated(self, changed: StageBuffers) -> StageBuffers:
        """These buffers, with the ones in `changed` in place of their old values."""
        # An item gets and returns only the buffers that it touches. Its other lists are empty.
        return replace(self, **{name: buffer for name, buffer in vars(changed).items() if buffer})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Carry:
    """The state between two ticks. common: sums of gradients from embedding and head, empty without gradients."""

    common: Arrays
    staged: StageBuffers
    totals: Arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class OnStage(Generic[_T]):
    """The values of one stage in a tick. Outside of the shard_map they have a leading dim of stages.

    ids: the numbers of the stage's layers, [layers of a stage]. weights: [layers of a stage, ...]. item: the stage's work.
    """

    buffers: StageBuffers
    ids: jax.Array
    item: _T
    weights: Arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Everywhere:
    """The values that all stages read in a tick.

    ends: the values that enter from the embedding, or cotangents from the head. is_read: whether this tick reads the values that stages
    show; None if every one does.
    """

    batch: Batch
    common: Arrays
    ends: Arrays
    is_read: Flags | None
