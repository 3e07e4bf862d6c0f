"""Where a table's values wait: a register allocator, with microbatch activations for values and array slots for registers.

As in a compiler, the lifetimes are known beforehand, so that every value gets a slot of a fixed array and as few slots as possible exist.
With two stages, stage 0 of 1F1B saves microbatch m from tick m to tick m + 2, and three slots do for any number of microbatches:

    tick              0     1     2        3        4
    items             F0    F1    F2 B0    F3 B1    F4 B2
    F saves in slot   0     1     2        0        1
    B frees slot                  0        1        2

One thing is not as in a compiler: all stages run one program, so all have the same number of slots, and a stage without an item in a tick
still computes and writes something. That garbage needs a slot, too: one that contains nothing alive at that time, or a spare one. The
invariant: no write, garbage included, hits a living value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jgt.schedule.table import KINDS, Item, Kind, Row, Table

Grid = tuple[tuple[int, ...], ...]
"""An integer for each tick and stage."""

Places = Mapping[tuple[Kind, Item], tuple[int, int]]
"""The tick and stage of every item of a table."""


class Lifetime(NamedTuple):
    """The time between the tick that writes a value and the last tick that reads it, on one stage, for one item."""

    stage: int
    first: int
    last: int
    item: Item


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """Slots for values, on every stage the same number.

    slots: (stage, item) → the slot of its value. garbage: the slot that may be overwritten, for each tick and stage; 0 if that stage
    writes no garbage in that tick.
    """

    num_slots: int
    slots: Mapping[tuple[int, Item], int]
    garbage: Grid

    def at(self, rows: Sequence[Sequence[Item | None]]) -> Grid:
        """The slot of the item for each tick and stage or, without an item, the slot for garbage."""
        return tuple(
            tuple(self.slots.get((s, item), spare) if item else spare for s, (item, spare) in enumerate(zip(row, spares, strict=True)))
            for row, spares in zip(rows, self.garbage[: len(rows)], strict=True)
        )


def allocate_slots(lifetimes: Iterable[Lifetime], num_stages: int, num_ticks: int, idle: Collection[tuple[int, int]]) -> Buffer:
    """A slot for each value, by linear scan: in order of time, the first slot that is free.

    For intervals this needs exactly as many slots as values are alive at once. idle: the (tick, stage)s that write garbage.
    """
    last_use: list[dict[int, int]] = [{} for _ in range(num_stages)]  # stage → slot → the last tick of the value in it
    slots: dict[tuple[int, Item], int] = {}
    alive: dict[tuple[int, int], set[int]] = {}
    for lifetime in sorted(lifetimes, key=lambda lifetime: (lifetime.first, lifetime.last)):
        on_stage = last_use[lifetime.stage]
        # Strictly before: within its first tick a value may be written before the last reader of the old one has run.
        slot = next(n for n in range(len(on_stage) + 1) if on_stage.get(n, -1) < lifetime.first)
        on_stage[slot] = lifetime.last
        slots[lifetime.stage, lifetime.item] = slot
        for tick in range(lifetime.first, lifetime.last + 1):
            alive.setdefault((tick, lifetime.stage), set()).add(slot)
    spare = {place: next(n for n in range(len(alive.get(place, ())) + 1) if n not in alive.get(place, ())) for place in idle}
    num_slots = max([*map(len, last_use), *(n + 1 for n in spare.values())], default=0)
    garbage = tuple(tuple(spare.get((tick, stage), 0) for stage in range(num_stages)) for tick in range(num_ticks))
    return Buffer(num_slots=num_slots, slots=slots, garbage=garbage)


@dataclass(frozen=True, kw_only=True)
class Sends:
    """The sends of one kind of item, grouped by shift: the distance along the stage axis from sender to receiver.

    inbox: the slots in which arrivals wait. into[shift]: the slot of the inbox that is written at the end of a tick, for each tick and
    stage. pairs[shift]: every (sender, receiver) that needs the shift in any tick.
    """

    inbox: Buffer
    into: Mapping[int, Grid]
    pairs: Mapping[int, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """All buffers of a table.

    saved: the values that forward saves for backward and for weight gradients. stashed: the values that backward leaves for weight
    gradients. forward, backward: the inboxes for activations and for cotangents. head_waits: whether the head's cotangent waits in the
    backward inbox, because some backward item of the last chunk runs in a later tick than its forward item.
    """

    saved: Buffer
    stashed: Buffer
    forward: Sends
    backward: Sends
    head_waits: bool


def allocate_buffers(table: Table) -> Buffers:
    """The buffers of a verified table."""
    places: Places = {(kind, item): (tick, stage) for kind in KINDS for tick, stage, item in table.items(kind)}
    # A table of an evaluation has no backward items: nothing is saved then.
    differentiated = [(tick, stage, item) for tick, stage, item in table.items("F") if ("B", item) in places]
    saved = [
        Lifetime(stage, tick, max(places[k, item][0] for k in ("B", "W") if (k, item) in places), item)
        for tick, stage, item in differentiated
    ]
    stashed = [Lifetime(stage, places["B", item][0], tick, item) for tick, stage, item in table.items("W")]
    S, T = table.num_stages, table.num_ticks
    last = table.num_chunks - 1
    from_head = [Lifetime(stage, tick, places["B", item][0], item) for tick, stage, item in differentiated if item.chunk == last]
    head_waits = any(lifetime.last != lifetime.first for lifetime in from_head)
    return Buffers(
        saved=allocate_slots(saved, S, T, _idle(table.forward)),
        stashed=allocate_slots(stashed, S, T, _idle(table.backward)),
        forward=_sends(table, places, "F", 1, []),
        backward=_sends(table, places, "B", -1, from_head if head_waits else []),
        head_waits=head_waits,
    )


def _idle(rows: tuple[Row, ...]) -> set[tuple[int, int]]:
    """The (tick, stage)s without an item, in ticks in which another stage has one."""
    return {(tick, stage) for tick, row in enumerate(rows) if any(row) for stage, item in enumerate(row) if item is None}


def _sends(table: Table, places: Places, kind: Kind, step: int, from_head: list[Lifetime]) -> Sends:
    """The sends of a kind of item to the chunk `step` further on, and the inbox that receives them."""
    S, T = table.num_stages, table.num_ticks
    lifetimes = list(from_head)
    # By shift: for each tick and receiver the item that has arrived at the beginning of the tick.
    arrivals: defaultdict[int, list[list[Item | None]]] = defaultdict(lambda: [[None] * S for _ in range(T + 1)])
    for tick, stage, item in table.items(kind):
        target = Item(item.microbatch, item.chunk + step)
        if (kind, target) in places:
            read, receiver = places[kind, target]
            lifetimes.append(Lifetime(receiver, tick + 1, read, target))
            # Modulo S, so that a shift is the same for all stages. It is 0 where a chunk follows on its own stage, as
            # at zigzag's turn.
            arrivals[(receiver - stage) % S][tick + 1][receiver] = target
    # A shift moves something on every stage. What arrives at the end of a tick is in its slot at the beginning of the next, so
    # garbage must go to a slot that is free in that next tick.
    after = [tick + 1 for tick, row in enumerate(table.rows(kind)) if any(row)]
    idle = {(tick, stage) for rows in arrivals.values() for tick in after for stage, item in enumerate(rows[tick]) if item is None}
    if from_head:
        # The head runs in every tick, on all stages together, and only sometimes for an item of this stage.
        heads = {(lifetime.first, lifetime.stage) for lifetime in from_head}
        idle |= {(tick, stage) for tick in range(T) for stage in range(S)} - heads
    inbox = allocate_slots(lifetimes, S, T + 1, idle)
    receivers = {shift: {to for row in rows for to, item in enumerate(row) if item} for shift, rows in arrivals.items()}
    pairs = {shift: tuple(sorted(((to - shift) % S, to) for to in stages)) for shift, stages in receivers.items()}
    into = {shift: inbox.at(rows)[1:] for shift, rows in sorted(arrivals.items())}
    return Sends(inbox=inbox, into=into, pairs=pairs)
