"""What each signal costs: all that is known of it, in a row."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jgt.plan.collectives import Collective
from jgt.plan.flops import Flops
from jgt.plan.memory import Memory
from jgt.plan.origin import NONE
from jgt.plan.parameters import Parameter
from jgt.plan.timeline import Cost, Walk, by_signal
from jgt.plan.units import axes_text
from jgt.rules import Rules


@dataclass(frozen=True, kw_only=True)
class SignalRow:
    """One signal: its parameters' specs and bytes, what it keeps for the backward pass, what it sends, how long it takes.

    Bytes, FLOPs and milliseconds are of one device and step. sent: bytes by mesh axes. flops: of the compiled program, with what
    several devices compute alike; flops_share: of the traced program's FLOPs, this device's part if nothing were computed twice.
    rule: file:line of the rule for it, where rules were given. roofline_ms: what its matmuls, its memory traffic, and its collectives
    by axes would each need alone; empty without a target.
    """

    signal: str
    rule: str
    specs: tuple[str, ...]
    parameter_bytes: int
    activation_bytes: int
    sent: Mapping[str, int]
    flops: float
    flops_share: float
    hbm_bytes: float
    compute_ms: float | None
    exposed_ms: float | None
    roofline_ms: Mapping[str, float]


def signal_rows(
    params: Sequence[Parameter],
    memory: Memory,
    found: Sequence[Collective],
    walk: Walk,
    traced: Sequence[Flops],
    num_devices: int,
    rules: Rules | None,
    *,
    timed: bool,
) -> Iterator[SignalRow]:
    """A row for each signal that owns anything, those that take longest first."""
    costs: dict[str, Cost] = collections.defaultdict(Cost)
    sent: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for one in found:
        sent[one.signal][axes_text(one.axes)] += one.total_bytes
    share: dict[str, float] = collections.defaultdict(float)
    for row in traced:
        share[row.signal] += row.executed / num_devices
    own: dict[str, list[Parameter]] = collections.defaultdict(list)
    for p in params:
        own[p.signals[0] if p.signals else NONE].append(p)
    homes = Homes({*own, *sent, *share})
    for name, cost in by_signal(walk.costs):
        costs[homes.of(name)].add(cost)
    kept: collections.Counter[str] = collections.Counter()
    for name, count in memory.activations.items():
        kept[homes.of(name)] += count
    names = {*own, *costs, *sent, *share, *kept}
    for name in sorted(names, key=lambda n: (-costs[n].compute - costs[n].exposed, n)):
        cost = costs[name]
        yield SignalRow(
            signal=name,
            rule="" if rules is None else rules.where_of(name),
            specs=tuple(dict.fromkeys(f"{p.name} {p.spec}".strip() for p in own[name])),
            parameter_bytes=sum(p.local_bytes for p in own[name]),
            activation_bytes=kept[name],
            sent=dict(sent[name]),
            flops=cost.flops,
            flops_share=share[name],
            hbm_bytes=cost.hbm_bytes,
            compute_ms=cost.compute * 1e3 if timed else None,
            exposed_ms=cost.exposed * 1e3 if timed else None,
            roofline_ms={part: seconds * 1e3 for part, seconds in cost.roofline.items() if seconds},
        )


class Homes:
    """The signals that own something, whose whole names are known; JAX takes constants out of a loop and forgets the signals around it."""

    def __init__(self, known: set[str]):
        self._known = known

    def of(self, name: str) -> str:
        """The one known signal that a name is the end of, for a name that is not known itself."""
        ends = [known for known in self._known if known.endswith(f"/{name}")]
        return ends[0] if name not in self._known and len(ends) == 1 else name
