"""Curves of runs as text: a small diagram for each metric, a letter for each run. For machines without matplotlib, and for ssh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jgt.console import count_text

from .runs import Point, RunCurves, short_names, thinned

_HEIGHT = 10
_MARKS = "abcdefghijklmnopqrstuvwxyz"
_SHARED = "*"
"""Where several runs have the same place."""


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
    return count_text(value) if abs(value) >= 100 else f"{value:.4g}"
