"""The seconds that kernels take on a chip, by their FLOPs, bytes and shapes.

No kernel reaches the peaks of a data sheet. A large matmul reaches the `share` of them that the chip's power and its pipelines allow; a
small one leaves cores without a tile of the result, and a shallow one spends its time on starts and ends of tiles. All of these are
saturating: at the size `half` a kernel has half of the rate that a large one has, so that

    rate = peak * share * clock * m/(m + edge) * n/(n + edge) * k/(k + depth) * batch*m*n/(batch*m*n + area)

Attention has other shares, by direction, head size and length. Whatever else a step runs is limited by memory, with a time for each launch.
Near the limit, power grows with more than the square of the clock, so under a lower limit the clock goes with its square root.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from jgt.document import Bound

Amount = Annotated[float, Bound(low=0)]
Share = Annotated[float, Bound(above=0, high=1)]


class AttentionWork(NamedTuple):
    """A kernel of fused attention. flops: the FLOPs that it executes; keys: the length that its queries see; head: the size of a head."""

    flops: int
    keys: int
    head: int
    is_backward: bool


class MatmulWork(NamedTuple):
    """A matrix product: [batch, m, k] times [batch, k, n], whose operands have this element type."""

    dtype: str
    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """2 for each multiply-add."""
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True, kw_only=True)
class MatmulRate:
    """share: the share of the peak that large matmuls reach. edge, depth, area: m and n, k, and the result's size at half of the rate."""

    share: Share
    edge: Amount = 0.0
    depth: Amount = 0.0
    area: Amount = 0.0

    def of(self, work: MatmulWork) -> float:
        """The share of the peak that a matmul reaches."""
        area = work.batch * work.m * work.n
        edges = work.m / (work.m + self.edge) * work.n / (work.n + self.edge)
        return self.share * edges * work.k / (work.k + self.depth) * area / (area + self.area)


@dataclass(frozen=True, kw_only=True)
class AttentionRate:
    """Shares of the peak in bf16, for large heads and long sequences. head, length: the sizes at half of the rate."""

    forward: Share
    backward: Share
    head: Amount = 0.0
    length: Amount = 0.0

    def of(self, work: AttentionWork) -> float:
        """The share of the peak that a kernel reaches."""
        share = self.backward if work.is_backward else self.forward
        return share * work.head / (work.head + self.head) * work.keys / (work.keys + self.length)


@dataclass(frozen=True, kw_only=True)
class MemoryRate:
    """share: the share of the bandwidth that large transfers reach. half_mb: the size at half of the rate."""

    share: Share
    half_mb: Amount = 0.0

    def seconds(self, num_bytes: int, peak: float) -> float:
        """The time of a transfer at this share of a peak in bytes/s."""
        return (num_bytes + self.half_mb * 1e6 * (num_bytes > 0)) / (peak * self.share)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The shares of its peaks that a chip reaches, by the kind and the size of the work.

    matmul: the rates by element type: bf16, f8, tf32. Types without a rate have bf16's. launch_us: microseconds from the end of a kernel
    to the start of the next one. beside: the factor by which a kernel takes longer beside a collective, which needs cores and memory too.
    """

    matmul: dict[str, MatmulRate]
    attention: AttentionRate
    memory: MemoryRate
    launch_us: Amount
    beside: Annotated[float, Bound(low=1)] = 1.0
