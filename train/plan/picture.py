"""A search as a picture. Needs the extra `plot` (matplotlib), which only this module of the room imports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from .search.search import LayoutSearch


def draw_search(search: LayoutSearch, path: Path) -> None:
    """Time against memory: all estimates, all plans, and the plans that no other one beats in both. Raises OSError."""
    figure = Figure(figsize=(9, 5.5), dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if (estimator := search.estimator) is not None:
        axes.scatter(estimator.seconds, estimator.peak_bytes / 1e9, s=4, c="#bbbbbb", label="estimated")
    ranked = search.ranked()
    axes.scatter([t.plan.seconds for t in ranked], [t.plan.peak_bytes / 1e9 for t in ranked], s=28, c="#1f77b4", label="planned")
    front = frontier([(t.plan.seconds, t.plan.peak_bytes / 1e9) for t in ranked])
    axes.plot([x for x, _ in front], [y for _, y in front], c="#d62728", lw=1, marker="o", ms=5, label="no other is faster and smaller")
    axes.axhline(search.target.usable_bytes / 1e9, c="black", lw=0.8, ls="--", label="memory that a step may use")
    for rank, one in enumerate(ranked[:3], 1):
        axes.annotate(str(rank), (one.plan.seconds, one.plan.peak_bytes / 1e9), textcoords="offset points", xytext=(5, 5))
    axes.set(xlabel="seconds a step", ylabel="GB on each device", xscale="log", yscale="log", title=search.target.text)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.tick_params(labelsize=8, which="both")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other one beats in both coordinates, by the first coordinate."""
    found: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not found or y < found[-1][1]:
            found.append((x, y))
    return found
