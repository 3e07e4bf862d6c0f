"""Which process the others wait for."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from train.report.starts import Start


@dataclass(frozen=True, kw_only=True)
class Busy:
    """The seconds a step that a process' host spends on its own work (reading data, dispatching), not waiting for devices."""

    process: int
    host: str | None
    step_s: float


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """Processes side by side, the busiest first. All take the same time for a step: they wait for the slowest.

    spread: the slowest over the median; None where the median is 0.
    """

    processes: tuple[Busy, ...]
    slowest: int
    host: str | None
    slowest_s: float
    median_s: float
    spread: float | None


def find_stragglers(starts: Sequence[Start], others: Mapping[int, Sequence[Start]]) -> Stragglers | None:
    """Over the last start of process 0 that has steps, and those of the others at that time; None with one process."""
    last = next((start for start in reversed(starts) if start.stretches), None)
    if last is None:
        return None
    beside = {0: last}
    for process, theirs in others.items():
        then = [start for start in theirs if start.begin <= last.end and start.end >= last.begin]
        if then and (last.processes is None or process < last.processes):
            beside[process] = then[-1]
    found = [busy for process, start in beside.items() if (busy := _busy(process, start)) is not None]
    if len(found) < 2:
        return None
    found.sort(key=lambda busy: (-busy.step_s, busy.process))
    median = statistics.median(busy.step_s for busy in found)
    return Stragglers(
        processes=tuple(found),
        slowest=found[0].process,
        host=found[0].host,
        slowest_s=found[0].step_s,
        median_s=median,
        spread=found[0].step_s / median if median else None,
    )


def _busy(process: int, start: Start) -> Busy | None:
    timed = [(stretch.busy, stretch.steps) for stretch in start.stretches if stretch.busy is not None]
    if not timed:
        return None
    return Busy(process=process, host=start.host, step_s=sum(busy for busy, _ in timed) / sum(steps for _, steps in timed))
