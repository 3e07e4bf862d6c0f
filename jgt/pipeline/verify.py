"""What is wrong with a table: items that are missing, doubled, on the wrong stage or before what they wait for."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jgt.pipeline.schedule import KINDS, Kind, Table

LIMIT = 20
"""Problems that are shown; of more, the number."""
_MOST = 10_000
"""Of one kind, that are looked for."""

Ticks = Mapping[Kind, dict[tuple[int, int], int]]
"""The tick of each item: kind → (microbatch, chunk) → tick."""

_NEEDS: Mapping[Kind, tuple[tuple[Kind, int, int], ...]] = {
    "F": (("F", -1, 1),),
    "B": (("B", 1, 1), ("F", 0, 0)),
    "W": (("B", 0, 0),),
}
"""What an item of a kind waits for: kind, chunks further on, and the ticks that the result takes to arrive."""

_RUNS: Mapping[Kind, str] = {"F": "runs forward on", "B": "runs backward on", "W": "gets the weight gradients of"}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A problem, and the tick in which it stands; None: in no tick, or in all."""

    tick: int | None = None
    text: str


@dataclass(frozen=True, kw_only=True)
class _Need:
    """What an item waits for: the first tick in which it can run then; tick, kind and chunk of the other one."""

    earliest: int
    tick: int
    kind: Kind
    chunk: int


def problems(table: Table) -> list[str]:
    """What is wrong with a table, at most LIMIT problems and how many more; empty: it runs. Ticks count from 0.

    Every item runs once, on the stage of its chunk. F waits for F of the chunk before and B for B of the chunk after, a
    tick at least; B for its own F and W for its own B, in the same tick if need be: a tick runs F, then B, then W, with
    the head between F and B of the last chunk. Every stage holds the same number of chunks.
    """
    return capped([fault.text for fault in find_faults(table)])


def capped(texts: list[str]) -> list[str]:
    """The first LIMIT texts, and how many more there are."""
    return texts if len(texts) <= LIMIT else [*texts[:LIMIT], f"and {len(texts) - LIMIT} more problems"]


def find_faults(table: Table) -> list[Fault]:
    """All that is wrong with a table, in the order of its ticks; what stands in no tick comes last."""
    if shape := [Fault(text=text) for text in _misshapen(table)]:
        return shape
    ticks: Ticks = {kind: {} for kind in KINDS}
    checks = (_uneven(table), _misplaced(table, ticks), _missing(table, ticks), _too_early(table, ticks))
    faults = [fault for check in checks for fault in itertools.islice(check, _MOST)]
    return sorted(faults, key=lambda fault: (fault.tick is None, fault.tick or 0))


def _misshapen(table: Table) -> Iterator[str]:
    S = table.num_stages
    for noun, number in (("stage", S), ("microbatch", table.num_microbatches), ("chunk", table.num_chunks)):
        if number < 1:
            yield f"the table has {number} {noun}{'es' if noun == 'microbatch' else 's'}. Give it at least 1"
    for chunk, stage in enumerate(table.stages):
        if not 0 <= stage < S:
            yield f"chunk {chunk} is on stage {stage}. The stages are {_range(S)}: put it on one of them"
    for kind in KINDS:
        rows = table.rows(kind)
        if len(rows) != table.num_ticks:
            yield f"{kind} has {len(rows)} ticks and F has {table.num_ticks}. Give them the same number of rows"
        for tick, row in enumerate(rows):
            if len(row) != S:
                yield f"tick {tick}: {kind} has entries for {len(row)} stages. Give it {S}"


def _uneven(table: Table) -> Iterator[Fault]:
    counts = Counter(table.stages)
    most, largest = counts.most_common(1)[0]
    for stage in range(table.num_stages):
        if (number := counts[stage]) < largest:
            yield Fault(text=f"stage {stage} holds {number} of the chunks and stage {most} holds {largest}. Give every stage the same number")


def _misplaced(table: Table, ticks: Ticks) -> Iterator[Fault]:
    """What is wrong with items by themselves; notes the tick of each."""
    for kind in KINDS:
        for tick, stage, item in table.items(kind):
            m, g = item.microbatch, item.chunk
            what = f"tick {tick}, stage {stage}: {kind} of microbatch {m}, chunk {g}"
            if not 0 <= m < table.num_microbatches:
                yield Fault(tick=tick, text=f"{what}: the microbatches are {_range(table.num_microbatches)}. Remove it")
            elif not 0 <= g < table.num_chunks:
                yield Fault(tick=tick, text=f"{what}: the chunks are {_range(table.num_chunks)}. Remove it")
            elif (m, g) in ticks[kind]:
                yield Fault(tick=tick, text=f"{what} is there a second time, the first in tick {ticks[kind][m, g]}. Remove one of the two")
            else:
                ticks[kind][m, g] = tick
                if stage != (home := table.stages[g]):
                    yield Fault(tick=tick, text=f"{what} is on the wrong stage: chunk {g} is on stage {home}. Move it there")


def _missing(table: Table, ticks: Ticks) -> Iterator[Fault]:
    for kind in KINDS:
        if kind == "W" and table.weight is None:
            continue
        for m in range(table.num_microbatches):
            for g, stage in enumerate(table.stages):
                if (m, g) not in ticks[kind]:
                    never = f"microbatch {m} never {_RUNS[kind]} chunk {g} (stage {stage})"
                    yield Fault(text=f"{never}. Add {kind} in tick {_last_need(ticks, kind, m, g).earliest} or later")


def _too_early(table: Table, ticks: Ticks) -> Iterator[Fault]:
    for kind in KINDS:
        for (m, g), tick in ticks[kind].items():
            need = _last_need(ticks, kind, m, g)
            if need.earliest > tick:
                what = (
                    f"tick {tick}, stage {table.stages[g]}: {kind} of microbatch {m}, chunk {g} waits for {need.kind} of chunk {need.chunk}"
                )
                when = "in the same tick and arrives in the next" if need.tick == tick else f"in tick {need.tick}"
                yield Fault(tick=tick, text=f"{what}, which runs {when}: a deadlock. Move it to tick {need.earliest} or later")


def _last_need(ticks: Ticks, kind: Kind, m: int, g: int) -> _Need:
    """Of what an item waits for, as far as it stands in the table, what comes last."""
    last = _Need(earliest=0, tick=-1, kind=kind, chunk=g)
    for other, chunk, gap in _NEEDS[kind]:
        tick = ticks[other].get((m, g + chunk))
        if tick is not None and tick + gap > last.earliest:
            last = _Need(earliest=tick + gap, tick=tick, kind=other, chunk=g + chunk)
    return last


def _range(number: int) -> str:
    return "0" if number == 1 else f"0 to {number - 1}"
