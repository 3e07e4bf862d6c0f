"""How long a table takes and how much it keeps, in lockstep: a tick lasts as long as its slowest stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from jgt.pipeline.schedule import KINDS, Kind, Table


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a microbatch costs on a whole stage, in any unit. A chunk costs its share.

    backward is the gradient of the activations alone, weight that of the weights; a table that does not split them pays
    both in one item. Raises ValueError where forward or backward is not above 0, or weight is below 0.
    """

    forward: float = 1
    backward: float = 1
    weight: float = 1

    def __post_init__(self) -> None:
        for name, cost in (("forward", self.forward), ("backward", self.backward), ("weight", self.weight)):
            if not math.isfinite(cost) or cost < 0 or (cost == 0 and name != "weight"):
                raise ValueError(f"{name} must be a number {'of at least' if name == 'weight' else 'above'} 0, not {cost:g}")


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A part of a tick in which all stages run the same kind of item."""

    tick: int
    kind: Kind
    start: float
    length: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a table costs. time and slots are in the unit of the costs.

    bubble: the share of the time in which the mean stage does nothing useful. peaks: for each stage, the most activations
    that it keeps at once, in activations of one microbatch on a whole stage. stage_costs: of each stage, relative.
    """

    ticks: int
    time: float
    bubble: float
    peaks: tuple[float, ...]
    slots: tuple[Slot, ...]
    stage_costs: tuple[float, ...]

    @property
    def peak(self) -> float:
        """The peak of the stage that keeps the most."""
        return max(self.peaks)


def simulate(table: Table, costs: Costs | None = None, stage_costs: Sequence[float] | None = None) -> Simulation:
    """Runs a verified table on paper. Costs default to 1 for each kind, and to 1 for each stage.

    In a tick every stage runs each slot that any stage needs, with garbage where it has nothing; the exchange at its end
    makes all wait for the slowest. Raises ValueError where stage_costs are not one number above 0 for each stage.
    """
    costs = costs or Costs()
    relative = tuple(stage_costs if stage_costs is not None else (1,) * table.num_stages)
    if len(relative) != table.num_stages:
        raise ValueError(f"{len(relative)} numbers for {table.num_stages} stages: give one for each stage")
    if wrong := [cost for cost in relative if not math.isfinite(cost) or cost <= 0]:
        raise ValueError(f"the cost of a stage must be a number above 0, not {wrong[0]:g}")
    slots = _slots(table, costs, max(relative))
    time = math.fsum(slot.length for slot in slots)
    whole = costs.forward + costs.backward + costs.weight
    useful = table.num_microbatches * whole * math.fsum(relative) / len(relative)
    return Simulation(
        ticks=table.num_ticks,
        time=time,
        bubble=max(0.0, 1 - useful / time),
        peaks=_peaks(table),
        slots=slots,
        stage_costs=relative,
    )


def _slots(table: Table, costs: Costs, slowest: float) -> tuple[Slot, ...]:
    backward = costs.backward if table.weight is not None else costs.backward + costs.weight
    lengths = {kind: cost * slowest / table.virtual for kind, cost in zip(KINDS, (costs.forward, backward, costs.weight), strict=True)}
    rows = {kind: table.rows(kind) for kind in KINDS}
    used: list[tuple[int, Kind]] = [(tick, kind) for tick in range(table.num_ticks) for kind in KINDS if any(rows[kind][tick])]
    starts = accumulate((lengths[kind] for _, kind in used), initial=0.0)
    return tuple(Slot(tick=tick, kind=kind, start=start, length=lengths[kind]) for (tick, kind), start in zip(used, starts, strict=False))


def _peaks(table: Table) -> tuple[float, ...]:
    """An activation is kept from its forward tick to its last backward or weight-gradient tick, both included."""
    last = {item: tick for kind in KINDS for tick, _, item in table.items(kind)}
    changes = [[0] * (table.num_ticks + 1) for _ in range(table.num_stages)]
    for tick, stage, item in table.items("F"):
        changes[stage][tick] += 1
        changes[stage][last[item] + 1] -= 1
    return tuple(max(accumulate(change)) / table.virtual for change in changes)
