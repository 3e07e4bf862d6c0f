"""Where a table's values wait: a slot for everything that one tick leaves for another, as few slots as the table's peak.

All buffers of one kind have the same number of slots on every stage. What an idle stage computes in a tick is garbage; it
goes to a slot that nothing waits in, or to a spare one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from jgt.pipeline.schedule import KINDS, Item, Kind, Row, Table

Grid = tuple[tuple[int, ...], ...]
"""An integer for each tick and stage."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Something on a stage that is written in one tick and last read in another; `item` says what it belongs to."""

    stage: int
    first: int
    last: int
    item: Item


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """Slots for waits: how many, the slot of each wait, and one for each tick and stage where garbage may go."""

    num_slots: int
    slots: Mapping[tuple[int, Item], int]
    free: Grid

    def at(self, rows: tuple[Row, ...]) -> Grid:
        """For each tick and stage the slot of its item, or the one for garbage."""
        return tuple(
            tuple(self.slots.get((s, item), free) if item else free for s, (item, free) in enumerate(zip(row, spare, strict=True)))
            for row, spare in zip(rows, self.free[: len(rows)], strict=True)
        )


def allocate(waits: Iterable[Wait], num_stages: int, num_ticks: int, idle: Collection[tuple[int, int]]) -> Buffer:
    """Slots by first fit in order of time, which needs no more of them than are taken at once.

    idle: the (tick, stage)s in which garbage is written.
    """
    taken: list[dict[int, int]] = [{} for _ in range(num_stages)]  # slot → the last tick in which it is taken
    slots: dict[tuple[int, Item], int] = {}
    busy: dict[tuple[int, int], set[int]] = {}
    for wait in sorted(waits, key=lambda w: (w.first, w.last)):
        on = taken[wait.stage]
        slot = next(n for n in range(len(on) + 1) if on.get(n, -1) < wait.first)
        on[slot] = wait.last
        slots[wait.stage, wait.item] = slot
        for tick in range(wait.first, wait.last + 1):
            busy.setdefault((tick, wait.stage), set()).add(slot)
    free = {place: next(n for n in range(len(busy.get(place, ())) + 1) if n not in busy.get(place, ())) for place in idle}
    num_slots = max([*map(len, taken), *(n + 1 for n in free.values())], default=0)
    grid = tuple(tuple(free.get((tick, stage), 0) for stage in range(num_stages)) for tick in range(num_ticks))
    return Buffer(num_slots=num_slots, slots=slots, free=grid)


@dataclass(frozen=True, kw_only=True)
class Sends:
    """What one kind of item sends: to which stages (as shifts along the axis) and, for each shift, into which slot.

    into[shift]: for each tick and stage the slot of the inbox that it writes at the end of the tick. pairs[shift]: the
    (sender, receiver)s that ever need it.
    """

    inbox: Buffer
    into: Mapping[int, Grid]
    pairs: Mapping[int, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """All waits of a table: what forward saves for backward, what backward stashes for weight gradients, both inboxes.

    head_waits: the head's cotangent waits in the inbox, because some backward item of the last chunk comes in a later tick
    than its forward item.
    """

    saved: Buffer
    stashed: Buffer
    forward: Sends
    backward: Sends
    head_waits: bool


def plan(table: Table) -> Buffers:
    """The buffers of a verified table."""
    ticks: Ticks = {(kind, item): (tick, stage) for kind in KINDS for tick, stage, item in table.items(kind)}
    saved = [
        Wait(stage=stage, first=tick, last=max(ticks[k, item][0] for k in ("B", "W") if (k, item) in ticks), item=item)
        for tick, stage, item in table.items("F")
        if ("B", item) in ticks
    ]
    stashed = [Wait(stage=stage, first=ticks["B", item][0], last=tick, item=item) for tick, stage, item in table.items("W")]
    S, T = table.num_stages, table.num_ticks
    ends = [(tick, stage, item) for tick, stage, item in table.items("F") if item.chunk == table.num_chunks - 1 and ("B", item) in ticks]
    head_waits = any(ticks["B", item][0] != tick for tick, _, item in ends)
    from_head = [Wait(stage=stage, first=tick, last=ticks["B", item][0], item=item) for tick, stage, item in ends] if head_waits else []
    return Buffers(
        saved=allocate(saved, S, T, _idle(table.forward)),
        stashed=allocate(stashed, S, T, _idle(table.backward)),
        forward=_sends(table, ticks, "F", 1, []),
        backward=_sends(table, ticks, "B", -1, from_head),
        head_waits=head_waits,
    )


Ticks = Mapping[tuple[Kind, Item], tuple[int, int]]


def _idle(rows: tuple[Row, ...]) -> set[tuple[int, int]]:
    return {(tick, stage) for tick, row in enumerate(rows) if any(row) for stage, item in enumerate(row) if item is None}


def _sends(table: Table, ticks: Ticks, kind: Kind, step: int, from_head: list[Wait]) -> Sends:
    S, T = table.num_stages, table.num_ticks
    waits = list(from_head)
    arrivals: dict[int, dict[tuple[int, int], Item]] = {}
    for tick, stage, item in table.items(kind):
        target = Item(item.microbatch, item.chunk + step)
        if (kind, target) in ticks:
            read, to = ticks[kind, target]
            waits.append(Wait(stage=to, first=tick + 1, last=read, item=target))
            arrivals.setdefault((to - stage) % S, {})[tick, to] = target
    # What arrives at the end of a tick is there at the beginning of the next: garbage goes where that one has room.
    active = [tick for tick, row in enumerate(table.rows(kind)) if any(row)]
    idle = {(tick + 1, stage) for found in arrivals.values() for tick in active for stage in range(S) if (tick, stage) not in found}
    if from_head:
        heads = {(wait.first, wait.stage) for wait in from_head}
        idle |= {(tick, stage) for tick in range(T) for stage in range(S)} - heads
    inbox = allocate(waits, S, T + 1, idle)

    def into(found: Mapping[tuple[int, int], Item]) -> Grid:
        return tuple(
            tuple(inbox.slots[s, found[t, s]] if (t, s) in found else inbox.free[t + 1][s] for s in range(S)) for t in range(T)
        )

    pairs = {shift: tuple(sorted({((to - shift) % S, to) for _, to in found})) for shift, found in arrivals.items()}
    return Sends(inbox=inbox, into={shift: into(found) for shift, found in sorted(arrivals.items())}, pairs=pairs)
