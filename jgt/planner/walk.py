"""The costs of one run of a computation: seconds, FLOPs and bytes, which add up over calls and loops."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field

from jgt.planner.hlo.origin import NONE, Origin

PARTS = "matmul", "attention", "memory", "launch", "recompute", "bubble", "exposed"
"""The parts of a step's seconds. matmul, attention, memory: kernels, by what limits them. launch: the start of kernels. recompute: kernels
that repeat a part of the forward pass. bubble: work of a pipeline's idle ticks, whose results are dropped. exposed: waiting for
collectives."""


def _sums() -> collections.defaultdict[str, float]:
    return collections.defaultdict(float)


def _sums_by_axes() -> collections.defaultdict[tuple[str, ...], float]:
    return collections.defaultdict(float)


@dataclass
class Cost:
    """The cost of a signal in one phase of a step on one device.

    compute: seconds of kernels. exposed: seconds of waiting for collectives. flops: FLOPs of matmuls. hbm_bytes: bytes to and from memory.
    roofline: the seconds that each part of the hardware would need alone: matmul, memory, and links by mesh axes.
    """

    compute: float = 0.0
    exposed: float = 0.0
    flops: float = 0.0
    hbm_bytes: float = 0.0
    roofline: dict[str, float] = field(default_factory=_sums)

    def add(self, other: Cost, times: float = 1) -> None:
        """Adds another cost, `times` times."""
        self.compute += other.compute * times
        self.exposed += other.exposed * times
        self.flops += other.flops * times
        self.hbm_bytes += other.hbm_bytes * times
        for part, seconds in other.roofline.items():
            self.roofline[part] += seconds * times


@dataclass
class Walk:
    """One run of a computation: its seconds, and its costs by signal and phase.

    links: seconds of all collectives by mesh axes, hidden or not. exposed: seconds of waiting, by the axes of the collective waited for.
    parts: the seconds by `PARTS`; they add up to `seconds`.
    """

    seconds: float = 0.0
    costs: dict[Origin, Cost] = field(default_factory=lambda: collections.defaultdict(Cost))
    links: dict[tuple[str, ...], float] = field(default_factory=_sums_by_axes)
    exposed: dict[tuple[str, ...], float] = field(default_factory=_sums_by_axes)
    parts: dict[str, float] = field(default_factory=_sums)

    @property
    def num_flops(self) -> float:
        """The FLOPs of its matmuls."""
        return sum(cost.flops for cost in self.costs.values())

    def add(self, other: Walk, times: float = 1) -> None:
        """Appends `times` runs of another computation."""
        self.seconds += other.seconds * times
        for key, cost in other.costs.items():
            self.costs[key].add(cost, times)
        for sums, more in ((self.links, other.links), (self.exposed, other.exposed)):
            for axes, seconds in more.items():
                sums[axes] += seconds * times
        for part, seconds in other.parts.items():
            self.parts[part] += seconds * times

    def without_bubble(self) -> Walk:
        """A branch that idle stages of a pipeline do not take, on a processor that computes for the other stages meanwhile."""
        rest, bubble = Walk(), self.parts["bubble"]
        rest.add(self, 1 - bubble / self.seconds if bubble else 1.0)
        rest.parts.update({**self.parts, "bubble": 0.0})
        return rest

    @property
    def main_origin(self) -> Origin:
        """The signal and the phase that take most of its time."""
        return max(self.costs, key=lambda origin: self.costs[origin].compute + self.costs[origin].exposed, default=Origin(NONE, "forward"))
