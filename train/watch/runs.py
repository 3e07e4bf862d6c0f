"""Runs as curves: each metric of metrics.jsonl over steps, tokens or hours; and as text, for machines without matplotlib and for ssh.

Runs are drawn to be compared, and which axis is fair depends on the question: steps for the same batch, tokens for different ones, hours
for the speed. So a curve takes its x from a name. An evaluation has a row without tokens, and gets the number of the training step before
it. Rows of older versions may lack the time or the tokens; a point without x or y is left out.

A long run has more rows than a picture has pixels: `thinned` takes the mean over bins of equal numbers of points, so that a curve keeps its
level everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jgt import amount
from jgt.document import InputError, nearest

from ..journal.rows import read_config, read_metrics

AXES = {"steps": "step", "tokens": "tokens", "samples": "samples", "hours": "time"}
"""The axes that a curve may be drawn over, with the metric of each."""
METRICS = ("loss", "eval_loss", "tokens_per_s")
"""The metrics that are drawn if none is asked for."""
_LARGEST = 1e300
_HEIGHT = 10
"""The lines of a diagram."""
_MARKS = "abcdefghijklmnopqrstuvwxyz"
_SHARED = "*"
"""Where several runs have the same place."""


class Point(NamedTuple):
    """A point of a curve."""

    x: float
    y: float


@dataclass(frozen=True, kw_only=True)
class RunCurves:
    """The contents of a run directory. rows: the rows of metrics.jsonl. config: config.yaml's values, empty if it cannot be read."""

    folder: Path
    rows: tuple[Mapping[str, Any], ...]
    config: Mapping[str, object]

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of all metrics with a number, in the order of their first appearance."""
        return tuple(dict.fromkeys(name for row in self.rows for name, value in row.items() if _number(value) is not None))

    def curve(self, metric: str, over: str = "steps") -> list[Point]:
        """The points of a metric. over: a key of AXES."""
        axis, points, last = AXES[over], list[Point](), None
        begin = next((at for row in self.rows if (at := _number(row.get("time"))) is not None), 0.0)
        for row in self.rows:
            at = _number(row.get(axis))
            last = last if at is None else (at - begin) / 3600 if over == "hours" else at
            value = _number(row.get(metric))
            if last is not None and value is not None:
                points.append(Point(last, value))
        return points

    def at_steps(self, metric: str) -> dict[int, float]:
        """The values of a metric by step."""
        return {row["step"]: value for row in self.rows if (value := _number(row.get(metric))) is not None}


def read_runs(paths: Sequence[Path]) -> list[RunCurves]:
    """The runs at these paths. Raises InputError with all that are not run directories, and OSError."""
    problems = [problem for path in paths if (problem := _problem(path)) is not None]
    if problems:
        raise InputError(problems)
    return [RunCurves(folder=path, rows=tuple(read_metrics(path / "metrics.jsonl")), config=read_config(path)) for path in paths]


def thinned(points: Sequence[Point], count: int) -> list[Point]:
    """The points if there are at most `count`. Otherwise `count` points, each the mean of as many neighbours."""
    if len(points) <= count:
        return list(points)
    edges = [round(len(points) * n / count) for n in range(count + 1)]
    groups = [points[begin:end] for begin, end in itertools.pairwise(edges)]
    return [Point(sum(p.x for p in group) / len(group), sum(p.y for p in group) / len(group)) for group in groups]


def short_names(runs: Sequence[RunCurves]) -> list[str]:
    """The name of each run's folder, or its path if two have the same name."""
    names = [run.folder.name for run in runs]
    return [str(run.folder) if names.count(name) > 1 or not name else name for run, name in zip(runs, names, strict=True)]


def _problem(path: Path) -> str | None:
    if (path / "metrics.jsonl").is_file():
        return None
    why = "is not a run directory: it has no metrics.jsonl" if path.is_dir() else "is not a run directory"
    others = sorted(str(file.parent) for file in path.parent.glob("*/metrics.jsonl")) if path.parent.is_dir() else []
    return f"{path}: {why}. {nearest(str(path), others) if others else 'Name one, such as runs/quickstart'}"


def _number(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    # A whole number of JSON may be larger than any float, and a sum of a few floats may be infinite.
    return float(value) if abs(value) < _LARGEST else None


def draw_text(runs: Sequence[RunCurves], metrics: Sequence[str], over: str, width: int) -> Iterator[str]:
    """The lines of the diagrams. width: the columns of the screen."""
    names = short_names(runs)
    for mark, name in zip(_MARKS * len(names), names, strict=False):
        yield f"{mark} {name}"
    for metric in metrics:
        curves = [run.curve(metric, over) for run in runs]
        yield ""
        if any(curves):
            yield from _diagram(metric, curves, over, width)
        else:
            yield f"{metric}: no values"


def _diagram(metric: str, curves: Sequence[Sequence[Point]], over: str, width: int) -> Iterator[str]:
    # Means over columns: one bad step would flatten the rest of the curve.
    columns = max(10, width - 12)
    curves = [thinned(curve, columns) for curve in curves]
    xs, ys = [p.x for curve in curves for p in curve], [p.y for curve in curves for p in curve]
    cells: list[list[str]] = [[" "] * columns for _ in range(_HEIGHT)]
    for mark, curve in zip(_MARKS * len(curves), curves, strict=False):
        for point in curve:
            column = _place(point.x, min(xs), max(xs), columns)
            row = _HEIGHT - 1 - _place(point.y, min(ys), max(ys), _HEIGHT)
            cells[row][column] = mark if cells[row][column] in (" ", mark) else _SHARED
    yield metric
    for row, line in enumerate(cells):
        label = _value_text(max(ys)) if row == 0 else _value_text(min(ys)) if row == _HEIGHT - 1 else ""
        yield f"{label:>10} |{''.join(line)}".rstrip()
    left, right = _value_text(min(xs)), f"{_value_text(max(xs))} {over}"
    yield f"{'':11}{left}{right:>{max(columns + 1 - len(left), len(right) + 1)}}"


def _place(value: float, low: float, high: float, count: int) -> int:
    return 0 if high == low else min(count - 1, int((value - low) / (high - low) * count))


def _value_text(value: float) -> str:
    return amount(value) if abs(value) >= 100 else f"{value:.4g}"
