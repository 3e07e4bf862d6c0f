# pyright: basic
"""How a sequence is split over an axis: which device has which rows, in the batch and while attention is computed.

In plain order, device i of n has the i-th of n parts. In zigzag order it has the parts i and 2n-1-i of 2n, so that under a causal mask all
devices have equal work. The rows of a batch may be in either order, whichever devices compute in. Where the two differ, `exchanged` sends
each half of a device's rows to the device that computes with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jgt.program.dims import Dims
from jgt.replacements.context.blocks import BlockKernel
from jgt.replacements.context.proof import Attention
from jgt.rules.signals import Method


@dataclass(frozen=True, kw_only=True)
class SequenceSplit:
    """How a sequence is split, and how attention to it is computed.

    num: the number of devices of the axis. batch, heads: the mesh axes of these dims. is_zigzag: whether devices compute in zigzag order.
    is_exchanged: whether they do although the rows of the batch are in plain order.
    """

    attention: Attention
    method: Method
    axis: str
    num: int
    batch: tuple[str, ...]
    heads: tuple[str, ...]
    is_zigzag: bool
    is_exchanged: bool
    kernel: BlockKernel

    @property
    def rows(self) -> Dims:
        """The axes of q, k and v."""
        return (self.batch, (self.axis,), self.heads, ())

    @property
    def kept(self) -> Dims:
        """The axes of what the backward pass reads."""
        return (self.batch, (), (*self.heads, self.axis), ()) if self.method == "ulysses" else self.rows

    @property
    def lse(self) -> Dims:
        """The axes of the log-sum-exp [b, n, s]."""
        batch, rows, heads, _ = self.kept
        return (batch, heads, rows)

    @property
    def inside(self) -> int:
        """The number of devices in whose zigzag order devices compute; 1 for plain order."""
        return self.num if self.is_zigzag else 1

    @property
    def outside(self) -> int:
        """The number of devices in whose zigzag order the rows of the batch are; 1 for plain order."""
        return 1 if self.is_exchanged else self.inside

    @property
    def has_own_order(self) -> bool:
        """Whether the backward pass reads q, k, v and out as they are not outside."""
        return self.is_exchanged or self.method == "ulysses"

    def operands(self) -> list[Dims]:
        """The axes of what the pairs of queries and keys need."""
        of = {"batch": self.batch}
        found: list[Dims] = []
        for one in self.attention.pairs.operands:
            found.append(tuple((self.axis,) if dim == one.rows else of.get(label or "", ()) for dim, label in enumerate(one.labels)))
        return found

    def in_order(self, others: Sequence[jax.Array]) -> list[jax.Array]:
        """The operands of the pairs for the whole sequence, in its own order."""
        operands = self.attention.pairs.operands
        return [x if one.rows is None else zigzag(x, self.outside, one.rows, is_back=True) for x, one in zip(others, operands, strict=True)]

    def axes(self) -> frozenset[str]:
        """All mesh axes."""
        return frozenset((*self.batch, self.axis, *self.heads))


def exchanged(x: jax.Array, axis: str, dim: int, *, is_back: bool = False) -> jax.Array:
    """The parts 2i and 2i+1 of device i for the parts i and 2n-1-i, or with `is_back` the other way round."""
    n, is_even = jax.lax.axis_size(axis), jax.lax.axis_index(axis) % 2 == 0
    ways = [[(i, part if part < n else 2 * n - 1 - part) for i, part in enumerate(range(first, 2 * n, 2))] for first in (0, 1)]
    if is_back:
        ways = [[(to, of) for of, to in way] for way in ways]
    halves = jnp.split(x, 2, dim)
    swapped = halves[::-1]
    # A device of an even number has its low part from an even part, one of an odd number from an odd part.
    if is_back:
        halves = [jnp.where(is_even, *pair) for pair in ((halves[0], swapped[0]), (halves[1], swapped[1]))]
    halves = [jax.lax.ppermute(half, axis, way) for half, way in zip(halves, ways, strict=True)]
    if not is_back:
        halves = [jnp.where(is_even, halves[0], halves[1]), jnp.where(is_even, halves[1], halves[0])]
    return jax.lax.concatenate(halves, dim)


def zigzag(x: jax.Array, n: int, dim: int, *, is_back: bool = False) -> jax.Array:
    """A whole sequence in zigzag order over n devices, or with `is_back` in its own again; over one device they are the same."""
    if n == 1:
        return x
    parts, order = jnp.split(x, 2 * n, dim), [part for i in range(n) for part in (i, 2 * n - 1 - i)]
    return jax.lax.concatenate([parts[order.index(part) if is_back else order[part]] for part in range(2 * n)], dim)
