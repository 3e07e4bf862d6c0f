"""The accounts of a run's wall time: how much of it counts, and what the rest was spent on.

Wall time runs from the beginning of the first start to the last event, and every second of it belongs to exactly one cause. Starts are
processed in order; a cursor marks the time already accounted for. The time from the cursor to the beginning of a start is `down`. Inside a
start, its phases and its stretches of steps take the seconds that they measured, `other` takes the rest, and the cursor moves to the end of
the start. A clock that was set could count a second twice. So a start counts only from the cursor on, and phases that are longer than their
start shrink to fit it.

Of the time in steps, only the steps that count are useful. A step behind the checkpoint from which a later start resumed was lost and
trained again: its time is `redone`. Steps inside one stretch share its seconds in proportion.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from jgt.document import InputError

from .events import Event, StartSummary, Stragglers, find_starts, find_stragglers, read_process
from .loads import Loads
from .rows import read_config
from .status import processes_of

CAUSES: Mapping[str, str] = {
    "steps": "steps that count",
    "redone": "steps lost to a restart",
    "down": "between two starts",
    "startup": "starting and connecting processes",
    "open": "opening model and data",
    "trace": "tracing the step",
    "compile": "compiling",
    "init": "initialization",
    "restore": "finding and restoring a checkpoint",
    "save": "saving, while training waits",
    "eval": "evaluating",
    "sample": "generating the sample",
    "hook": "hooks of your own",
    "other": "anything else inside a start",
}
"""The causes that wall time is spent on, with their names in the table. Each second belongs to one of them."""
NO_RECORD = "no record"
"""How a start ended, if its events do not say."""
_DIGITS = 6
"""Decimals of a second: a float of seconds since 1970 has no more."""
_INCIDENTS = ("nonfinite", "spike", "save_failed")
CAUSE_OF = {"start": "startup", "verify": "restore"} | {
    name: name for name in ("open", "trace", "compile", "init", "restore", "save", "eval", "sample", "hook")
}
"""The cause of a phase. All other phases are part of `other`."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """Seconds, and their share of wall time."""

    seconds: float
    share: float


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """The speed of a run, by the steps that count. None if there are no such steps.

    tokens_per_step: the batch times the length in the run's config; None if that cannot be read.
    steps_per_s, tokens_per_s: over the seconds spent in these steps. With `_wall`: over wall time.
    median_step_s, slowest_step_s: seconds per step in the median and in the slowest stretch of all steps, including lost ones.
    slowest_first, slowest_last: the steps of the slowest stretch.
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
    """Where a run's wall time went, from the beginning of its first start to its last event.

    goodput: the share of wall time in steps that count, which the ML Goodput Measurement library
    (https://docs.cloud.google.com/tpu/docs/goodput) calls productive and preserved. Time between starts is part of wall time: in
    ML Productivity Goodput (arXiv 2502.06982) this is scheduling goodput times runtime goodput.
    steps, steps_redone: the number of steps that count, and of trained steps that do not.
    restarts_after: how the starts before a restart ended, with counts.
    skipped: updates that were not applied, by reason.
    layout_cpu_s: the CPU-seconds of comparisons of the layout with one device, beside the run.
    unreadable_lines: the number of lines in all events files that are not events.
    experts: the load of each expert over time, which `read_accounts` leaves out: a large model has millions of numbers.
    """

    run: str
    wall_s: float
    goodput: float
    causes: Mapping[str, Share]
    steps: int
    steps_redone: int
    starts: tuple[StartSummary, ...]
    restarts: int
    restarts_after: Mapping[str, int]
    skipped: Mapping[str, int]
    failed_saves: int
    faults: Mapping[str, int]
    layout_cpu_s: int
    throughput: Throughput
    stragglers: Stragglers | None
    unreadable_lines: int
    experts: Loads | None = None

    def to_json(self) -> dict[str, object]:
        """The report as plain values."""
        # Without the starts and the loads, of which there may be many, and which asdict would copy.
        starts, experts = [start.to_json() for start in self.starts], None if self.experts is None else self.experts.to_json()
        return {**asdict(replace(self, starts=(), experts=None)), "starts": starts, "experts": experts}


def read_accounts(run: Path) -> Accounts:
    """The accounts of a run directory. Raises InputError if it is not a run directory or has no events, and OSError."""
    first = run / "events.jsonl"
    if not first.is_file():
        why = ": it has no events.jsonl" if run.is_dir() else ""
        raise InputError([f"{run}: is not a run directory{why}. Name one, such as runs/quickstart"])
    events, unreadable = read_process(run, 0)
    if not events:
        lines = f"{unreadable} lines, and none can be read" if unreadable else "no lines"
        raise InputError([f"{first}: has no events: {lines}. A run writes its first event when it starts"])
    others: dict[int, Sequence[Event]] = {}
    for process in processes_of(run):
        if process:
            others[process], unreadable_here = read_process(run, process)
            unreadable += unreadable_here
    return account(str(run), events, others, tokens_per_step=_tokens_per_step(read_config(run)), unreadable_lines=unreadable)


