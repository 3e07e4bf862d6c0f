"""A table as arrays that a loop over ticks reads: for each stage what it works on, for all of them what head and embedding do."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from jgt.pipeline.buffers import Buffers, Grid, plan
from jgt.pipeline.schedule import KINDS, Item, Kind, Row, Table

Arrays = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive ticks with the same kinds of items.

    staged[kind]: arrays [ticks, stages]; common[name]: arrays [ticks], for name in embed, head, embed_back. always: the names
    whose work is wanted in every tick; rarely: those that it is better to skip than to do in vain.
    """

    kinds: tuple[Kind, ...]
    staged: Mapping[Kind, Arrays]
    common: Mapping[str, Arrays]
    always: frozenset[str]
    rarely: frozenset[str]

    def share(self, name: str) -> Fraction:
        """How much of the work of a kind or name is wanted: items over slots, stages included."""
        arrays = next(a for n, a in [*self.staged.items(), *self.common.items()] if n == name)
        on = arrays["on"]
        return Fraction(int(np.sum(on)), on.size)


@dataclass(frozen=True, kw_only=True)
class Ticks:
    """A table ready to run."""

    table: Table
    buffers: Buffers
    segments: tuple[Segment, ...]


def arrays_of(table: Table, *, skips: bool = False) -> Ticks:
    """The arrays of a verified table. skips: work that is done in vain is worth a branch, however rare it is."""
    buffers = plan(table)
    staged: dict[Kind, Arrays] = {kind: _staged(table, buffers, kind) for kind in KINDS}
    last = table.num_chunks - 1
    common = {
        "embed": _common(table.forward, 0),
        "head": _common(table.forward, last),
        "embed_back": _common(table.backward, 0),
    }
    active: list[tuple[Kind, ...]] = [tuple(kind for kind in KINDS if any(table.rows(kind)[tick])) for tick in range(table.num_ticks)]
    segments, start = [], 0
    for kinds, group in itertools.groupby(active):
        end = start + len(list(group))
        if kinds:
            segments.append(_segment(kinds, slice(start, end), staged, common, skips=skips or table.virtual > 1))
        start = end
    return Ticks(table=table, buffers=buffers, segments=tuple(segments))


def _segment(
    kinds: tuple[Kind, ...], ticks: slice, staged: Mapping[Kind, Arrays], common: Mapping[str, Arrays], *, skips: bool
) -> Segment:
    share = {name: float(np.mean(arrays["on"][ticks])) for name, arrays in common.items()}
    return Segment(
        kinds=kinds,
        staged={kind: _cut(staged[kind], ticks) for kind in kinds},
        common={name: _cut(arrays, ticks) for name, arrays in common.items() if share[name]},
        always=frozenset(name for name, part in share.items() if part == 1),
        # With one chunk a stage, only the ticks at both ends have none of it: not worth a branch.
        rarely=frozenset(name for name, part in share.items() if 0 < part < 1 and skips),
    )


def _cut(arrays: Arrays, ticks: slice) -> Arrays:
    return {name: {k: v[ticks] for k, v in a.items()} if isinstance(a, dict) else a[ticks] for name, a in arrays.items()}


def _staged(table: Table, buffers: Buffers, kind: Kind) -> Arrays:
    rows = table.rows(kind)
    arrays: Arrays = {
        "on": _grid(rows, lambda item: True, False),
        "microbatch": _grid(rows, lambda item: item.microbatch, 0),
        "chunk": _grid(rows, lambda item: table.local_chunk(item.chunk), 0),
        "saved": np.asarray(buffers.saved.at(rows), np.int32),
    }
    if kind != "W":
        sends = buffers.forward if kind == "F" else buffers.backward
        arrays["first"] = _grid(rows, lambda item: item.chunk == 0, False)
        arrays["last"] = _grid(rows, lambda item: item.chunk == table.num_chunks - 1, False)
        arrays["read"] = np.asarray(sends.inbox.at(rows), np.int32)
        arrays["into"] = {str(shift): np.asarray(grid, np.int32) for shift, grid in sends.into.items()}
    if kind == "F" and buffers.head_waits:
        arrays["from_head"] = _from_head(table, buffers)
    if kind != "F":
        arrays["stashed"] = np.asarray(buffers.stashed.at(rows), np.int32)
    return arrays


def _from_head(table: Table, buffers: Buffers) -> np.ndarray:
    """The slot of the backward inbox for the cotangent that the head makes in a tick."""
    ends: list[list[Item | None]] = [[item if item and item.chunk == table.num_chunks - 1 else None for item in row] for row in table.forward]
    grid: Grid = buffers.backward.inbox.at(tuple(map(tuple, ends)))
    return np.asarray(grid, np.int32)


def _grid(rows: Sequence[Row], value: Any, nothing: Any) -> np.ndarray:
    kind = bool if isinstance(nothing, bool) else np.int32
    return np.asarray([[nothing if item is None else value(item) for item in row] for row in rows], kind)


def _common(rows: Sequence[Row], chunk: int) -> Arrays:
    found = [next((item for item in row if item and item.chunk == chunk), None) for row in rows]
    return {
        "on": np.asarray([item is not None for item in found]),
        "microbatch": np.asarray([0 if item is None else item.microbatch for item in found], np.int32),
    }
