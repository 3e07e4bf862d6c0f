"""The accounts of a run's wall time: what of it counts, and what took the rest."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jgt import document
from jgt.document import InputError
from train.report.events import Event, read_events
from train.report.starts import Start, find_starts
from train.report.stragglers import Stragglers, find_stragglers

CAUSES: Mapping[str, str] = {
    "steps": "steps that count",
    "redone": "steps lost to a restart",
    "down": "between two starts",
    "startup": "process and links",
    "open": "opening model and data",
    "compile": "compiling",
    "init": "initialization",
    "restore": "finding and restoring a checkpoint",
    "save": "saving, while training waits",
    "eval": "evaluating",
    "sample": "writing a sample",
    "other": "anything else inside a start",
}
"""What wall time goes to: each second to one of them."""

NO_RECORD = "no record"
"""How a start ended whose events do not tell."""

_DIGITS = 6
"""Decimals of a second: a float that counts them from 1970 has no more."""

_CAUSE_OF = {"start": "startup", "verify": "restore", **{name: name for name in ("open", "compile", "init", "restore", "save", "eval", "sample")}}


@dataclass(frozen=True, kw_only=True)
class Share:
    """Seconds, and their share of the wall time."""

    seconds: float
    share: float


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Steps that count and their tokens, over the seconds in them and over wall time; None where there are none.

    tokens_per_step: by the config of the latest start; None where that cannot be read. median_step_s, slowest_step_s: seconds a
    step in the median and the slowest stretch, redone ones included; slowest_first, slowest_last: the steps of the latter.
    """

    tokens_per_step: int | None
    steps_per_s: float | None
    steps_per_s_wall: float | None
    tokens_per_s: float | None
    tokens_per_s_wall: float | None
    median_step_s: float | None
    slowest_step_s: float | None
    slowest_first: int | None
    slowest_last: int | None


@dataclass(frozen=True, kw_only=True)
class Accounts:
    """Where a run's wall time went, from the begin of its first start to its last event.

    goodput is the share of wall time in steps that count: productive and preserved, in the words of the ML Goodput Measurement
    library (https://docs.cloud.google.com/tpu/docs/goodput); time without a process is part of wall time, as in scheduling times
    runtime goodput of ML Productivity Goodput (arXiv 2502.06982). A step counts unless a later start went on from before it.
    """

    run: str
    wall_s: float
    goodput: float
    causes: Mapping[str, Share]
    steps: int
    steps_redone: int
    starts: tuple[Start, ...]
    restarts: int
    restarts_after: Mapping[str, int]
    skipped: Mapping[str, int]
    failed_saves: int
    faults: Mapping[str, int]
    throughput: Throughput
    stragglers: Stragglers | None
    unreadable_lines: int

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"starts": [start.to_json() for start in self.starts]}


def read_accounts(run: Path) -> Accounts:
    """The accounts of a run directory. Raises InputError where there are none, and OSError."""
    first = run / "events.jsonl"
    if not run.is_dir():
        raise InputError([f"{run}: is no run directory. Name one, such as runs/quickstart"])
    if not first.is_file():
        raise InputError([f"{run}: is no run directory: it has no events.jsonl. Name one, such as runs/quickstart"])
    events, unreadable = read_events(first)
    if not events:
        lines = f"{unreadable} lines, none of which can be read" if unreadable else "no lines"
        raise InputError([f"{first}: has no events: {lines}. A run writes its first when it starts"])
    others: dict[int, tuple[Start, ...]] = {}
    for path in sorted(run.glob("events-*.jsonl")):
        if (process := path.stem.removeprefix("events-")).isdecimal():
            found, wrong = read_events(path)
            others[int(process)] = find_starts(found)
            unreadable += wrong
    return account(str(run), events, others, tokens_per_step=_tokens_per_step(run), unreadable_lines=unreadable)


