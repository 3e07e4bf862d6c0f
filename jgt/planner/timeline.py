"""The predicted time of a step: the compiled schedule, walked through on a target's hardware.

XLA schedules a program statically: a computation's instructions run in the order of its text. So the time of a step can be predicted
without the hardware. The walk keeps two clocks, one for the device and one for its links. A kernel advances the device's clock by the
longer of its FLOPs at the chip's matmul rate and its bytes at the memory's rate, plus a launch: the roofline of Williams et al. (Comm.
ACM 52, 2009). A collective occupies the links from its `-start` on, beside the kernels that are scheduled after it; at its `-done` the
device waits for whatever is left of it, and only that wait is exposed. Loops multiply, branches count as the longest.

Invariant: the seconds of a walk are its kernels' seconds plus its exposed seconds, so the table by signal adds up to the step.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jgt.console import axes_text
from jgt.hlo.collectives import is_collective, pieces, wire_bytes
from jgt.hlo.graph import fraction_taken
from jgt.hlo.groups import Groups, participants_of
from jgt.hlo.instruction import COLLECTIVES, Instruction
from jgt.hlo.kernels import is_kernel, kernel_cost
from jgt.hlo.origin import NONE, Origin, origin_at
from jgt.hlo.text import Computation, Module, Spot
from jgt.hlo.trips import trip_count
from jgt.planner.step.breakdown import Breakdown
from jgt.planner.chip import Target
from jgt.planner.step.spans import Lane, Span, Track


@dataclass(frozen=True, kw_only=True)
class Network:
    """Hosts with fast links inside, and a port for each GPU between them. hosts: the host of each device, in the mesh's order."""

    target: Target
    hosts: Sequence[int]

    def seconds(self, groups: Groups, wire_bytes: int) -> float:
        """The time of a ring collective in which every device sends `wire_bytes`; the slowest group counts."""
        # How many members each host has in a group. Few shapes are different, so the time is computed once for each.
        shapes = {tuple(sorted(collections.Counter(self.hosts[d] for d in group).values())) for group in groups}
        return max((self._of_group(members, wire_bytes) for members in shapes), default=0.0)

    def _of_group(self, members: tuple[int, ...], wire_bytes: int) -> float:
        chip, share = self.target.chip, self.target.chip.efficiency.link
        inside = wire_bytes / (chip.nvlink_gbs * 1e9 * share) if max(members) > 1 else 0.0
        if len(members) == 1:
            return inside + chip.latency_us.nvlink * 1e-6
        # A host with g members runs g rings at once, each through the port of another GPU, so that a port carries a g-th. The
        # host with the fewest members has the fewest ports.
        between = wire_bytes / (members[0] * chip.nic_gbs * 1e9 * share)
        return max(inside, between) + chip.latency_us.nic * 1e-6 * math.ceil(math.log2(len(members)))


