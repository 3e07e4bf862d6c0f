"""Draws the picture of `scaling.py`. Needs the extra `plot` (matplotlib)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

DPI = 200
INK, IDEAL = "#222222", "#999999"
# Readers with colour blindness can distinguish these colours (Okabe and Ito, 2008).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
LINES = {"strong": "-", "weak": "--"}


def draw(found: Mapping[str, Sequence[dict[str, Any]]], path: Path) -> None:
    """Writes a PNG: predicted throughput, efficiency and exposed communication, and the work measured on CPU."""
    figure = Figure(figsize=(9.5, 7.0), dpi=DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    throughput, efficiency, waits, work = figure.subplots(2, 2).flat
    planned = found["planned"]
    models = list(dict.fromkeys(row["model"] for row in planned))
    for index, model in enumerate(models):
        for kind in LINES:
            _lines(throughput, efficiency, [r for r in planned if (r["model"], r["scaling"]) == (model, kind)], COLOURS[index])
    _frame(throughput, "(a) Throughput, predicted", "GPUs", "tokens/s")
    throughput.set_yscale("log")
    _frame(efficiency, "(b) Efficiency, predicted", "GPUs", "tokens/s per GPU (fewest GPUs = 1)")
    efficiency.set_ylim(0, 1.1)
    _waits(waits, [row for row in planned if row["model"] == models[0]] if models else [])
    _work(work, found["measured"])
    with path.open("wb") as file:
        canvas.print_png(file)


def _lines(throughput: Axes, efficiency: Axes, rows: Sequence[dict[str, Any]], colour: str) -> None:
    if not rows:
        return
    gpus = [row["gpus"] for row in rows]
    style = {"color": colour, "linestyle": LINES[rows[0]["scaling"]], "marker": "o", "markersize": 4, "linewidth": 1.5}
    label = f"{rows[0]['model']}, {rows[0]['scaling']}"
    throughput.plot(gpus, [row["tokens_per_s"] for row in rows], label=label, **style)
    efficiency.plot(gpus, [row["efficiency"] for row in rows], label=label, **style)
    ideal = [rows[0]["tokens_per_s"] / gpus[0] * n for n in gpus]
    throughput.plot(gpus, ideal, color=IDEAL, linewidth=0.8, linestyle=":", zorder=1)
    efficiency.axhline(1, color=IDEAL, linewidth=0.8, linestyle=":", zorder=1)


def _waits(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """The share of a step spent waiting for collectives, stacked by mesh axes."""
    names = list(dict.fromkeys(name for row in rows for name, ms in row["exposed_ms"].items() if ms))
    positions, bottoms = list(range(len(rows))), [0.0] * len(rows)
    for index, name in enumerate(names):
        shares = [100 * row["exposed_ms"].get(name, 0.0) / (row["step_s"] * 1e3) for row in rows]
        axes.bar(positions, shares, bottom=bottoms, color=COLOURS[index % len(COLOURS)], label=name, width=0.7)
        bottoms = [a + b for a, b in zip(bottoms, shares, strict=True)]
    _frame(
        axes,
        "(c) Exposed communication, predicted" + (f", {rows[0]['model']}" if rows else ""),
        "GPUs and kind of scaling",
        "% of the step",
        log=False,
    )
    axes.set_xticks(positions, [f"{row['gpus']}\n{row['scaling']}" for row in rows])


def _work(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """The work measured on CPU, with quartiles."""
    for index, kind in enumerate(LINES):
        points = [row for row in rows if row["scaling"] == kind]
        if not points:
            continue
        spreads = [row["to_one_device"] for row in points]
        middle = [s["median"] for s in spreads]
        errors = [[s["median"] - s["q1"] for s in spreads], [s["q3"] - s["median"] for s in spreads]]
        axes.errorbar(
            [r["devices"] for r in points],
            middle,
            yerr=errors,
            label=kind,
            color=COLOURS[index],
            linestyle=LINES[kind],
            marker="o",
            markersize=4,
            capsize=3,
        )
    axes.axhline(1, color=IDEAL, linewidth=0.8, linestyle=":", zorder=1)
    _frame(axes, "(d) Work, measured on virtual CPU devices", "devices", "tokens per CPU-second (1 device = 1)")
    axes.set_ylim(bottom=0)


def _frame(axes: Axes, title: str, x: str, y: str, *, log: bool = True) -> None:
    axes.set_title(title, fontsize=10, loc="left", color=INK)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    if log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False, handlelength=3)
