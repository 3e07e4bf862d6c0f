"""Draws a pipeline schedule over time as a PNG: stages from top to bottom, each item as long as it takes. Needs matplotlib.

python docs/pictures/schedule.py zb_interleaved --stages 4 --microbatches 8 docs/pictures/zb_interleaved.png
python docs/pictures/schedule.py own.csv own.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jgt.schedule.schedules import find_table
from jgt.schedule.simulate import Simulation, kind_name, number_text, simulate
from jgt.schedule.table import KINDS, Kind, Table
from jgt.schedule.timeline import Colour, ink, shade

DPI = 150
FONT = 7
"""The size of the microbatches' numbers, in points. A digit is about 0.65 of that wide."""

MAX_INCHES = 60.0
"""The largest width of a picture. Numbers that would not fit even then are left out."""

_IDLE = "#e4e4e4"


def plot(simulation: Simulation, path: str | Path) -> None:
    """Draws a simulated table and writes it as a PNG. Raises OSError if the file cannot be written.

    Items of a stage that is faster than the slowest one end before their slot does; the bubble is grey.
    """
    table = simulation.table
    # As wide as it takes to write the longest number, in points, into the shortest slot; an inch has 72 points.
    label = 0.75 * FONT * len(str(table.num_microbatches - 1))
    shortest = min(slot.length for slot in simulation.slots if slot.length)
    inches = min(MAX_INCHES, max(8.0, label / 72 * simulation.time / shortest))
    figure = Figure(figsize=(inches, 1.7 + 0.4 * table.num_stages), dpi=DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw(axes, simulation, shortest_label=label / 72 / inches * simulation.time)
    axes.set_title(f"{table.title}, bubble {simulation.bubble:.1%}, peak {number_text(simulation.peak)}", fontsize=10)
    _frame(axes, simulation)
    figure.legend(handles=_legend(table), loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    with Path(path).open("wb") as file:
        canvas.print_png(file)


def _draw(axes: Axes, simulation: Simulation, shortest_label: float) -> None:
    """Draws the items, with numbers on those that last at least about `shortest_label`."""
    table, slowest = simulation.table, max(simulation.stage_costs)
    rows = {kind: table.rows(kind) for kind in KINDS}
    local_chunks = [table.local_chunk(chunk) for chunk in range(table.num_chunks)]
    for stage, cost in enumerate(simulation.stage_costs):
        # The bubble is a background over the whole time, which items cover.
        axes.broken_barh([(0, simulation.time)], (stage - 0.42, 0.84), facecolors=_IDLE, hatch="////", edgecolor="white", linewidth=0)
        spans: list[tuple[float, float]] = []
        colours: list[str] = []
        for slot in simulation.slots:
            item = rows[slot.kind][slot.tick][stage]
            if item is None or slot.length == 0:
                continue
            # A slot is as long as the slowest stage takes for it. A faster stage fills its share.
            length = slot.length * cost / slowest
            colour = shade(slot.kind, local_chunks[item.chunk], table.virtual)
            spans.append((slot.start, length))
            colours.append(_hex(colour))
            if length >= 0.85 * shortest_label:
                middle = slot.start + length / 2
                axes.text(middle, stage, str(item.microbatch), ha="center", va="center", fontsize=FONT, color=_hex(ink(colour)))
        axes.broken_barh(spans, (stage - 0.42, 0.84), facecolors=colours, edgecolor="white", linewidth=0.4)


def _frame(axes: Axes, simulation: Simulation) -> None:
    table = simulation.table
    axes.set_xlim(0, simulation.time)
    # Upside down: stage 0 is at the top.
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("--stages", type=int)
    parser.add_argument("--microbatches", type=int)
    parser.add_argument("--virtual", type=int)
    parser.add_argument("file")
    arguments = parser.parse_args()
    table = find_table(arguments.name, arguments.stages, arguments.microbatches, arguments.virtual, "schedule.py")
    plot(simulate(table), arguments.file)
