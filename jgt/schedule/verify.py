"""Checks a table: every item exists once, and after everything that it waits for.

A wrong table would not crash. In lockstep a stage that runs an item too early reads a slot that nothing has been written to, and training
continues with wrong gradients. But the rules are local. F waits for F of the chunk before it and B for B of the chunk after it, both for
one tick at least, since what is sent arrives in the next tick. B also waits for its own F, and W for its own B, which may share their tick.
If every item comes late enough for its own rule, the whole table runs: a schedule can deadlock in no other way.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jgt.schedule.table import KINDS, Kind, Table

LIMIT = 20
"""A message lists this many faults and counts the rest."""

MAX_FAULTS = 10_000
"""One check stops after this many faults, because a large table may be wrong in every cell."""

ItemTicks = Mapping[Kind, dict[tuple[int, int], int]]
"""The tick of each item: kind → (microbatch, chunk) → tick."""

_NEEDS: Mapping[Kind, tuple[tuple[Kind, int, int], ...]] = {
    "F": (("F", -1, 1),),
    "B": (("B", 1, 1), ("F", 0, 0)),
    "W": (("B", 0, 0),),
}
"""The items that an item of each kind waits for, as (kind, offset of its chunk, ticks until the result arrives)."""

_VERBS: Mapping[Kind, str] = {"F": "runs forward on", "B": "runs backward on", "W": "gets the weight gradients of"}


class Fault(NamedTuple):
    """Something wrong with a table. tick: where; None if it belongs to no tick, such as a missing item."""

    text: str
    tick: int | None = None


class _Need(NamedTuple):
    """The last of the items that an item waits for, with its tick, and the earliest tick that the waiting item can have."""

    earliest: int
    tick: int
    kind: Kind
    chunk: int


def find_faults(table: Table) -> list[Fault]:
    """Everything that is wrong with a table, in the order of its ticks; faults without a tick come last. Empty: the table runs."""
    ticks: ItemTicks = {kind: {} for kind in KINDS}
    # A generator runs only when islice asks it: _duplicates has filled `ticks` before the two that read them start.
    checks = (_uneven(table), _duplicates(table, ticks), _missing(table, ticks), _too_early(table, ticks))
    faults = [fault for check in checks for fault in itertools.islice(check, MAX_FAULTS)]
    return sorted(faults, key=lambda fault: (fault.tick is None, fault.tick or 0))


def limit_texts(texts: list[str]) -> list[str]:
    """The first LIMIT texts, and a line that says how many more there are."""
    return texts if len(texts) <= LIMIT else [*texts[:LIMIT], f"and {len(texts) - LIMIT} more problems"]


def _uneven(table: Table) -> Iterator[Fault]:
    # All stages run one program, whose buffers and weights have a dim for the chunks of a stage: its size is the same for all.
    counts = Counter(table.stages)
    fullest, largest = counts.most_common(1)[0]
    for stage in range(table.num_stages):
        if (number := counts[stage]) < largest:
            fault = f"stage {stage} holds {number} of the chunks and stage {fullest} holds {largest}"
            yield Fault(text=f"{fault}. Give every stage the same number")


def _duplicates(table: Table, ticks: ItemTicks) -> Iterator[Fault]:
    """Items that come twice. Records the tick of every item in `ticks`, also for the checks that follow."""
    for kind in KINDS:
        for tick, stage, item in table.items(kind):
            m, g = item.microbatch, item.chunk
            if tick != (first := ticks[kind].setdefault((m, g), tick)):
                subject = f"tick {tick}, stage {stage}: {kind} of microbatch {m}, chunk {g}"
                yield Fault(tick=tick, text=f"{subject} is a duplicate: the first is in tick {first}. Remove one of the two")


def _missing(table: Table, ticks: ItemTicks) -> Iterator[Fault]:
    for kind in KINDS:
        # Without W rows, backward items compute the weight gradients.
        if kind == "W" and table.weight is None:
            continue
        for m in range(table.num_microbatches):
            for g, stage in enumerate(table.stages):
                if (m, g) not in ticks[kind]:
                    never = f"microbatch {m} never {_VERBS[kind]} chunk {g} (stage {stage})"
                    yield Fault(text=f"{never}. Add {kind} in tick {_last_need(ticks, kind, m, g).earliest} or later")


def _too_early(table: Table, ticks: ItemTicks) -> Iterator[Fault]:
    for kind in KINDS:
        for (m, g), tick in ticks[kind].items():
            need = _last_need(ticks, kind, m, g)
            if need.earliest > tick:
                waiting = f"tick {tick}, stage {table.stages[g]}: {kind} of microbatch {m}, chunk {g} waits for"
                when = "in the same tick and arrives in the next" if need.tick == tick else f"in tick {need.tick}"
                blocker = f"{need.kind} of chunk {need.chunk}, which runs {when}"
                yield Fault(tick=tick, text=f"{waiting} {blocker}: a deadlock. Move it to tick {need.earliest} or later")


def _last_need(ticks: ItemTicks, kind: Kind, m: int, g: int) -> _Need:
    """Among the items that an item waits for and that the table has, the one whose result arrives last."""
    needs = [
        _Need(earliest=tick + delay, tick=tick, kind=other, chunk=g + offset)
        for other, offset, delay in _NEEDS[kind]
        if (tick := ticks[other].get((m, g + offset))) is not None
    ]
    # Without any of them the first tick would do. Items that are missing altogether have a fault of their own.
    return max(needs, key=lambda need: need.earliest, default=_Need(earliest=0, tick=-1, kind=kind, chunk=g))
