"""A predicted step: the compiled schedule walked through, each kernel by a roofline, each collective by its links.

A kernel takes the longer of its FLOPs at the chip's matmul rate and its bytes at the memory's rate, and a launch. An asynchronous
collective runs beside what is scheduled between its start and its end; only what is left of it then counts as exposed.
The roofline is that of Williams et al. (Comm. ACM 52, 2009).
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass, field

from jgt.plan.collectives import is_collective, pieces, wire_bytes
from jgt.plan.counts import taken
from jgt.plan.groups import span_of
from jgt.plan.hlo import KINDS, Computation, Instruction, Module, Spot
from jgt.plan.kernels import is_kernel, kernel
from jgt.plan.neighbours import belongs
from jgt.plan.network import Network
from jgt.plan.units import axes_text

Key = tuple[str, str]
"""Signal and phase."""


@dataclass
class Cost:
    """What one device spends on a signal in a phase, in a step.

    compute: seconds of kernels; exposed: of waiting for collectives. flops: of matmuls; hbm_bytes: to and from memory. roofline:
    seconds that each part of the hardware alone would need: matmul, memory, and links by mesh axes.
    """

    compute: float = 0.0
    exposed: float = 0.0
    flops: float = 0.0
    hbm_bytes: float = 0.0
    roofline: dict[str, float] = field(default_factory=lambda: collections.defaultdict(float))

    def add(self, other: Cost, times: float = 1) -> None:
        """More of it."""
        self.compute += other.compute * times
        self.exposed += other.exposed * times
        self.flops += other.flops * times
        self.hbm_bytes += other.hbm_bytes * times
        for part, seconds in other.roofline.items():
            self.roofline[part] += seconds * times


Costs = dict[Key, Cost]


@dataclass
class Walk:
    """One run of a computation: its seconds, and who they belong to.

    links: seconds of all collectives by mesh axes, hidden or not; exposed: seconds of waiting for them, by the axes of the one waited for.
    """

    seconds: float = 0.0
    costs: Costs = field(default_factory=lambda: collections.defaultdict(Cost))
    links: dict[tuple[str, ...], float] = field(default_factory=lambda: collections.defaultdict(float))
    exposed: dict[tuple[str, ...], float] = field(default_factory=lambda: collections.defaultdict(float))

    @property
    def num_flops(self) -> float:
        """FLOPs of its matmuls."""
        return sum(cost.flops for cost in self.costs.values())

    def add(self, other: Walk, times: float = 1) -> None:
        """Another run after this one."""
        self.seconds += other.seconds * times
        for key, cost in other.costs.items():
            self.costs[key].add(cost, times)
        for axes, seconds in other.links.items():
            self.links[axes] += seconds * times
        for axes, seconds in other.exposed.items():
            self.exposed[axes] += seconds * times


class Timeline:
    """A compiled program on a network; without one (CPU) only FLOPs and bytes are counted."""

    def __init__(self, module: Module, mesh: dict[str, int], num_devices: int, network: Network | None):
        self._module, self._mesh, self._num_devices, self._network = module, mesh, num_devices, network
        self._walks: dict[str, Walk] = {}

    def step(self) -> Walk:
        """The whole program."""
        return self._walk(self._module.entry)

    def _walk(self, name: str) -> Walk:
        if name not in self._walks:
            self._walks[name] = self._run(name, self._module.computations[name])
        return self._walks[name]

    def _run(self, name: str, computation: Computation) -> Walk:
        walk, link_free, ends = Walk(), 0.0, {}
        for instruction in computation.instructions.values():
            spot = Spot(name, instruction.name)
            if instruction.kind in KINDS:
                seconds, axes = self._collective(spot, instruction)
                link_free = max(link_free, walk.seconds) + seconds
                walk.links[axes] += seconds
                walk.costs[belongs(self._module, spot)].roofline[axes_text(axes)] += seconds
                ends[instruction.name] = (link_free, axes)
                if not instruction.op.endswith("-start"):
                    self._wait(walk, spot, link_free, axes)
            elif instruction.op == "async-start" and is_collective(self._module, instruction):
                inner = self._walk(instruction.called[0])
                link_free = max(link_free, walk.seconds) + inner.seconds
                ends[instruction.name] = (link_free, max(inner.links, key=lambda axes: inner.links[axes]))
                for axes, seconds in inner.links.items():
                    walk.links[axes] += seconds
                for key, cost in inner.costs.items():
                    walk.costs[key].add(Cost(roofline=cost.roofline))
            elif instruction.op.endswith("-done"):
                start = instruction.operands[0]
                if start in ends:
                    self._wait(walk, Spot(name, start), *ends[start])
            elif instruction.op == "while":
                trips = 1 if instruction.trips is None else instruction.trips
                walk.add(self._walk(instruction.attribute("body")), trips)
                walk.add(self._walk(instruction.attribute("condition")), trips + 1)
            elif instruction.op == "conditional":
                branches = [(self._walk(called), float(taken(self._module, called))) for called in instruction.called]
                walk.add(*max(branches, key=lambda branch: (branch[0].seconds, branch[0].num_flops)))
            elif instruction.op in ("call", "async-start"):
                for called in instruction.called:
                    walk.add(self._walk(called))
            elif is_kernel(instruction):
                self._compute(walk, computation, spot, instruction)
        return walk

    def _compute(self, walk: Walk, computation: Computation, spot: Spot, instruction: Instruction) -> None:
        one = kernel(self._module, computation, instruction)
        cost = walk.costs[belongs(self._module, spot)]
        cost.flops += one.flops
        cost.hbm_bytes += one.num_bytes
        if self._network is None:
            return
        chip = self._network.target.chip
        matmul = one.flops / (chip.peak_flops(one.dtype) * chip.efficiency.matmul) if one.flops else 0.0
        memory = one.num_bytes / (chip.hbm_gbs * 1e9 * chip.efficiency.hbm)
        seconds = max(matmul, memory) + chip.latency_us.launch * 1e-6
        walk.seconds += seconds
        cost.compute += seconds
        cost.roofline["matmul"] += matmul
        cost.roofline["memory"] += memory

    def _collective(self, spot: Spot, instruction: Instruction) -> tuple[float, tuple[str, ...]]:
        span = span_of(instruction, self._mesh, self._num_devices)
        if self._network is None:
            return 0.0, span.axes
        found = pieces(self._module, spot.computation, instruction)
        sent = sum(wire_bytes(instruction.kind, piece.array.num_bytes, span.size) for piece in found)
        return self._network.seconds(span.groups, sent), span.axes

    def _wait(self, walk: Walk, spot: Spot, until: float, axes: tuple[str, ...]) -> None:
        waited = max(until - walk.seconds, 0.0)
        walk.seconds += waited
        if waited:
            walk.exposed[axes] += waited
        walk.costs[belongs(self._module, spot)].exposed += waited


def by_signal(costs: Costs) -> Iterator[tuple[str, Cost]]:
    """Phases added up."""
    found: dict[str, Cost] = collections.defaultdict(Cost)
    for (signal, _), cost in costs.items():
        found[signal].add(cost)
    yield from found.items()
