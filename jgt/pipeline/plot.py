"""A table over time as a PNG, with the extra `plot` (matplotlib)."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jgt.pipeline.palette import Colour, ink, shade
from jgt.pipeline.report import kind_name, number, percent, shape
from jgt.pipeline.schedule import KINDS, Kind, Table
from jgt.pipeline.simulate import Simulation

DPI = 150
FONT = 7
"""Size of the microbatches' numbers, in points; a digit is about 0.65 of it wide."""

MAX_INCHES = 60.0
"""Of width. Where the numbers would not fit even then, they are left out."""

_IDLE = "#e4e4e4"


def plot(table: Table, simulation: Simulation, path: str | Path) -> None:
    """Draws stages over time and writes a PNG. Raises OSError where that is not possible.

    A tick is as wide as it lasts. An item of a stage that is faster than the slowest ends early; grey is the bubble.
    """
    label = 0.75 * FONT * len(str(table.num_microbatches - 1))
    shortest = min(slot.length for slot in simulation.slots if slot.length)
    inches = min(MAX_INCHES, max(8.0, label / 72 * simulation.time / shortest))
    figure = Figure(figsize=(inches, 1.7 + 0.4 * table.num_stages), dpi=DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw(axes, table, simulation, shortest_label=label / 72 / inches * simulation.time)
    axes.set_title(f"{shape(table)}, bubble {percent(simulation.bubble)}, peak {number(simulation.peak)}", fontsize=10)
    _frame(axes, table, simulation)
    figure.legend(handles=_legend(table), loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    with Path(path).open("wb") as file:
        canvas.print_png(file)


def _draw(axes: Axes, table: Table, simulation: Simulation, shortest_label: float) -> None:
    """The items, with numbers on those that last at least `shortest_label`."""
    slowest = max(simulation.stage_costs)
    rows = {kind: table.rows(kind) for kind in KINDS}
    local = [table.local_chunk(chunk) for chunk in range(table.num_chunks)]
    for stage, cost in enumerate(simulation.stage_costs):
        axes.broken_barh([(0, simulation.time)], (stage - 0.42, 0.84), facecolors=_IDLE, hatch="////", edgecolor="white", linewidth=0)
        spans: list[tuple[float, float]] = []
        colours: list[str] = []
        for slot in simulation.slots:
            item = rows[slot.kind][slot.tick][stage]
            if item is None or slot.length == 0:
                continue
            length = slot.length * cost / slowest
            colour = shade(slot.kind, local[item.chunk], table.virtual)
            spans.append((slot.start, length))
            colours.append(_hex(colour))
            if length >= 0.85 * shortest_label:
                middle = slot.start + length / 2
                axes.text(middle, stage, str(item.microbatch), ha="center", va="center", fontsize=FONT, color=_hex(ink(colour)))
        axes.broken_barh(spans, (stage - 0.42, 0.84), facecolors=colours, edgecolor="white", linewidth=0.4)


def _frame(axes: Axes, table: Table, simulation: Simulation) -> None:
    axes.set_xlim(0, simulation.time)
    axes.set_ylim(table.num_stages - 0.5, -0.5)
    axes.set_yticks(range(table.num_stages), [f"stage {stage}" for stage in range(table.num_stages)])
    axes.set_xlabel("time, in the unit of the costs", fontsize=8)
    axes.tick_params(labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _legend(table: Table) -> list[Patch]:
    kinds: list[Kind] = [kind for kind in KINDS if kind != "W" or table.weight is not None]
    handles = [Patch(facecolor=_hex(shade(kind, 0, 1)), label=kind_name(table, kind)) for kind in kinds]
    handles.append(Patch(facecolor=_IDLE, hatch="////", edgecolor="white", label="bubble"))
    if table.virtual > 1:
        handles.append(Patch(facecolor="none", label="lighter: later chunks of the stage"))
    return handles


def _hex(colour: Colour) -> str:
    return "#" + "".join(f"{part:02x}" for part in colour)
