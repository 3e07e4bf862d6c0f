"""The process that the others wait for.

All processes take the same time for a step, because its collectives wait for the slowest. So step times cannot show which one
is slow. What differs is how a host spends that time: a fast one waits for its devices, a slow one is busy with its own work,
such as reading data and dispatching. The process with the most own work per step is the straggler.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .events import StartSummary


@dataclass(frozen=True, kw_only=True)
class Busy:
    """The seconds per step that the host of a process spends on its own work, instead of waiting for its devices."""

    process: int
    host: str | None
    step_s: float


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """The processes, the busiest first. slowest, host: the busiest one; slowest_s, median_s: seconds of own work per step.

    spread: slowest_s divided by median_s; None if the median is 0.
    """

    processes: tuple[Busy, ...]
    slowest: int
    host: str | None
    slowest_s: float
    median_s: float
    spread: float | None


def find_stragglers(starts: Sequence[StartSummary], others: Mapping[int, Sequence[StartSummary]]) -> Stragglers | None:
    """Compares the processes in the last start of process 0 that has steps. None if only one process has steps in it.

    starts: the starts of process 0. others: the starts of each other process.
    """
    last = next((start for start in reversed(starts) if start.stretches), None)
    if last is None:
        return None
    start_of = {0: last}
    for process, their_starts in others.items():
        # By overlap, because each process begins at another time, by its host's clock. Further processes are of an earlier start.
        overlapping = [start for start in their_starts if start.begin <= last.end and start.end >= last.begin]
        if overlapping and (last.processes is None or process < last.processes):
            start_of[process] = overlapping[-1]
    # Ties go to the lowest process, so that the report is the same each time.
    busy = sorted(filter(None, map(_busy, start_of, start_of.values())), key=lambda busy: (-busy.step_s, busy.process))
    if len(busy) < 2:
        return None
    slowest, median = busy[0], statistics.median(b.step_s for b in busy)
    spread = slowest.step_s / median if median else None
    return Stragglers(
        processes=tuple(busy), slowest=slowest.process, host=slowest.host, slowest_s=slowest.step_s, median_s=median, spread=spread
    )


def _busy(process: int, start: StartSummary) -> Busy | None:
    timed = [(stretch.busy, stretch.steps) for stretch in start.stretches if stretch.busy is not None]
    if not timed:
        return None
    return Busy(process=process, host=start.host, step_s=sum(busy for busy, _ in timed) / sum(steps for _, steps in timed))