def account(
    run: str,
    events: Sequence[Event],
    others: Mapping[int, Sequence[Event]] | None = None,
    *,
    tokens_per_step: int | None = None,
    unreadable_lines: int = 0,
) -> Accounts:
    """The accounts from the events of process 0, at least one, and from the events of each other process."""
    others, starts = others or {}, find_starts(events)
    limits = preserved_steps([math.inf if start.resumed is None else start.resumed for start in starts])
    causes = _seconds_by_cause(starts, limits)
    # Wall time is defined as the sum of its parts, so that a reader who adds them up arrives at the same number to the last digit.
    wall = math.fsum(causes.values())
    trained = sum(stretch.steps for start in starts for stretch in start.stretches)
    preserved = sum(stretch.steps_up_to(limit) for start, limit in zip(starts, limits, strict=True) for stretch in start.stretches)
    incidents, faults = _incidents([events, *others.values()])
    return Accounts(
        run=run,
        wall_s=wall,
        goodput=_share(causes["steps"], wall),
        causes={cause: Share(seconds=seconds, share=_share(seconds, wall)) for cause, seconds in causes.items()},
        steps=preserved,
        steps_redone=trained - preserved,
        starts=starts,
        restarts=len(starts) - 1,
        # Every start but the last was followed by a restart.
        restarts_after=dict(Counter(start.ended or NO_RECORD for start in starts[:-1])),
        # Both keys are always present, for programs that read the JSON.
        skipped={name: incidents[name] for name in ("nonfinite", "spike")},
        failed_saves=incidents["save_failed"],
        faults=faults,
        layout_cpu_s=sum(event.natural("cpu_seconds") or 0 for event in events if event.phase == "layout"),
        throughput=_throughput(starts, preserved, tokens_per_step, causes["steps"], wall),
        stragglers=find_stragglers(starts, {process: find_starts(theirs) for process, theirs in others.items()}),
        unreadable_lines=unreadable_lines,
    )


def _incidents(processes: Sequence[Sequence[Event]]) -> tuple[Counter[str], dict[str, int]]:
    """The skipped updates and failed saves of a run, by phase, and the injected faults, by kind, from the events of all processes."""
    most: Counter[tuple[str, int | None]] = Counter()
    faults: Counter[str] = Counter()
    for events in processes:
        # All processes skip the same updates, and each notes it; a save may fail on one of them. Neither may be counted twice.
        most |= Counter((event.phase, event.natural("step")) for event in events if event.phase in _INCIDENTS)
        # A fault is injected into one process.
        faults.update(event.text("kind") or "unknown" for event in events if event.phase == "fault")
    return Counter(phase for phase, _ in most.elements()), dict(faults)


def preserved_steps(resumed: Sequence[float]) -> list[float]:
    """The last step of each start that is not lost: a step is lost by the earliest checkpoint that any later start resumes from.

    resumed: the step that each start resumed from; infinity for one that ended before, which took nothing away.
    """
    return [*itertools.accumulate(reversed(resumed), min, initial=math.inf)][-2::-1]


def _seconds_by_cause(starts: Sequence[StartSummary], limits: Sequence[float]) -> dict[str, float]:
    """The seconds of wall time for each cause. limits: the last step of each start that counts."""
    seconds: dict[str, list[float]] = {cause: [] for cause in CAUSES}
    accounted_until = starts[0].begin
    for start, limit in zip(starts, limits, strict=True):
        begin = max(start.begin, accounted_until)
        end = max(start.end, begin)
        parts = [(CAUSE_OF[phase], spent) for phase, spent in start.seconds.items() if phase in CAUSE_OF]
        for stretch in start.stretches:
            preserved = stretch.steps_up_to(limit) / stretch.steps
            parts += [("steps", stretch.seconds * preserved), ("redone", stretch.seconds * (1 - preserved))]
        total = math.fsum(spent for _, spent in parts)
        # Below 1 only if a clock was set.
        scale = min(1.0, (end - begin) / total) if total else 1.0
        for cause, spent in parts:
            seconds[cause].append(spent * scale)
        seconds["down"].append(round(begin - accounted_until, _DIGITS))
        seconds["other"].append(max(0.0, round(end - begin - total, _DIGITS)))
        accounted_until = end
    return {cause: math.fsum(parts) for cause, parts in seconds.items()}


def _throughput(starts: Sequence[StartSummary], steps: int, tokens: int | None, useful: float, wall: float) -> Throughput:
    """The speed of a run. steps: those that count. tokens: the tokens in a step. useful, wall: seconds."""
    speeds = [(stretch.seconds / stretch.steps, stretch) for start in starts for stretch in start.stretches]
    slowest_s, slowest = max(speeds, key=lambda speed: speed[0], default=(None, None))
    over_steps, over_wall = (steps / seconds if steps and seconds else None for seconds in (useful, wall))
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


def _tokens_per_step(config: Mapping[str, object]) -> int | None:
    # The file may be anything that YAML allows; only whole numbers in both places give an answer.
    match config:
        case {"train": {"batch": int(batch)}, "model": {"seq": int(seq)}}:
            return batch * seq
    return None


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
