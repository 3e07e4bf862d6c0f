"""Tokens that travel to all devices of an axis, each of which runs its own experts on what is theirs.

Where a row goes through many experts, nearly every device needs it. An all-gather of the tokens then sends less than an all-to-all of a row
for each choice: the n devices send (n - 1) · T rows each, and not (n - 1) / n · room · T · k. The results of a device are sums over its own
experts, and a reduce-scatter adds these up where the tokens came from.

The rows of a device may be more than their mean, which is T · k. As many rounds follow as it needs. They send nothing, so devices need not
agree on their number.

With one device, or without an axis, nothing is gathered, and one round has all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp

from jgt.experts.rooms import aligned
from jgt.experts.rows import counted, inverse


def room_of_device(num_tokens: int, num_choices: int, num_devices: int, room: float) -> int:
    """The rows that each device has room for, from this many tokens of each device."""
    return min(aligned(room * num_tokens * num_choices), num_devices * num_tokens * num_choices)


@dataclass(frozen=True, kw_only=True)
class WholeTokens:
    """The tokens of all devices on each of them, which runs its own experts on what is theirs; the results are added up by scattering.

    order: the choices of all tokens by expert, those of other devices last. place: of each choice in it. sizes: of this device's experts.
    """

    axis: str | None
    capacity: int
    drops: bool
    num_choices: int
    order: jax.Array
    place: jax.Array
    sizes: jax.Array

    @classmethod
    def of(cls, choice: jax.Array, num_local: int, axis: str | None, room: float, *, drops: bool) -> WholeTokens:
        """For choices [T, k] and this many experts on each device. axis: None if each device has all experts."""
        num_tokens, num_choices = choice.shape
        flat = _whole(choice, axis).reshape(-1).astype(jnp.int32)
        first = 0 if axis is None else jax.lax.axis_index(axis) * num_local
        local = jnp.where((flat >= first) & (flat < first + num_local), flat - first, num_local)
        order = jnp.argsort(local, stable=True).astype(jnp.int32)
        capacity = flat.size if axis is None else room_of_device(num_tokens, num_choices, jax.lax.axis_size(axis), room)
        sizes = counted(local, num_local)
        return cls(axis=axis, capacity=capacity, drops=drops, num_choices=num_choices, order=order, place=inverse(order), sizes=sizes)

    @property
    def rounds(self) -> jax.Array:
        """See `Traffic`. No round sends anything, so devices need not agree."""
        return -(-jnp.sum(self.sizes) // self.capacity)

    @property
    def max_rounds(self) -> int:
        """See `Traffic`."""
        return 1 if self.drops else -(-self.order.size // self.capacity)

    def start(self, number: Any) -> WholeRound:
        """See `Traffic`."""
        ends = jnp.clip(jnp.cumsum(self.sizes) - number * self.capacity, 0, self.capacity)
        sizes = ends - jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
        return WholeRound(tokens=self, number=number, sizes=sizes)

    def brought(self, x: jax.Array) -> jax.Array:
        """See `Traffic`."""
        return _whole(x, self.axis)

    def finish(self, sums: Sequence[jax.Array]) -> list[jax.Array]:
        """See `Traffic`."""
        if self.axis is None:
            return list(sums)
        return [cast(jax.Array, jax.lax.psum_scatter(x, self.axis, scatter_dimension=0, tiled=True)) for x in sums]


@dataclass(frozen=True, kw_only=True)
class WholeRound:
    """One round of `WholeTokens`."""

    tokens: WholeTokens
    number: Any
    sizes: jax.Array

    def to_experts(self, x: jax.Array, *, by_choice: bool = False) -> jax.Array:
        """See `Round`."""
        g = self.tokens
        slot = self.number * g.capacity + jnp.arange(g.capacity)
        choice = g.order[jnp.minimum(slot, g.order.size - 1)]
        rows = x.reshape(-1)[choice] if by_choice else x[choice // g.num_choices]
        return jnp.where((slot < jnp.sum(g.sizes)).reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)

    def to_tokens(self, rows: jax.Array) -> jax.Array:
        """See `Round`."""
        g = self.tokens
        slot = g.place - self.number * g.capacity
        is_here = (slot >= 0) & (slot < g.capacity) & (g.place < jnp.sum(g.sizes))
        found = rows[jnp.where(is_here, slot, 0)]
        return jnp.where(is_here.reshape(-1, *[1] * (rows.ndim - 1)), found, 0).reshape(-1, g.num_choices, *rows.shape[1:])


def _whole(x: jax.Array, axis: str | None) -> jax.Array:
    return x if axis is None else cast(jax.Array, jax.lax.all_gather(x, axis, axis=0, tiled=True))
