"""Curves of runs as a PNG, one panel for each metric. Needs the extra `plot` (matplotlib), which only this module of the trainer imports.

It draws on a canvas and not through pyplot, whose global state and choice of a window system are not for a command that may run anywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..files.disk import replaced
from ..journal.loads import Loads
from .runs import RunCurves, short_names, thinned

_DPI = 150
_POINTS = 1500
_COLUMNS = 200
"""The columns of a heat map, at most."""
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Distinct for colour-blind readers (Okabe and Ito)."""


def draw_png(runs: Sequence[RunCurves], metrics: Sequence[str], over: str, path: Path) -> None:
    """Draws the metrics of runs. Raises OSError if the file cannot be written."""
    figure = Figure(figsize=(8.0, 0.6 + 2.4 * len(metrics)), dpi=_DPI, layout="constrained")
    panels = figure.subplots(len(metrics), 1, squeeze=False, sharex=True)[:, 0]
    lines = {}
    for axes, metric in zip(panels, metrics, strict=True):
        for name, run, colour in zip(short_names(runs), runs, itertools.cycle(_COLOURS), strict=False):
            points = thinned(run.curve(metric, over), _POINTS)
            # A few evaluations are drawn as points too.
            style = {"marker": "o", "markersize": 3} if len(points) < 50 else {}
            if points:
                lines[name] = axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.2, **style)[0]
        axes.set_ylabel(metric)
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel(over)
    figure.legend(lines.values(), lines.keys(), loc="outside upper left", ncols=4, fontsize=8, frameon=False)
    _write(figure, path)


def draw_loads(loads: Loads, path: Path) -> None:
    """Draws a heat map for each layer, of experts over steps. Raises OSError if the file cannot be written."""
    layers, begin, end = len(loads.loads[-1]), loads.steps[0], loads.steps[-1]
    columns = min(4, layers)
    rows = -(-layers // columns)
    figure = Figure(figsize=(1.5 + 3.0 * columns, 0.8 + 2.0 * rows), dpi=_DPI, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    image = None
    for layer, axes in enumerate(panels.flat):
        if layer >= layers:
            axes.set_visible(False)
            continue
        cells = loads.of_layer(layer, _COLUMNS)
        # White is an equal load.
        extent = (begin, max(end, begin + 1), len(cells) - 0.5, -0.5)
        image = axes.imshow(cells, aspect="auto", cmap="RdBu_r", vmin=0.0, vmax=2.0, interpolation="nearest", extent=extent)
        axes.set_title(f"layer {layer}", fontsize=8)
    panels[-1, 0].set_xlabel("steps")
    panels[0, 0].set_ylabel("expert")
    if image is not None:
        figure.colorbar(image, ax=panels, label="load, in mean loads", extend="max")
    _write(figure, path)


def _write(figure: Figure, path: Path) -> None:
    with replaced(path) as new, new.open("wb") as file:
        FigureCanvasAgg(figure).print_png(file)
