"""What a simulation says: in words, as numbers for programs, and as rows of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jgt.pipeline.schedule import Kind, Table
from jgt.pipeline.simulate import Simulation

GOOD_FOR: Mapping[str, str] = {
    "gpipe": "For comparison: 1f1b takes the same time and keeps fewer activations. Here the peak grows with every microbatch.",
    "1f1b": "The plain choice: the least traffic, and a peak that does not grow with the microbatches.",
    "interleaved": "A smaller bubble than 1f1b, paid for with more traffic: as many times as a stage has chunks.",
    "zigzag": "The smallest peak, the same on all stages; the bubble of 1f1b at twice its traffic.",
    "zb": "A smaller bubble than 1f1b at its traffic, if weight gradients are worth a pass of their own that runs no forward again.",
    "zb_interleaved": "The smallest bubble at the traffic of interleaved, if weight gradients are worth a pass of their own, as for zb.",
}
"""What each schedule is for."""

OWN = "A table of your own: it is complete and does not deadlock."


def describe(table: Table, simulation: Simulation) -> list[str]:
    """Lines about a schedule: its shape, its costs, what it is good for."""
    by_stage = f" (by stage: {', '.join(map(number, simulation.peaks))})" if len(set(simulation.peaks)) > 1 else ""
    peak = f"peak {number(simulation.peak)} activations of one microbatch on a whole stage{by_stage}"
    return [
        shape(table),
        f"{_count(table.num_ticks, 'tick')}, time {number(simulation.time)}, bubble {percent(simulation.bubble)}, {peak}",
        GOOD_FOR.get(table.name, OWN),
    ]


def shape(table: Table) -> str:
    """Name and numbers of a table."""
    microbatches = _count(table.num_microbatches, "microbatch", "microbatches")
    return f"{table.name}: {_count(table.num_stages, 'stage')}, {microbatches}, {_count(table.virtual, 'chunk')} a stage"


def kind_name(table: Table, kind: Kind) -> str:
    """What a kind of item is."""
    if kind == "B":
        return "backward with weight gradients" if table.weight is None else "backward"
    return "forward" if kind == "F" else "weight gradients"


def as_object(table: Table, simulation: Simulation) -> dict[str, Any]:
    """The numbers, for JSON. peak_activations is in activations of one microbatch on a whole stage."""
    peak = round(simulation.peak, 6)
    return {
        "name": table.name,
        "stages": table.num_stages,
        "microbatches": table.num_microbatches,
        "virtual": table.virtual,
        "ticks": simulation.ticks,
        "bubble": round(simulation.bubble, 6),
        "peak_activations": int(peak) if peak == int(peak) else peak,
    }


COLUMNS = ("schedule", "chunks/stage", "ticks", "time", "bubble", "peak", "traffic")
"""Of a comparison."""

NOTE = (
    "* the smallest bubble. time: in the unit of the costs. peak: activations of one microbatch on a whole stage, on the\n"
    "stage that keeps the most. traffic: activations that a stage sends for a microbatch each way; 1f1b: 1."
)


def row(table: Table, simulation: Simulation) -> list[str]:
    """A schedule's line in a comparison, under COLUMNS."""
    numbers = [number(simulation.time), percent(simulation.bubble), number(simulation.peak), f"{table.virtual}x"]
    return [table.name, str(table.virtual), str(simulation.ticks), *numbers]


def number(value: float) -> str:
    """At most two digits after the point, none where there is nothing to say."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def percent(share: float) -> str:
    """A share in percent."""
    return f"{100 * share:.1f}%"


def _count(value: int, one: str, many: str = "") -> str:
    return f"{value} {one if value == 1 else many or f'{one}s'}"
