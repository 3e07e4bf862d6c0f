"""What the time of a step is spent on: matmuls, memory traffic, recompute, bubbles, and waiting for collectives.

The table of signals says where the time goes. This says what kind of time it is, because each kind has a remedy of its own: recompute is
bought with memory, a bubble with microbatches, waiting with another layout. Every second has one kind. The first of these that applies
counts: a pipeline's bubble, waiting for a collective, recompute, and otherwise what bounds the kernel.

Invariant: the parts add up to the seconds of the walk that they describe.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass, field

from jgt.console import axes_text
from jgt.hlo.origin import Phase
from jgt.program.scopes import useful_share

WAITING = "waiting: "
"""What the names of the parts that wait for collectives begin with; the mesh axes follow."""

PARTS = {
    "matmul": "matmul-bound kernels",
    "memory": "memory-bound kernels",
    "recompute": "recompute",
    "bubble": "bubble of the pipeline",
}
"""The other parts, in the order in which they are shown, and what a person reads."""


@dataclass
class Breakdown:
    """Seconds by part: a key of PARTS, or WAITING and the mesh axes of the collectives."""

    parts: collections.defaultdict[str, float] = field(default_factory=lambda: collections.defaultdict(float))

    @property
    def seconds(self) -> float:
        """All parts together."""
        return sum(self.parts.values())

    def kernel(self, seconds: float, op_name: str, phase: Phase, *, is_memory_bound: bool) -> None:
        """Adds the seconds of a kernel. op_name: with the scopes that say how often a pipeline uses its result."""
        kind = "recompute" if phase == "recompute" else "memory" if is_memory_bound else "matmul"
        self._add(kind, seconds, op_name)

    def wait(self, seconds: float, op_name: str, axes: tuple[str, ...]) -> None:
        """Adds the seconds of waiting for a collective over these axes."""
        self._add(WAITING + axes_text(axes), seconds, op_name)

    def add(self, other: Breakdown, times: float = 1) -> None:
        """Adds another breakdown, `times` times."""
        for kind, seconds in other.parts.items():
            self.parts[kind] += seconds * times

    def _add(self, kind: str, seconds: float, op_name: str) -> None:
        # Whatever a stage does for a microbatch that it does not have is a bubble.
        useful = float(useful_share(op_name))
        self.parts[kind] += seconds * useful
        if useful < 1:
            self.parts["bubble"] += seconds * (1 - useful)


def ordered(parts: Mapping[str, float]) -> dict[str, float]:
    """The parts in the order in which they are shown: those of PARTS, then waiting, the longest first. Those without time are left out."""
    waiting = sorted((kind for kind in parts if kind.startswith(WAITING)), key=lambda kind: -parts[kind])
    return {kind: parts[kind] for kind in (*PARTS, *waiting) if parts.get(kind)}


def part_text(kind: str) -> str:
    """A part as a person reads it: `waiting for tensor`."""
    return PARTS[kind] if kind in PARTS else f"waiting for {kind.removeprefix(WAITING)}"
