"""Curves of runs as a PNG, one panel for each metric. Needs the extra `plot` (matplotlib), which only this module of the trainer imports.

Drawn on a canvas of its own and not through pyplot, whose global state and choice of a window system are not for a command that may run
anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .runs import RunCurves, short_names, thinned

_DPI = 150
_POINTS = 1500
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Distinct for colour-blind readers (Okabe and Ito)."""


def draw_png(runs: Sequence[RunCurves], metrics: Sequence[str], over: str, path: Path) -> None:
    """Draws the metrics of runs. Raises OSError if the file cannot be written."""
    figure = Figure(figsize=(8.0, 0.6 + 2.4 * len(metrics)), dpi=_DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(len(metrics), 1, squeeze=False, sharex=True)
    lines = {}
    for axes, metric in zip(panels[:, 0], metrics, strict=True):
        for number, (name, run) in enumerate(zip(short_names(runs), runs, strict=True)):
            points = thinned(run.curve(metric, over), _POINTS)
            # A few evaluations are points, and not only the line between them.
            style = {"marker": "o", "markersize": 3} if len(points) < 50 else {}
            if points:
                (line,) = axes.plot(
                    [p.x for p in points], [p.y for p in points], color=_COLOURS[number % len(_COLOURS)], linewidth=1.2, **style
                )
                lines.setdefault(name, line)
        axes.set_ylabel(metric)
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel(over)
    figure.legend(lines.values(), lines.keys(), loc="outside upper left", ncols=4, fontsize=8, frameon=False)
    with path.open("wb") as file:
        canvas.print_png(file)
