"""Schedules as tables: which microbatch and chunk each stage works on, tick by tick.

The layers are cut into chunks, numbered along the model; a schedule says which stage holds which chunk. All stages go
through the ticks in step: in a tick a stage has at most one forward (F), one backward (B) and one weight-gradient (W)
item, and what it sends arrives before the next tick. A backward item may follow its own forward item in the same tick
on the last chunk, and a weight-gradient item its own backward item.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "W")


@dataclass(frozen=True, order=True)
class Item:
    """One microbatch going through one chunk, forward or backward."""

    microbatch: int
    chunk: int


Row = tuple[Item | None, ...]
"""What each stage works on in one tick; None: nothing."""

At = Callable[[int, int], int]
"""(microbatch, chunk) → the tick of an item."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A schedule for S stages and M microbatches.

    stages: the stage of each chunk, along the model. forward, backward, weight: a row of S entries for each tick, all of
    the same length. weight is None where backward items compute weight gradients too.
    """

    name: str
    num_stages: int
    num_microbatches: int
    stages: tuple[int, ...]
    forward: tuple[Row, ...]
    backward: tuple[Row, ...]
    weight: tuple[Row, ...] | None = None

    @property
    def num_ticks(self) -> int:
        """Length of the table."""
        return len(self.forward)

    @property
    def num_chunks(self) -> int:
        """Chunks of the whole model."""
        return len(self.stages)

    @property
    def virtual(self) -> int:
        """Chunks of a stage: the most that any stage holds."""
        return max(Counter(self.stages).values(), default=0)

    def local_chunk(self, chunk: int) -> int:
        """The position of a chunk among those of its stage."""
        return self.stages[:chunk].count(self.stages[chunk])

    def rows(self, kind: Kind) -> tuple[Row, ...]:
        """The rows of a kind of item; empty ones where the table has none of it."""
        given = {"F": self.forward, "B": self.backward, "W": self.weight}[kind]
        return given if given is not None else ((None,) * self.num_stages,) * self.num_ticks

    def items(self, kind: Kind) -> Iterator[tuple[int, int, Item]]:
        """Tick, stage and item of every entry of a kind."""
        for tick, row in enumerate(self.rows(kind)):
            for stage, item in enumerate(row):
                if item is not None:
                    yield tick, stage, item

    def forward_only(self) -> Table:
        """The table of an evaluation: the forward items, without ticks in which nobody has one."""
        rows = tuple(row for row in self.forward if any(row))
        nothing = ((None,) * self.num_stages,) * len(rows)
        return Table(
            name=self.name,
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            stages=self.stages,
            forward=rows,
            backward=nothing,
        )


def gpipe(num_stages: int, num_microbatches: int) -> Table:
    """All forward, then all backward (arXiv 1811.06965)."""
    S, M = num_stages, num_microbatches
    return _table("gpipe", S, M, _loops(S, 1), lambda m, g: m + g, lambda m, g: M + S - 1 + m + S - 1 - g)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Table:
    """A backward item follows its forward item as soon as it can (arXiv 2104.04473, section 2.2), in lockstep."""
    return _looped("1f1b", num_stages, num_microbatches, 1)


def interleaved(num_stages: int, num_microbatches: int, virtual: int = 2) -> Table:
    """Each stage holds `virtual` chunks, S apart: a smaller bubble for more traffic (arXiv 2104.04473, section 2.2)."""
    return _looped("interleaved", num_stages, num_microbatches, virtual)


def zigzag(num_stages: int, num_microbatches: int) -> Table:
    """Two chunks a stage, down and back up: the peak is S stage activations on every device (arXiv 2405.15362, section 3)."""
    S, M = num_stages, num_microbatches
    stages = (*range(S), *reversed(range(S)))
    return _table("zigzag", S, M, stages, lambda m, g: 2 * m + g, lambda m, g: 2 * m + 4 * S - 2 - g)


def zb(num_stages: int, num_microbatches: int) -> Table:
    """1f1b with weight gradients apart: they fill ticks that have neither bubble nor successor (arXiv 2401.10241)."""
    return _looped("zb", num_stages, num_microbatches, 1, split=True)


def zb_interleaved(num_stages: int, num_microbatches: int, virtual: int = 2) -> Table:
    """interleaved with weight gradients apart."""
    return _looped("zb_interleaved", num_stages, num_microbatches, virtual, split=True)


VIRTUAL: Mapping[str, int | None] = {"gpipe": 1, "1f1b": 1, "interleaved": None, "zigzag": 2, "zb": 1, "zb_interleaved": None}
"""The schedules by name, with the number of chunks a stage has; None: as many as wanted, 2 unless said."""


def virtual_of(name: str, virtual: int | None) -> int:
    """The chunks a stage has under a schedule."""
    return VIRTUAL[name] or virtual or 2


def make_table(name: str, num_stages: int, num_microbatches: int, virtual: int | None = None) -> Table:
    """The table of a schedule of VIRTUAL. Raises KeyError for another name."""
    if name in ("interleaved", "zb_interleaved"):
        return _looped(name, num_stages, num_microbatches, virtual_of(name, virtual), split=name == "zb_interleaved")
    return {"gpipe": gpipe, "1f1b": one_f_one_b, "zigzag": zigzag, "zb": zb}[name](num_stages, num_microbatches)


def _loops(num_stages: int, virtual: int) -> tuple[int, ...]:
    return tuple(range(num_stages)) * virtual


def _looped(name: str, S: int, M: int, v: int, *, split: bool = False) -> Table:
    """Groups of S microbatches go through chunk after chunk; backward mirrors forward vS - 1 ticks later."""

    def turn(m: int, c: int) -> int:
        return (m // S) * S * v + c * S + m % S

    def forward(m: int, g: int) -> int:
        return turn(m, g // S) + g % S

    def last_backward(m: int, g: int) -> int:
        # Stage 0 is the last that a chunk's backward reaches; every stage computes its weight gradients then.
        return turn(m, v - 1 - g // S) + S - 1 + v * S - 1

    def backward(m: int, g: int) -> int:
        return last_backward(m, g) - g % S

    return _table(name, S, M, _loops(S, v), forward, backward, last_backward if split else None)


def _table(name: str, S: int, M: int, stages: tuple[int, ...], forward: At, backward: At, weight: At | None = None) -> Table:
    items = [Item(m, g) for m in range(M) for g in range(len(stages))]
    num_ticks = 1 + max(at(i.microbatch, i.chunk) for at in (forward, backward, weight) if at for i in items)

    def rows(at: At) -> tuple[Row, ...]:
        grid: list[list[Item | None]] = [[None] * S for _ in range(num_ticks)]
        for item in items:
            grid[at(item.microbatch, item.chunk)][stages[item.chunk]] = item
        return tuple(map(tuple, grid))

    return Table(
        name=name,
        num_stages=S,
        num_microbatches=M,
        stages=stages,
        forward=rows(forward),
        backward=rows(backward),
        weight=None if weight is None else rows(weight),
    )