def account(
    run: str,
    events: Sequence[Event],
    others: Mapping[int, Sequence[Start]] | None = None,
    *,
    tokens_per_step: int | None = None,
    unreadable_lines: int = 0,
) -> Accounts:
    """The accounts of process 0's events, of which there is at least one; others: the starts of the other processes."""
    starts = find_starts(events)
    limits = _limits(starts)
    causes = _causes(starts, limits)
    # The parts of wall time, summed, are wall time to the last digit.
    wall = math.fsum(causes.values())
    trained = sum(stretch.steps for start in starts for stretch in start.stretches)
    kept = sum(stretch.kept(limit) for start, limit in zip(starts, limits, strict=True) for stretch in start.stretches)
    phases = Counter(event.phase for event in events)
    return Accounts(
        run=run,
        wall_s=wall,
        goodput=_share(causes["steps"], wall),
        causes={cause: Share(seconds=seconds, share=_share(seconds, wall)) for cause, seconds in causes.items()},
        steps=kept,
        steps_redone=trained - kept,
        starts=starts,
        restarts=len(starts) - 1,
        restarts_after=dict(Counter(start.ended or NO_RECORD for start in starts[:-1])),
        skipped={name: phases[name] for name in ("nonfinite", "spike")},
        failed_saves=phases["save_failed"],
        faults=dict(Counter(event.text("kind") or "unknown" for event in events if event.phase == "fault")),
        throughput=_throughput(starts, kept, tokens_per_step, causes["steps"], wall),
        stragglers=find_stragglers(starts, others or {}),
        unreadable_lines=unreadable_lines,
    )


def _limits(starts: Sequence[Start]) -> list[float]:
    """For each start the last of its steps that counts: a later start that goes on from before a step loses it."""
    limits, limit = [], math.inf
    for start in reversed(starts):
        limits.append(limit)
        limit = min(limit, math.inf if start.resumed is None else start.resumed)
    return limits[::-1]


def _causes(starts: Sequence[Start], limits: Sequence[float]) -> dict[str, float]:
    """Seconds by cause.

    Wall time is the host's clock, which can be set; seconds are not. Where a start begins before the last one ended it counts from
    there on, and where its phases are longer than it they shrink alike.
    """
    seconds: dict[str, list[float]] = {cause: [] for cause in CAUSES}
    known = starts[0].begin
    for start, limit in zip(starts, limits, strict=True):
        begin = max(start.begin, known)
        end = max(start.end, begin)
        parts = [(_CAUSE_OF[phase], spent) for phase, spent in start.seconds.items() if phase in _CAUSE_OF]
        for stretch in start.stretches:
            kept = stretch.kept(limit) / stretch.steps
            parts += [("steps", stretch.seconds * kept), ("redone", stretch.seconds * (1 - kept))]
        total = math.fsum(spent for _, spent in parts)
        fits = min(1.0, (end - begin) / total) if total else 1.0
        for cause, spent in parts:
            seconds[cause].append(spent * fits)
        seconds["down"].append(round(begin - known, _DIGITS))
        seconds["other"].append(max(0.0, round(end - begin - total, _DIGITS)))
        known = end
    return {cause: math.fsum(parts) for cause, parts in seconds.items()}


def _throughput(starts: Sequence[Start], kept: int, tokens: int | None, useful: float, wall: float) -> Throughput:
    speeds = [(stretch.seconds / stretch.steps, stretch) for start in starts for stretch in start.stretches]
    slowest_s, slowest = max(speeds, key=lambda speed: speed[0], default=(None, None))
    over_steps, over_wall = (kept / seconds if kept and seconds else None for seconds in (useful, wall))
    return Throughput(
        tokens_per_step=tokens,
        steps_per_s=over_steps,
        steps_per_s_wall=over_wall,
        tokens_per_s=None if tokens is None or over_steps is None else tokens * over_steps,
        tokens_per_s_wall=None if tokens is None or over_wall is None else tokens * over_wall,
        median_step_s=statistics.median(speed for speed, _ in speeds) if speeds else None,
        slowest_step_s=slowest_s,
        slowest_first=None if slowest is None else slowest.first,
        slowest_last=None if slowest is None else slowest.last,
    )


def _tokens_per_step(run: Path) -> int | None:
    try:
        config = document.read(run / "config.yaml").plain()
    except InputError:
        return None
    match config:
        case {"train": {"batch": int(batch)}, "model": {"seq": int(seq)}}:
            return batch * seq
    return None


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
