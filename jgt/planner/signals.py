"""The costs of each signal in one row: parameters, activations, bytes sent, FLOPs and time.

They are joined by the name of the signal, `layers/attn`. JAX hoists constants out of loops, and their instructions keep only the end of the
name, `attn`. `full_signal` restores it if exactly one known signal ends so.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from jgt.command.console import Console, axes_text
from jgt.planner.flops import Flops
from jgt.planner.hlo.collectives import Collective
from jgt.planner.hlo.origin import EXCHANGED, NONE, full_signal
from jgt.planner.layouts import Parameter
from jgt.planner.memory import Memory
from jgt.planner.timeline import Cost, Walk
from jgt.rules import Rules

_Number = TypeVar("_Number", int, float)

PIPELINE_SIGNAL = "pipeline"
"""The signal, in tables, of what a pipeline adds to the model."""


@dataclass(frozen=True, kw_only=True)
class SignalRow:
    """One signal. Bytes, FLOPs and milliseconds are one device's in one step.

    rule: file:line of the rule for the signal; empty without rules. specs: its parameters and how they are stored. activation_bytes:
    what the backward pass needs of the forward pass. sent: bytes by mesh axes. flops: FLOPs of the compiled program, so work that several
    devices repeat counts on each. flops_share: this device's part of the traced program's FLOPs, as if no device repeated any. repeats:
    the first over the second without recompute, which XLA itself may run more often.
    compute_ms: time in kernels; exposed_ms: time of waiting for collectives; None without a target. roofline_ms: the time that its
    matmuls, its memory traffic, and its collectives by axes would need alone; empty without a target.
    """

    signal: str
    rule: str
    specs: tuple[str, ...]
    parameter_bytes: int
    activation_bytes: int
    sent: Mapping[str, int]
    flops: float
    flops_share: float
    repeats: float
    hbm_bytes: float
    compute_ms: float | None
    exposed_ms: float | None
    roofline_ms: Mapping[str, float]


def signal_rows(
    params: Sequence[Parameter],
    memory: Memory,
    collectives: Sequence[Collective],
    walk: Walk,
    traced: Sequence[Flops],
    num_devices: int,
    rules: Rules | None,
    where: str | None,
    *,
    timed: bool,
) -> Iterator[SignalRow]:
    """A row for each signal that has any cost, the slowest first.

    where: the file:line of the pipeline's section; None without a pipeline. timed: whether the walk has times.
    """
    owned: dict[str, list[Parameter]] = collections.defaultdict(list)
    # A tied parameter counts at the first of its signals only, so that the rows add up.
    for p in params:
        owned[p.signals[0] if p.signals else NONE].append(p)
    sent: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for c in collectives:
        sent[c.signal][axes_text(c.axes)] += c.total_bytes
    share, once, done = (collections.defaultdict[str, float](float) for _ in range(3))
    for row in traced:
        share[row.signal] += row.executed / num_devices
        once[row.signal] += row.executed / num_devices * (row.phase != "recompute")
    # Names in the traced program and of collectives are full, but names of kernels may have lost their beginning.
    known = {*owned, *sent, *share}
    costs: dict[str, Cost] = collections.defaultdict(Cost)
    for origin, cost in walk.costs.items():
        costs[full_signal(origin.signal, known)].add(cost)
        done[full_signal(origin.signal, known)] += cost.flops * (origin.phase != "recompute")
    activations: collections.Counter[str] = collections.Counter()
    for name, count in memory.activations.items():
        activations[full_signal(name, known)] += count
    # Without a target all times are 0, and rows are sorted by name.
    for name in sorted({*owned, *costs, *sent, *share, *activations}, key=lambda n: (-costs[n].compute - costs[n].exposed, n)):
        cost = costs[name]
        yield SignalRow(
            signal=name,
            # A pipeline's own work names the section that asks for it.
            rule=where if where is not None and name == PIPELINE_SIGNAL else "" if rules is None else rules.where_of(name),
            specs=tuple(dict.fromkeys(f"{p.name} {p.spec}".strip() for p in owned[name])),
            parameter_bytes=sum(p.local_bytes for p in owned[name]),
            activation_bytes=activations[name],
            sent=dict(sent[name]),
            flops=cost.flops,
            flops_share=share[name],
            repeats=done[name] / once[name] if once[name] else 1.0,
            hbm_bytes=cost.hbm_bytes,
            compute_ms=cost.compute * 1e3 if timed else None,
            exposed_ms=cost.exposed * 1e3 if timed else None,
            roofline_ms={part: seconds * 1e3 for part, seconds in cost.roofline.items() if seconds},
        )


def folded(rows: Sequence[SignalRow]) -> list[SignalRow]:
    """The rows, where those of equal layers of a Python loop are one with the costs of all: `blocks/* (48)` for blocks/0 to blocks/47."""
    groups: dict[tuple[str, tuple[str, ...]], list[SignalRow]] = {}
    for row in rows:
        key = Console.of_any_layer(row.signal), tuple(map(Console.of_any_layer, row.specs))
        groups.setdefault(key, []).append(row)
    one = [same[0] if len(same) == 1 else _added(f"{name} ({len(same)})", specs, same) for (name, specs), same in groups.items()]
    return sorted(one, key=lambda row: -(row.compute_ms or 0) - (row.exposed_ms or 0))


def _added(signal: str, specs: tuple[str, ...], rows: Sequence[SignalRow]) -> SignalRow:
    first = rows[0]
    return replace(
        first,
        signal=signal,
        specs=specs,
        parameter_bytes=sum(row.parameter_bytes for row in rows),
        activation_bytes=sum(row.activation_bytes for row in rows),
        sent=_total([row.sent for row in rows]),
        flops=sum(row.flops for row in rows),
        flops_share=sum(row.flops_share for row in rows),
        hbm_bytes=sum(row.hbm_bytes for row in rows),
        compute_ms=None if first.compute_ms is None else sum(row.compute_ms or 0 for row in rows),
        exposed_ms=None if first.exposed_ms is None else sum(row.exposed_ms or 0 for row in rows),
        roofline_ms=_total([row.roofline_ms for row in rows]),
    )


def _total(costs: Sequence[Mapping[str, _Number]]) -> dict[str, _Number]:
    return {key: sum((cost[key] for cost in costs if key in cost), cast(_Number, 0)) for key in dict.fromkeys(k for c in costs for k in c)}


def located(
    sent: Sequence[Collective], params: Sequence[Parameter], where: str, summed: Collection[tuple[str, ...]]
) -> tuple[Collective, ...]:
    """The collectives, each with the line that causes it, and sums of replicas with their signal.

    where: file:line of the pipeline's section. summed: the axes over which replicas add up what they have.

    Operations that a pipeline adds to the model have no line in the user's program, except the line that calls the whole step. Its section
    causes what it sends between stages; parameters cause what it gathers and reduces. XLA combines sums of replicas, and may drop their
    names.
    """
    # Only stages permute: the lines of these collectives are those that call the pipelined function.
    calls = {c.source for c in sent if c.signal == PIPELINE_SIGNAL and c.kind == "collective-permute"}
    largest: dict[str, Parameter] = {}
    for p in sorted(params, key=lambda p: -p.local_bytes):
        for signal in p.signals:
            largest.setdefault(signal, p)

    def cause(c: Collective) -> str:
        return where if c.signal == PIPELINE_SIGNAL else largest[c.signal].source if c.signal in largest else ""

    found = (replace(c, source=cause(c) or c.source) if c.source in calls else c for c in sent)
    are_sums = ("all-reduce", "reduce-scatter")
    return tuple(replace(c, signal=EXCHANGED) if c.kind in are_sums and c.axes in summed else c for c in found)
