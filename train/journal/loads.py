"""The load of experts over time, from a run's experts.jsonl: which experts are used most and least.

The invariant: loads are in mean loads of their layer, so 1 is equal whatever the layer and the number of experts.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from .rows import LOADS, read_metrics

NAMED = 3
"""The number of the most and of the least used experts that are named."""
_LARGEST = 1e9
"""More mean loads than an expert can have."""


@dataclass(frozen=True, kw_only=True)
class Loads:
    """The records of a run. steps: the step of each record. loads: by record, layer and expert, in mean loads."""

    steps: tuple[int, ...]
    loads: tuple[tuple[tuple[float, ...], ...], ...]

    @property
    def worst_layer(self) -> int:
        """The layer with the least equal loads in the last record."""
        last = self.loads[-1]
        return max(range(len(last)), key=lambda layer: max(last[layer]))

    def of_layer(self, layer: int, columns: int) -> list[list[float]]:
        """The loads of a layer by expert and column, each the mean over as many records as fall into it."""
        # A terminal may be narrower than the margin.
        num = max(1, min(columns, len(self.steps)))
        ends = [round(i * len(self.steps) / num) for i in range(num + 1)]
        parts = [[record[layer] for record in self.loads[begin:end]] for begin, end in itertools.pairwise(ends)]
        return [[sum(row[expert] for row in part) / len(part) for part in parts] for expert in range(len(self.loads[-1][layer]))]

    def fullest(self, record: int) -> float:
        """The load of the fullest expert, mean over layers."""
        layers = self.loads[record]
        return sum(map(max, layers)) / len(layers)

    def by_use(self, layer: int) -> list[int]:
        """The experts of a layer, those with the largest loads in the last record first."""
        last = self.loads[-1][layer]
        return sorted(range(len(last)), key=lambda expert: -last[expert])

    def to_json(self) -> dict[str, object]:
        """The entry `experts` in a report's JSON."""
        order = self.by_use(self.worst_layer)
        return {
            "steps": [self.steps[0], self.steps[-1]],
            "load_max": [self.fullest(0), self.fullest(-1)],
            "worst_layer": self.worst_layer,
            "most_used": order[:NAMED],
            "least_used": order[::-1][:NAMED],
        }


def read_loads(run: Path) -> Loads | None:
    """The records of a run; None if there are none. Raises OSError."""
    path = run / LOADS
    if not path.exists():
        return None
    rows = [(row["step"], found) for row in read_metrics(path) if (found := _loads(row.get("load")))]
    # A line of another shape than the last was edited.
    kept = [(step, found) for step, found in rows if [len(layer) for layer in found] == [len(layer) for layer in rows[-1][1]]]
    return Loads(steps=tuple(step for step, _ in kept), loads=tuple(found for _, found in kept)) if kept else None


def _loads(value: object) -> tuple[tuple[float, ...], ...]:
    """The loads of a record, by layer; nothing if they are anything else."""
    if not isinstance(value, list) or not all(isinstance(layer, list) and layer for layer in value):
        return ()
    # NaN fails the comparison, too, and an integer of JSON may be too large for a float.
    if not all(isinstance(load, int | float) and 0 <= load <= _LARGEST for layer in value for load in layer):
        return ()
    return tuple(tuple(map(float, layer)) for layer in value)
