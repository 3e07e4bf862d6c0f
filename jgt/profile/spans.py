"""Spans of time that overlap, made into times that add up."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

Key = tuple[str, str]
"""Signal and phase."""


class Span(NamedTuple):
    """What ran from start to end, in any unit, and whose it is. beside: it counts only where nothing else runs (a collective, a copy)."""

    start: float
    end: float
    key: Key
    beside: bool = False


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Time by key, which adds up to the time in which anything ran: an instant is shared alike by all that run in it.

    own: of what counts anyway; alone: of what runs beside it, where it runs alone. gaps: (start, end) between the first start and
    the last end in which nothing ran.
    """

    own: dict[Key, float] = field(default_factory=lambda: collections.defaultdict(float))
    alone: dict[Key, float] = field(default_factory=lambda: collections.defaultdict(float))
    gaps: list[tuple[float, float]] = field(default_factory=list)

    @property
    def idle(self) -> float:
        """Time in which nothing ran."""
        return sum(end - start for start, end in self.gaps)


def shares(spans: Iterable[Span]) -> Shares:
    """One pass over the starts and ends."""
    edges = sorted(((at, step, span.beside, span.key) for span in spans for at, step in ((span.start, 1), (span.end, -1))), key=lambda edge: edge[:2])
    found, running = Shares(), (collections.Counter[Key](), collections.Counter[Key]())
    before = edges[0][0] if edges else 0.0
    for at, step, beside, key in edges:
        now = next((counter for counter in running if counter), None)
        if at > before:
            if now is None:
                found.gaps.append((before, at))
            else:
                times, total = found.own if now is running[0] else found.alone, now.total()
                for one, count in now.items():
                    times[one] += (at - before) * count / total
            before = at
        counter = running[beside]
        counter[key] += step
        if not counter[key]:
            del counter[key]
    return found
