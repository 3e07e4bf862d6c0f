"""A pipeline schedule as a table: which microbatch and which chunk every stage works on, tick by tick.

The model's layers are cut into chunks, numbered along the model, and every chunk lives on one stage. For two stages with one chunk each and
two microbatches, the 1F1B schedule is

    tick       0    1        2        3
    stage 0    F0   F1       B0       B1
    stage 1         F0 B0    F1 B1

All stages move through the ticks in lockstep. Within a tick a stage runs at most one forward item (F), then one backward item (B), then one
weight-gradient item (W); whatever it sends arrives before the next tick. So an item may share its tick only with items of the same stage
that it waits for: B with its own F on the last chunk, where the loss is, and W with its own B.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

Kind = Literal["F", "B", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "W")
"""The kinds of items, in the order in which a tick runs them."""


@dataclass(frozen=True, order=True)
class Item:
    """One microbatch going through one chunk. Its kind (F, B or W) depends on the rows it is in."""

    microbatch: int
    chunk: int


Row = tuple[Item | None, ...]
"""A row has the item of each stage in one tick, and None for a stage that does nothing."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A schedule for S stages and M microbatches.

    stages: the stage of each chunk, along the model. forward, backward, weight: for each tick a row of S entries; all three
    have the same number of ticks. weight is None if backward items compute the weight gradients too.
    """

    name: str
    num_stages: int
    num_microbatches: int
    stages: tuple[int, ...]
    # A grid for each kind, because a stage may run one item of each kind in a tick.
    forward: tuple[Row, ...]
    backward: tuple[Row, ...]
    weight: tuple[Row, ...] | None = None

    @property
    def num_ticks(self) -> int:
        """The length of the table."""
        return len(self.forward)

    @property
    def num_chunks(self) -> int:
        """The number of chunks of the whole model."""
        return len(self.stages)

    @property
    def virtual(self) -> int:
        """The number of chunks on a stage; if the stages differ, which no verified table allows, the largest."""
        # default: verify.py also looks at tables without any chunk.
        return max(Counter(self.stages).values(), default=0)

    @property
    def title(self) -> str:
        """Name and size in words: `1f1b: 4 stages, 8 microbatches, 1 chunk a stage`."""
        microbatches = count_noun(self.num_microbatches, "microbatch", "microbatches")
        return f"{self.name}: {count_noun(self.num_stages, 'stage')}, {microbatches}, {count_noun(self.virtual, 'chunk')} a stage"

    @property
    def segments(self) -> list[tuple[tuple[Kind, ...], list[int]]]:
        """Consecutive ticks with the same kinds of items, which are named first."""
        kinds: list[tuple[Kind, ...]] = [tuple(kind for kind in KINDS if any(self.rows(kind)[tick])) for tick in range(self.num_ticks)]
        return [(found, [*ticks]) for found, ticks in groupby(range(self.num_ticks), kinds.__getitem__)]

    def local_chunk(self, chunk: int) -> int:
        """The position of a chunk among the chunks of its stage."""
        return self.stages[:chunk].count(self.stages[chunk])

    def counts(self, stage: int, kind: Kind) -> list[tuple[int, int]]:
        """For each segment with a kind of item: a stage's items of it, and the segment's ticks."""
        rows = self.rows(kind)
        return [(sum(rows[tick][stage] is not None for tick in ticks), len(ticks)) for kinds, ticks in self.segments if kind in kinds]

    def rows(self, kind: Kind) -> tuple[Row, ...]:
        """The rows of one kind of item; if the table does not have that kind, rows without items."""
        rows = {"F": self.forward, "B": self.backward, "W": self.weight}[kind]
        return rows if rows is not None else ((None,) * self.num_stages,) * self.num_ticks

    def items(self, kind: Kind) -> Iterator[tuple[int, int, Item]]:
        """(tick, stage, item) of every item of one kind, in the order of the ticks."""
        for tick, row in enumerate(self.rows(kind)):
            for stage, item in enumerate(row):
                if item is not None:
                    yield tick, stage, item

    def item_text(self, kind: Kind, item: Item) -> str:
        """An item as a CSV file spells it: `F3.5` is microbatch 3 through chunk 5, `F3` if every chunk's number is its stage's."""
        has_plain_chunks = self.stages == tuple(range(self.num_stages))
        return f"{kind}{item.microbatch}" if has_plain_chunks else f"{kind}{item.microbatch}.{item.chunk}"

    def forward_only(self) -> Table:
        """The table of an evaluation: the forward items, without the ticks that have none."""
        rows = tuple(row for row in self.forward if any(row))
        # Backward rows without items, because all kinds have the same number of ticks.
        return replace(self, forward=rows, backward=((None,) * self.num_stages,) * len(rows), weight=None)


def table_from_items(
    name: str, stages: tuple[int, ...], num_stages: int, num_ticks: int, placed: Iterable[tuple[Kind, int, Item]]
) -> Table:
    """The table of items with their kinds and ticks, each on the stage of its chunk.

    The largest number of a microbatch is the last one's. If no item is a W, backward items compute the weight gradients too.
    """
    grids: dict[Kind, list[list[Item | None]]] = {kind: [[None] * num_stages for _ in range(num_ticks)] for kind in KINDS}
    num_microbatches = 0
    for kind, tick, item in placed:
        # A cell has room for one item of a kind. `custom.py` refuses two of them before they come here.
        grids[kind][tick][stages[item.chunk]] = item
        num_microbatches = max(num_microbatches, item.microbatch + 1)
    rows = {kind: tuple(map(tuple, grid)) for kind, grid in grids.items()}
    return Table(
        name=name,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        stages=stages,
        forward=rows["F"],
        backward=rows["B"],
        weight=rows["W"] if any(map(any, rows["W"])) else None,
    )


def count_noun(count: float, singular: str, plural: str = "") -> str:
    """A count with its noun: `1 stage`, `4 stages`, `5.5 activations`."""
    return f"{count:g} {singular if count == 1 else plural or f'{singular}s'}"