@dataclass
class Cost:
    """What one device spends on a signal in a phase, in a step.

    compute: seconds of kernels. exposed: seconds of waiting for collectives. flops: of matmuls. hbm_bytes: to and from memory.
    roofline: the seconds that each part of the hardware would need alone: matmul, memory, and links by mesh axes.
    """

    compute: float = 0.0
    exposed: float = 0.0
    flops: float = 0.0
    hbm_bytes: float = 0.0
    roofline: dict[str, float] = field(default_factory=lambda: collections.defaultdict(float))

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
    breakdown: the seconds by what they are spent on.
    """

    seconds: float = 0.0
    costs: dict[Origin, Cost] = field(default_factory=lambda: collections.defaultdict(Cost))
    links: dict[tuple[str, ...], float] = field(default_factory=lambda: collections.defaultdict(float))
    exposed: dict[tuple[str, ...], float] = field(default_factory=lambda: collections.defaultdict(float))
    breakdown: Breakdown = field(default_factory=Breakdown)

    @property
    def num_flops(self) -> float:
        """FLOPs of its matmuls."""
        return sum(cost.flops for cost in self.costs.values())

    def add(self, other: Walk, times: float = 1) -> None:
        """Appends `times` runs of another computation."""
        self.seconds += other.seconds * times
        self.breakdown.add(other.breakdown, times)
        for key, cost in other.costs.items():
            self.costs[key].add(cost, times)
        for sums, more in ((self.links, other.links), (self.exposed, other.exposed)):
            for axes, seconds in more.items():
                sums[axes] += seconds * times


@dataclass
class _Run:
    """A walk under way. links_free: when the last collective ends; ends: when each asynchronous one does, by name, and its axes."""

    walk: Walk = field(default_factory=Walk)
    track: Track = field(default_factory=Track)
    links_free: float = 0.0
    ends: dict[str, tuple[float, tuple[str, ...]]] = field(default_factory=dict[str, tuple[float, tuple[str, ...]]])

    def occupy(self, name: str, seconds: float, axes: tuple[str, ...], origin: Origin) -> None:
        """Starts a collective as soon as the links are free: two at once would share them, and take as long as one after the other."""
        start = max(self.links_free, self.walk.seconds)
        self.links_free = start + seconds
        self.ends[name] = (self.links_free, axes)
        self.draw("links", start, self.links_free, axes_text(axes), origin)

    def draw(self, lane: Lane, start: float, end: float, kind: str, origin: Origin, trips: int = 1, loop: str = "") -> None:
        """Adds a span to the timeline."""
        self.track.add(Span(lane=lane, start=start, end=end, kind=kind, signal=origin.signal, phase=origin.phase, trips=trips), loop)


class Timeline:
    """A compiled program on a network. Without a network (on CPU) only FLOPs and bytes are counted, and all times are 0."""

    def __init__(self, module: Module, mesh: Mapping[str, int], num_devices: int, network: Network | None):
        self._module, self._mesh, self._num_devices, self._network = module, mesh, num_devices, network
        # A computation that is called from several places takes the same time in each.
        self._walks: dict[str, Walk] = {}
        self.tracks: dict[str, Track] = {}
        """The timeline of each computation, by its name; computations of no length have none."""

    def step(self) -> Walk:
        """The whole program."""
        return self._walk(self._module.entry)

    def _walk(self, name: str) -> Walk:
        if name in self._walks:
            return self._walks[name]
        run, computation = _Run(), self._module.computations[name]
        for instruction in computation.instructions.values():
            spot = Spot(name, instruction.name)
            if instruction.kind in COLLECTIVES:
                self._send(run, spot, instruction)
            elif instruction.op == "async-start" and is_collective(self._module, instruction):
                self._send_all(run, instruction)
            elif instruction.op.endswith("-done"):
                # The end of a copy or of an asynchronous kernel has no collective to wait for.
                if instruction.operands[0] in run.ends:
                    self._wait(run, Spot(name, instruction.operands[0]))
            elif is_kernel(instruction):
                self._compute(run, computation, spot, instruction)
            else:
                self._call(run, instruction)
        self._walks[name] = run.walk
        self.tracks[name] = run.track
        return run.walk

    def _send(self, run: _Run, spot: Spot, collective: Instruction) -> None:
        span = participants_of(collective, self._mesh, self._num_devices)
        axes, seconds = span.axes, 0.0
        if self._network is not None:
            # Arrays that XLA combined into one collective are counted one by one, as in the table of collectives.
            found = pieces(self._module, spot.computation, collective)
            sent = sum(wire_bytes(collective.kind, piece.array.num_bytes, span.size) for piece in found)
            seconds = self._network.seconds(span.groups, sent)
        origin = origin_at(self._module, spot)
        run.walk.links[axes] += seconds
        run.walk.costs[origin].roofline[axes_text(axes)] += seconds
        run.occupy(spot.name, seconds, axes, origin)
        # A synchronous collective ends before the next instruction begins.
        if not collective.op.endswith("-start"):
            self._wait(run, spot)

    def _send_all(self, run: _Run, start: Instruction) -> None:
        """A computation of collectives that runs asynchronously: one collective, over the axes that take longest."""
        inner = self._walk(start.called[0])
        run.occupy(start.name, inner.seconds, max(inner.links, key=lambda axes: inner.links[axes]), _main_origin(inner))
        for axes, seconds in inner.links.items():
            run.walk.links[axes] += seconds
        # Its seconds occupy the links here; they are exposed, if at all, where the end is waited for.
        for key, cost in inner.costs.items():
            run.walk.costs[key].add(Cost(roofline=cost.roofline))

    def _call(self, run: _Run, instruction: Instruction) -> None:
        """An instruction that runs other computations; nothing for one that does no work at all."""
        walk, start = run.walk, run.walk.seconds
        if instruction.op == "while":
            known = trip_count(self._module, instruction)
            trips = 1 if known is None else known
            walk.add(self._walk(instruction.attribute("body")), trips)
            # The condition runs once more, to end the loop.
            walk.add(self._walk(instruction.attribute("condition")), trips + 1)
            body = instruction.attribute("body")
            run.draw("device", start, walk.seconds, "loop", _main_origin(self._walks[body]), trips, body)
        elif instruction.op == "conditional":
            # The slowest branch counts, as often as its name says that it is taken. Without times, FLOPs decide.
            branches = [(self._walk(called), float(fraction_taken(self._module, called))) for called in instruction.called]
            slowest = max(branches, key=lambda branch: (branch[0].seconds, branch[0].num_flops))
            walk.add(*slowest)
            run.draw("device", start, walk.seconds, "kernels", _main_origin(slowest[0]))
        elif instruction.op in ("call", "async-start"):
            for called in instruction.called:
                walk.add(self._walk(called))
                run.draw("device", start, walk.seconds, "kernels", _main_origin(self._walks[called]))

    def _compute(self, run: _Run, computation: Computation, spot: Spot, instruction: Instruction) -> None:
        # Kernels of a stream run one after another, so their seconds add up.
        one = kernel_cost(self._module, computation, instruction)
        walk, origin = run.walk, origin_at(self._module, spot)
        cost = walk.costs[origin]
        cost.flops += one.flops
        cost.hbm_bytes += one.num_bytes
        if self._network is None:
            return
        chip = self._network.target.chip
        matmul = one.flops / (chip.peak_flops(one.dtype) * chip.efficiency.matmul) if one.flops else 0.0
        memory = one.num_bytes / (chip.hbm_gbs * 1e9 * chip.efficiency.hbm)
        seconds = max(matmul, memory) + chip.latency_us.launch * 1e-6
        run.draw("device", walk.seconds, walk.seconds + seconds, "kernels", origin)
        walk.seconds += seconds
        walk.breakdown.kernel(seconds, instruction.op_name, origin.phase, is_memory_bound=memory > matmul)
        cost.compute += seconds
        cost.roofline["matmul"] += matmul
        cost.roofline["memory"] += memory

    def _wait(self, run: _Run, start: Spot) -> None:
        """Waits for a collective, by the spot that started it."""
        end, axes = run.ends[start.name]
        waited, origin = max(end - run.walk.seconds, 0.0), origin_at(self._module, start)
        if waited:
            run.draw("device", run.walk.seconds, end, "waiting", origin)
            run.walk.exposed[axes] += waited
            run.walk.breakdown.wait(waited, self._module.at(start).op_name, axes)
        run.walk.seconds += waited
        run.walk.costs[origin].exposed += waited


def _main_origin(walk: Walk) -> Origin:
    """The signal and the phase in which a walk spends most of its time."""
    return max(walk.costs, key=lambda origin: walk.costs[origin].compute + walk.costs[origin].exposed, default=Origin(NONE, "forward"))
