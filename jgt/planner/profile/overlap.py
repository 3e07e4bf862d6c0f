"""Divides time among the things that ran in it, so that the parts add up to the whole.

On a GPU several kernels run at once, and collectives run beside them. Simply adding up durations would count such time twice. Instead,
each instant is divided equally among all that run in it, in two classes: kernels are in the foreground; collectives and copies are in the
background and count only while no kernel runs. What a collective gets is therefore its exposed time, which makes the step longer.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from jgt.planner.hlo.origin import Origin


class Interval(NamedTuple):
    """Something that ran from start to end, in any unit of time, and the signal and phase it ran for."""

    start: float
    end: float
    origin: Origin
    in_background: bool = False


@dataclass(frozen=True, kw_only=True)
class BusyTime:
    """Time by origin; foreground and background add up to the time in which anything ran.

    gaps: (start, end) of each stretch between the first start and the last end in which nothing ran.
    """

    foreground: dict[Origin, float] = field(default_factory=lambda: collections.defaultdict(float))
    background: dict[Origin, float] = field(default_factory=lambda: collections.defaultdict(float))
    gaps: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])

    @property
    def idle(self) -> float:
        """The time in which nothing ran."""
        return sum(end - start for start, end in self.gaps)


def divide_time(intervals: Iterable[Interval]) -> BusyTime:
    """Divides the time of intervals among their origins, in one pass over the starts and ends in order of time."""
    # Ends (-1) sort before starts (1) at the same moment, so that intervals which only touch never run at once.
    edges = sorted(
        ((at, step, i.in_background, i.origin) for i in intervals for at, step in ((i.start, 1), (i.end, -1))), key=lambda edge: edge[:2]
    )
    # The number of running intervals of each origin: in the foreground, and in the background.
    busy, running = BusyTime(), (collections.Counter[Origin](), collections.Counter[Origin]())
    before = edges[0][0] if edges else 0.0
    for at, step, in_background, origin in edges:
        if at > before:
            # The foreground is asked first: while any kernel runs, the background gets nothing.
            counts = next((counter for counter in running if counter), None)
            if counts is None:
                busy.gaps.append((before, at))
            else:
                times, total = busy.foreground if counts is running[0] else busy.background, counts.total()
                for each, count in counts.items():
                    times[each] += (at - before) * count / total
            before = at
        counter = running[in_background]
        counter[origin] += step
        if not counter[origin]:
            # An empty counter has to be false: it decides above whether a class is running.
            del counter[origin]
    return busy
