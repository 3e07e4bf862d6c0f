"""The time that a table takes and the activations that it keeps, computed without running it.

In a tick every stage runs a slot for each kind of item that any stage has in that tick, and the exchange at the end of the tick waits for
the slowest stage. So the time of a table is a sum over its slots, each as long as the slowest stage takes, and the bubble is whatever part
of that time the average stage does not spend on items. Textbook figures differ: there a stage does one thing at a time and waits for its
input only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from jgt.schedule.schedules import SCHEDULES
from jgt.schedule.table import KINDS, Kind, Table, count_noun


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The cost of one microbatch on a whole stage, in any unit of time; a chunk costs its share.

    backward is the gradient of the activations alone, weight the gradient of the weights. A table that does not split them
    pays both in one item. Raises ValueError if forward or backward is not above 0, or weight is below 0.
    """

    forward: float = 1
    backward: float = 1
    weight: float = 1

    def __post_init__(self) -> None:
        for name, cost in (("forward", self.forward), ("backward", self.backward), ("weight", self.weight)):
            if not math.isfinite(cost) or cost < 0 or (cost == 0 and name != "weight"):
                raise ValueError(f"{name} must be a number {'of at least' if name == 'weight' else 'above'} 0, not {cost:g}")


class TickSlot(NamedTuple):
    """The part of a tick in which all stages run the same kind of item."""

    tick: int
    kind: Kind
    start: float
    length: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The costs of a table; time and slots are in the unit of `Costs`.

    bubble: the share of the time in which the average stage does nothing useful. peaks: for each stage the largest number of
    activations that it keeps at once, where 1 is one microbatch on a whole stage. stage_costs: the relative cost of each stage. sizes,
    even_time: with measured costs, the layers of each chunk, and the time if all chunks had as many.
    """

    table: Table
    time: float
    bubble: float
    peaks: tuple[float, ...]
    slots: tuple[TickSlot, ...]
    stage_costs: tuple[float, ...]
    sizes: tuple[int, ...] = ()
    even_time: float = 0.0

    @property
    def peak(self) -> float:
        """The largest of the peaks."""
        return max(self.peaks)


def simulate(
    table: Table,
    costs: Costs | None = None,
    stage_costs: Sequence[float] | None = None,
    chunks: Sequence[Sequence[float]] | None = None,
    ends: float = 0.0,
) -> Simulation:
    """Simulates a verified table. Each kind of item costs 1 by default, and so does each stage.

    chunks: the costs of each chunk's item of each kind, in place of `costs` and of what `stage_costs` does; a stage without an item skips
    it. ends: the cost of embedding and head for a microbatch, which all stages share. Raises ValueError unless stage_costs are one
    number above 0 for each stage.
    """
    costs = costs or Costs()
    relative = tuple(stage_costs if stage_costs is not None else (1,) * table.num_stages)
    if len(relative) != table.num_stages:
        raise ValueError(f"{count_noun(len(relative), 'number')} for {table.num_stages} stages: give one for each stage")
    if wrong := [cost for cost in relative if not math.isfinite(cost) or cost <= 0]:
        raise ValueError(f"the cost of a stage must be a number above 0, not {wrong[0]:g}")
    slots = _slots(table, costs, max(relative), chunks)
    # fsum: a table has up to a million slots, and a bubble of 0 should not come out as 1e-12.
    time = math.fsum([*(slot.length for slot in slots), table.num_microbatches * ends])
    whole = (costs.forward + costs.backward + costs.weight) * math.fsum(relative)
    if chunks is not None:
        whole = math.fsum(cost for chunk in chunks for cost in chunk)
    useful = table.num_microbatches * (whole / len(relative) + ends)
    # Not below 0: with one stage, useful and time are the same sum in another order.
    bubble = max(0.0, 1 - useful / time)
    return Simulation(table=table, time=time, bubble=bubble, peaks=_peaks(table), slots=slots, stage_costs=relative)


def _slots(table: Table, costs: Costs, slowest: float, chunks: Sequence[Sequence[float]] | None) -> tuple[TickSlot, ...]:
    # An unsplit backward item computes the weight gradients, too.
    backward = costs.backward if table.weight is not None else costs.backward + costs.weight
    # An item costs the share of one chunk, and takes as long as on the slowest stage.
    lengths = {kind: cost * slowest / table.virtual for kind, cost in zip(KINDS, (costs.forward, backward, costs.weight), strict=True)}
    rows = {kind: table.rows(kind) for kind in KINDS}
    used: list[tuple[int, Kind]] = [(tick, kind) for tick in range(table.num_ticks) for kind in KINDS if any(rows[kind][tick])]

    def length(tick: int, kind: Kind) -> float:
        if chunks is None:
            return lengths[kind]
        return max(chunks[item.chunk][KINDS.index(kind)] for item in rows[kind][tick] if item is not None)

    spent = [length(tick, kind) for tick, kind in used]
    # One start more than slots: the last one is the end of the table.
    return tuple(TickSlot(*slot, start, took) for slot, start, took in zip(used, accumulate(spent, initial=0.0), spent, strict=False))


def _peaks(table: Table) -> tuple[float, ...]:
    """A stage keeps an activation from its forward tick to its last backward or weight-gradient tick, both included."""
    # Later kinds overwrite earlier ones: of an item's ticks, W's wins over B's, and B's over F's.
    last = {item: tick for kind in KINDS for tick, _, item in table.items(kind)}
    changes = [[0] * (table.num_ticks + 1) for _ in range(table.num_stages)]
    for tick, stage, item in table.items("F"):
        changes[stage][tick] += 1
        changes[stage][last[item] + 1] -= 1
    return tuple(max(accumulate(change)) / table.virtual for change in changes)


# -- in words and numbers

COMPARISON_COLUMNS = ("schedule", "chunks/stage", "ticks", "time", "bubble", "peak", "traffic")

COMPARISON_NOTE = (
    "* the smallest bubble. time: in the unit of the costs. peak: activations of one microbatch on a whole stage, on the\n"
    "stage that keeps the most. traffic: activations that a stage sends for a microbatch in each direction; 1x is that of 1f1b."
)


def summarize(simulation: Simulation) -> list[str]:
    """Three lines about a schedule: its size, its costs, what it is good for."""
    table = simulation.table
    by_stage = f" (by stage: {', '.join(map(number_text, simulation.peaks))})" if len(set(simulation.peaks)) > 1 else ""
    peak = count_noun(round(simulation.peak, 2), "activation")
    costs = f"time {number_text(simulation.time)}, bubble {simulation.bubble:.1%}"
    known = SCHEDULES.get(table.name)
    sizes = ", ".join(map(str, simulation.sizes))
    measured = f"Layers of each chunk: {sizes}. In milliseconds; with equal chunks, time {number_text(simulation.even_time)}"
    return [
        table.title,
        f"{count_noun(table.num_ticks, 'tick')}, {costs}, peak {peak} of one microbatch on a whole stage{by_stage}",
        known.good_for if known else "A table of your own: it is complete and does not deadlock.",
        *([measured] if sizes else []),
    ]


def comparison_row(simulation: Simulation) -> list[str]:
    """A schedule's row in a comparison, under COMPARISON_COLUMNS."""
    table, costs = simulation.table, [number_text(simulation.time), f"{simulation.bubble:.1%}", number_text(simulation.peak)]
    # Each chunk boundary is crossed once in each direction, and 1f1b has one boundary a stage.
    return [table.name, str(table.virtual), str(table.num_ticks), *costs, f"{table.virtual}x"]


def json_object(simulation: Simulation) -> dict[str, str | int | float | list[int]]:
    """The numbers of a schedule, for JSON. peak_activations: 1 is one microbatch on a whole stage. layers, time: with measured costs."""
    table, peak = simulation.table, round(simulation.peak, 6)
    return {
        "name": table.name,
        "stages": table.num_stages,
        "microbatches": table.num_microbatches,
        "virtual": table.virtual,
        "ticks": table.num_ticks,
        "bubble": round(simulation.bubble, 6),
        "peak_activations": int(peak) if peak == int(peak) else peak,
        **({"layers": list(simulation.sizes), "time": round(simulation.time, 6)} if simulation.sizes else {}),
    }


def kind_name(table: Table, kind: Kind) -> str:
    """A kind of item, in words."""
    if kind == "B":
        return "backward with weight gradients" if table.weight is None else "backward"
    return "forward" if kind == "F" else "weight gradients"


def number_text(value: float) -> str:
    """A number with at most two decimals, without trailing zeros: `5.5`."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
