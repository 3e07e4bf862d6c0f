"""Compares two runs: config, results, speed and memory, and the losses at the same steps.

The tables follow a reader's questions: what was different, what came of it, and from which step on. The figures of a run cover all its
starts: the best evaluation and the median speed of all rows, and the goodput of its events. The last line says whether the runs computed
the same: their losses are equal bit for bit up to some step, or differ from the first one on.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jgt import Console, amount
from jgt.document import InputError, shown

from ..journal.accounts import read_accounts
from ..journal.rows import flattened
from .runs import RunCurves

_OWN = ("run.name", "run.dir", "log")
"""Keys that differ between any two runs, or say nothing about training."""
_MEDIANS = ("step_time_s", "tokens_per_s", "samples_per_s", "mfu")
_RECENT = 10
_STEPS = 8
"""The rows of the table of losses."""
_MAX_VALUE = 40


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A figure of both runs. change: how much the second is above the first, as a share; None where it is not known or not a number."""

    name: str
    first: Any
    second: Any
    change: float | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The differences of two runs.

    config: the keys that differ. results: figures of both runs. losses: the losses at some of the common steps, whose number is `common`.
    equal_up_to: the last common step up to which all losses are equal bit for bit; None if not even the first loss is. largest: the largest
    change of a loss.
    """

    config: tuple[Difference, ...]
    results: tuple[Difference, ...]
    losses: tuple[Difference, ...]
    common: int
    equal_up_to: int | None
    largest: float

    @property
    def verdict(self) -> str:
        """A sentence about the losses."""
        if not self.common:
            return "The runs have no logged step in common"
        if self.equal_up_to is None:
            return f"The losses differ from the first of {self.common:,} common steps on, by at most {self.largest:.1g} of themselves"
        if not self.losses or self.equal_up_to >= int(self.losses[-1].name):
            return f"The losses of all {self.common:,} common steps are equal, bit for bit"
        differ = f"differ after it, by at most {self.largest:.1g} of themselves"
        return f"The losses are equal up to step {self.equal_up_to:,}, bit for bit, and {differ}"


def compare_runs(first: RunCurves, second: RunCurves) -> Comparison:
    """Compares two runs."""
    losses = first.at_steps("loss"), second.at_steps("loss")
    common = sorted(losses[0].keys() & losses[1].keys())
    unequal = next((index for index, step in enumerate(common) if losses[0][step] != losses[1][step]), len(common))
    figures = [_figures(run) for run in (first, second)]
    names = dict.fromkeys((*figures[0], *figures[1]))
    return Comparison(
        config=tuple(_config_differences(first.config, second.config)),
        results=tuple(_difference(name, figures[0].get(name), figures[1].get(name)) for name in names),
        losses=tuple(_difference(str(step), losses[0][step], losses[1][step]) for step in _spread(common)),
        common=len(common),
        equal_up_to=common[unequal - 1] if unequal else None,
        largest=max((abs(losses[1][step] / losses[0][step] - 1) for step in common if losses[0][step]), default=0.0),
    )


def _figures(run: RunCurves) -> dict[str, float | None]:
    """The figures that a run has."""

    def values(metric: str) -> list[float]:
        return [point.y for point in run.curve(metric)]

    losses, evaluations, hours = values("loss"), values("eval_loss"), run.curve("step", "hours")
    figures: dict[str, float | None] = {
        "steps": max(values("step"), default=None),
        "tokens": max(values("tokens"), default=None),
        f"loss, mean of the last {_RECENT} rows": statistics.fmean(losses[-_RECENT:]) if losses else None,
        "best eval_loss": min(evaluations, default=None),
        "last eval_loss": evaluations[-1] if evaluations else None,
        "hours": hours[-1].x if hours else None,
        **{f"median {name}": statistics.median(y) for name in _MEDIANS if (y := values(name))},
        "memory_peak_bytes": max(values("memory_peak_bytes"), default=None),
        "goodput": _goodput(run),
    }
    return {name: value for name, value in figures.items() if value is not None}


def _goodput(run: RunCurves) -> float | None:
    with contextlib.suppress(InputError, OSError):
        return read_accounts(run.folder).goodput
    return None


def _difference(name: str, first: float | None, second: float | None) -> Difference:
    change = second / first - 1 if first and second is not None else None
    return Difference(name=name, first=first, second=second, change=change)


def _config_differences(first: Mapping[str, object], second: Mapping[str, object]) -> Iterator[Difference]:
    old, new = dict(flattened(first)), dict(flattened(second))
    for key in dict.fromkeys((*old, *new)):
        if old.get(key) != new.get(key) and key not in _OWN:
            yield Difference(name=key, first=old.get(key), second=new.get(key))


def _spread(steps: Sequence[int]) -> list[int]:
    """The first and the last step, and some between them: at most _STEPS in all."""
    if len(steps) <= _STEPS:
        return list(steps)
    return [steps[round(n * (len(steps) - 1) / (_STEPS - 1))] for n in range(_STEPS)]


def print_comparison(comparison: Comparison, names: Sequence[str]) -> None:
    """Prints a comparison to stdout. names: the names of the two runs."""
    console = Console()
    rows = [[d.name, *map(_config_text, (d.first, d.second))] for d in comparison.config]
    console.print(Console.table("Config", ["key", *names], 3, rows) if rows else "Config: no key differs")
    console.print(Console.table("Results", ["", *names, "change"], 1, map(_row, comparison.results)))
    if comparison.losses:
        console.print(Console.table("Loss", ["step", *names, "change"], 0, map(_row, comparison.losses)))
    console.print(comparison.verdict, soft_wrap=True)


def _row(difference: Difference) -> list[str]:
    change = "" if difference.change is None else f"{difference.change:+.2%}".replace("-0.00%", "+0.00%")
    return [difference.name, *map(_figure_text, (difference.first, difference.second)), change]


def _figure_text(value: float | None) -> str:
    if value is None:
        return ""
    return amount(value) if abs(value) >= 100 else f"{value:.5g}"


def _config_text(value: object) -> str:
    text = "(none)" if value is None else shown(value)
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 3]}..."
