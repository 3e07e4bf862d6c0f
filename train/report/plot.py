"""Curves of runs as a PNG, one panel for each metric. Needs the extra `plot` (matplotlib), which only this module of the trainer imports.

It draws on a canvas and not through pyplot, whose global state and choice of a window system are not for a command that may run anywhere.
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
            # A few evaluations are drawn as points too.
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


def draw_loads(layers: Sequence[Sequence[Sequence[float]]], steps: tuple[int, int], path: Path) -> None:
    """Draws a heat map for each layer, from loads by layer, expert and column. steps: the steps at both ends. Raises OSError."""
    columns = min(4, len(layers))
    rows = -(-len(layers) // columns)
    figure = Figure(figsize=(1.5 + 3.0 * columns, 0.8 + 2.0 * rows), dpi=_DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    image = None
    for number, axes in enumerate(panels.flat):
        if number >= len(layers):
            axes.set_visible(False)
            continue
        # White is an equal load.
        extent = (steps[0], max(steps[1], steps[0] + 1), len(layers[number]) - 0.5, -0.5)
        image = axes.imshow(layers[number], aspect="auto", cmap="RdBu_r", vmin=0.0, vmax=2.0, interpolation="nearest", extent=extent)
        axes.set_title(f"layer {number}", fontsize=8)
    panels[-1, 0].set_xlabel("steps")
    panels[0, 0].set_ylabel("expert")
    if image is not None:
        figure.colorbar(image, ax=panels, label="load, in mean loads", extend="max")
    with path.open("wb") as file:
        canvas.print_png(file)
