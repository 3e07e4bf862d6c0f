"""The predicted time of a step: the compiled schedule, walked through on a target's hardware.

XLA schedules a program statically: a computation's instructions run in the order of its text. The walk keeps two clocks, one for the device
and one for its links. A kernel advances the device's clock by the longer of its FLOPs at the chip's matmul rate and its bytes at the
memory's rate, plus a launch: the roofline of Williams et al. (Comm. ACM 52, 2009). A collective occupies the links from its `-start` on; at
its `-done` the device waits for whatever is left of it, and only that wait is exposed. Loops multiply.

Invariant: the seconds of a walk are its kernels' seconds plus its exposed seconds, so the table by signal adds up to the step.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass, field

from jgt.command.console import axes_text
from jgt.planner.hardware.network import Network
from jgt.planner.hlo.collectives import is_collective, pieces, wire_bytes
from jgt.planner.hlo.graph import branch_shares, runs_per_call
from jgt.planner.hlo.groups import participants_of
from jgt.planner.hlo.instruction import COLLECTIVES, HOST_SPACE, Instruction
from jgt.planner.hlo.kernels import is_kernel, kernel_cost
from jgt.planner.hlo.origin import NONE, Origin, origin_at, origin_of
from jgt.planner.hlo.shares import useful_share
from jgt.planner.hlo.text import Module
from jgt.planner.panels import Lane, Span, Track

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


HOST_AXES = ("host memory",)
"""The place of transfers between the memories of host and device, among the mesh axes of collectives."""


@dataclass
class _Run:
    """A walk under way. free: when each of the links' lanes is free; ends: the end of each asynchronous transfer by name, and its axes."""

    walk: Walk = field(default_factory=Walk)
    track: Track = field(default_factory=Track)
    free: dict[str, float] = field(default_factory=lambda: collections.defaultdict(float))
    ends: dict[str, tuple[float, tuple[str, ...]]] = field(default_factory=dict[str, tuple[float, tuple[str, ...]]])

    def occupy(self, name: str, seconds: float, axes: tuple[str, ...], origin: Origin, lane: str = "links") -> None:
        """Starts a transfer as soon as its lane is free: two at once would share it, and take as long as one after the other."""
        start = max(self.free[lane], self.walk.seconds)
        self.free[lane] = start + seconds
        self.ends[name] = (self.free[lane], axes)
        self.draw("links", start, self.free[lane], axes_text(axes), origin)

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
        """The timeline of each computation, by its name."""

    def step(self, temp_bytes: int = 0) -> Walk:
        """The whole program. temp_bytes: the temporary memory of a run, which some devices take time to get."""
        walk = Walk()
        walk.add(self._walk(self._module.entry))
        fresh = 0.0 if self._network is None else self._network.chip.fresh_seconds(temp_bytes)
        if fresh:
            walk.seconds += fresh
            walk.parts["memory"] += fresh
            walk.costs[Origin(NONE, "forward")].compute += fresh
        return walk

    def _walk(self, name: str) -> Walk:
        if name in self._walks:
            return self._walks[name]
        run = _Run()
        for instruction in self._module.computations[name].instructions.values():
            if instruction.kind in COLLECTIVES:
                self._send(run, instruction)
            elif instruction.op == "async-start" and is_collective(self._module, instruction):
                self._send_all(run, instruction)
            elif instruction.op == "copy-start":
                self._move(run, instruction)
            elif instruction.op.endswith("-done"):
                # The end of a copy inside the device or of an asynchronous kernel has nothing to wait for.
                if instruction.operands[0] in run.ends:
                    self._wait(run, self._module.operands(instruction)[0])
            elif is_kernel(instruction):
                self._compute(run, instruction)
            else:
                self._call(run, instruction)
        self._walks[name], self.tracks[name] = run.walk, run.track
        return run.walk

    def _send(self, run: _Run, collective: Instruction) -> None:
        span, origin = participants_of(collective, self._mesh, self._num_devices), origin_at(self._module, collective)
        # Arrays that XLA combined into one collective are counted one by one, as in the table of collectives.
        parts = pieces(self._module, collective)
        num_bytes = sum(wire_bytes(collective.kind, piece.array.num_bytes, span.size) for piece in parts)
        seconds = 0.0 if self._network is None else self._network.seconds(span.groups, num_bytes, collective.kind)
        run.walk.links[span.axes] += seconds
        run.walk.costs[origin].roofline[axes_text(span.axes)] += seconds
        run.occupy(collective.name, seconds, span.axes, origin)
        # A synchronous collective ends before the next instruction begins.
        if not collective.op.endswith("-start"):
            self._wait(run, collective)

    def _send_all(self, run: _Run, start: Instruction) -> None:
        """A computation of collectives that runs asynchronously: one collective, over the axes that take longest."""
        inner = self._walk(start.called[0])
        run.occupy(start.name, inner.seconds, max(inner.links, key=lambda axes: inner.links[axes]), inner.main_origin)
        for axes, seconds in inner.links.items():
            run.walk.links[axes] += seconds
        # Its seconds occupy the links here; they are exposed, if at all, where the end is waited for.
        for key, cost in inner.costs.items():
            run.walk.costs[key].add(Cost(roofline=cost.roofline))

    def _move(self, run: _Run, start: Instruction) -> None:
        """A copy between the memories of host and device; one inside the device's memory is not a transfer."""
        # (f32[8]{0}, f32[8]{0:S(5)}, u32[]): to, from, and a handle. Both directions run at once.
        into, out = (memory == HOST_SPACE for memory in start.memories[:2])
        if into == out or self._network is None:
            return
        seconds = start.arrays[0].num_bytes / (self._network.chip.host_gbs * 1e9)
        run.walk.links[HOST_AXES] += seconds
        run.occupy(start.name, seconds, HOST_AXES, origin_of(start.op_name) or Origin(NONE, "forward"), "to host" if into else "from host")

    def _call(self, run: _Run, instruction: Instruction) -> None:
        """An instruction that runs other computations; nothing for one that does no work at all."""
        walk, start = run.walk, run.walk.seconds
        called = {name: self._walk(name) for name in instruction.called}
        if instruction.op == "conditional" and branch_shares(self._module, instruction) is None:
            # Which branch is taken is unknown: the slowest one counts. Without times, FLOPs decide.
            longest = max(called.values(), key=lambda branch: (branch.seconds, branch.num_flops))
            # Devices that share a processor compute for other stages in a bubble.
            is_shared = self._network is not None and self._network.chip.devices is not None
            walk.add(longest.without_bubble() if is_shared else longest)
        else:
            for name, inner in called.items():
                walk.add(inner, float(runs_per_call(self._module, instruction, name)))
        if walk.seconds > start:
            longest = max(called.values(), key=lambda inner: inner.seconds)
            loop = instruction.attribute("body") if instruction.op == "while" else ""
            trips = int(runs_per_call(self._module, instruction, loop)) if loop else 1
            run.draw("device", start, walk.seconds, "loop" if loop else "kernels", longest.main_origin, trips, loop)

    def _compute(self, run: _Run, instruction: Instruction) -> None:
        # Kernels of a stream run one after another, so their seconds add up.
        work, origin = kernel_cost(self._module, instruction), origin_at(self._module, instruction)
        useful = float(useful_share(instruction.op_name))
        cost = run.walk.costs[origin]
        cost.flops += work.flops
        cost.hbm_bytes += work.num_bytes
        if self._network is None:
            return
        chip = self._network.chip
        matmul, attention = sum(map(chip.matmul_seconds, work.matmuls)), chip.attention_seconds(work.attention) if work.attention else 0.0
        memory, launch = chip.memory_seconds(work.num_bytes), chip.rates.launch_us * 1e-6
        alone = max(matmul + attention, memory) + launch
        # A collective under way takes cores and memory from the kernel beside it.
        beside = min(alone, max(run.free["links"] - run.walk.seconds, 0.0))
        seconds = alone + beside * (chip.rates.beside - 1)
        run.draw("device", run.walk.seconds, run.walk.seconds + seconds, "kernels", origin)
        run.walk.seconds += seconds
        cost.compute += seconds
        cost.roofline["matmul"] += matmul + attention
        cost.roofline["memory"] += memory
        busy = "memory" if memory > matmul + attention else "attention" if attention > matmul else "matmul"
        run.walk.parts["bubble"] += seconds * (1 - useful)
        if origin.phase == "recompute":
            run.walk.parts["recompute"] += seconds * useful
        else:
            run.walk.parts[busy] += (seconds - launch) * useful
            run.walk.parts["launch"] += launch * useful

    def _wait(self, run: _Run, start: Instruction) -> None:
        """Waits for a transfer, by the instruction that started it."""
        end, axes = run.ends[start.name]
        waited = max(end - run.walk.seconds, 0.0)
        origin = origin_at(self._module, start)
        if waited:
            run.draw("device", run.walk.seconds, end, "waiting", origin)
            run.walk.exposed[axes] += waited
            run.walk.parts["exposed"] += waited
        run.walk.seconds += waited
        run.walk.costs[origin].exposed += waited
