"""How long a collective takes on a target's links."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from dataclasses import dataclass

from jgt.plan.chip import Target
from jgt.plan.groups import Groups


@dataclass(frozen=True, kw_only=True)
class Network:
    """Hosts with fast links inside and a port for each GPU between them. hosts: the host of each device of the mesh."""

    target: Target
    hosts: Sequence[int]

    def seconds(self, groups: Groups, wire_bytes: int) -> float:
        """A ring over the slowest group: every device sends `wire_bytes` on its fast link, and hosts share what goes between them.

        Rings of a host with g members enter and leave it by g ports at once, so one port carries a g-th.
        """
        # How many members each host has, of each group.
        shapes = {tuple(sorted(collections.Counter(self.hosts[d] for d in group).values())) for group in groups}
        return max((self._of_group(members, wire_bytes) for members in shapes), default=0.0)

    def _of_group(self, members: tuple[int, ...], wire_bytes: int) -> float:
        chip, share = self.target.chip, self.target.chip.efficiency.link
        inside = wire_bytes / (chip.nvlink_gbs * 1e9 * share) if max(members) > 1 else 0.0
        if len(members) == 1:
            return inside + chip.latency_us.nvlink * 1e-6
        between = wire_bytes / (members[0] * chip.nic_gbs * 1e9 * share)
        return max(inside, between) + chip.latency_us.nic * 1e-6 * math.ceil(math.log2(len(members)))
