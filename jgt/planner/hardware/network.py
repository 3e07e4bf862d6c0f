"""The seconds that collectives take on the links between devices.

Links form levels: the fast ones of a host or of a rack, and those between them. A domain of level i consists of whole domains of level
i-1, and devices are numbered domain by domain. A ring over a group that spans several domains passes each domain once; a domain with g
members runs g rings at once, each through the port of another member, so that a port between domains carries a g-th of the bytes.

The slowest level's time counts, plus the hops: each of the n-1 steps of a ring waits for the previous step. A permutation has one step,
and an all-to-all sends to all members at once. An all-reduce may also go up and down a tree, which is a chain of the devices of a domain
and a binary tree of domains. NCCL takes whichever is faster, and small sums in a protocol with shorter hops and less bandwidth.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jgt.planner.hardware.chip import Chip, Link

_Groups = Sequence[Sequence[int]]


class Level(NamedTuple):
    """The demands of a group on a level of links.

    units: the number of domains of the level below, or of devices at the lowest one. most, fewest: the units in one domain of this level.
    domains: the number of domains of this level.
    """

    units: int
    most: int
    fewest: int
    domains: int


@dataclass(frozen=True, kw_only=True)
class Network:
    """The links between devices. per_host: the devices of a host. hosts: the host of each device, in the mesh's order."""

    chip: Chip
    per_host: int
    hosts: Sequence[int]
    _known: dict[int, tuple[_Groups, frozenset[tuple[Level, ...]]]] = field(
        default_factory=dict[int, tuple[_Groups, frozenset[tuple[Level, ...]]]], repr=False, compare=False
    )

    def seconds(self, groups: _Groups, wire_bytes: int, kind: str = "all-gather") -> float:
        """The time of a collective in which every device sends `wire_bytes`; the slowest group counts. kind: of collective, as XLA's."""
        # A program has few different groups, each of up to thousands of devices. Keeping them alive keeps their ids.
        if id(groups) not in self._known:
            self._known[id(groups)] = groups, frozenset(tuple(self.levels(group)) for group in groups)
        return max((self.seconds_of(levels, wire_bytes, kind) for levels in self._known[id(groups)][1]), default=0.0)

    def seconds_of(self, levels: Sequence[Level], wire_bytes: int, kind: str = "all-gather") -> float:
        """The time of a collective in one group with these levels."""
        slowest = start = ring = tree = low = 0.0
        members, ports = levels[0].units, 1
        for level, link in zip(levels, self.chip.links.values(), strict=True):
            if level.most > 1:
                # In an exchange of all with all, each device sends what leaves the domain below through its own port.
                carried = (members - ports) / (members - 1) if kind in _EXCHANGES else 1 / ports
                slowest = max(slowest, wire_bytes * carried / (link.gbs * 1e9 * link.share))
                hops = (level.units - level.domains) * _ROUNDS.get(kind, 1) if kind in _RINGS else 1
                # Up and down a chain in a domain of devices, and a binary tree of domains.
                depth = 2 * (level.most - 1 if level is levels[0] else level.most.bit_length() - 1)
                start, ring, tree = link.start_us, ring + hops * link.hop_us, tree + depth * link.hop_us
                low += depth * (math.inf if link.low_us is None else link.low_us)
            ports *= level.fewest
        ways = [slowest + ring * 1e-6]
        if kind == "all-reduce" and low < math.inf:
            ways += [slowest / _TREE_SHARE + tree * 1e-6, slowest / _LOW_SHARE + low * 1e-6]
        return min(ways) + start * 1e-6

    def levels(self, group: Sequence[int]) -> Iterator[Level]:
        """The demands of a group of devices on each level of links, from the nearest one outwards."""
        units: Sequence[tuple[int, int]] = [(device, device) for device in sorted(set(group))]
        for link in self.chip.links.values():
            # Each unit is the number of its domain, and a device of it.
            inside = collections.Counter(self._domain(link, device) for _, device in units)
            yield Level(units=len(units), most=max(inside.values()), fewest=min(inside.values()), domains=len(inside))
            units = list({(self._domain(link, device)): (self._domain(link, device), device) for _, device in units}.values())

    def _domain(self, link: Link, device: int) -> int:
        if link.domain == "all":
            return 0
        host = self.hosts[device]
        return host if link.domain == "host" else host // max(link.domain // self.per_host, 1)


_RINGS = "all-gather", "all-reduce", "reduce-scatter"
_EXCHANGES = "all-to-all", "ragged-all-to-all"
_ROUNDS = {"all-reduce": 2}
"""An all-reduce is a reduce-scatter and an all-gather."""
_TREE_SHARE, _LOW_SHARE = 0.92, 0.25
"""The bandwidth of NCCL's trees, and of trees in the low-latency protocol, as shares of a ring's (src/graph/tuning.cc)."""
