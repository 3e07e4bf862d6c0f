"""How an exchange served the rows of a step: the rounds that it ran, and the rows that it dropped, from the counts of each row's choices.

The exchange itself has no result but rows. What it does follows from how many rows each device sends to each, and these are sums of counts,
since the rules say which rows are on which device. So the figures are computed beside it, and devices only have to agree on a maximum or a
sum.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jgt.experts.parts import Exchange
from jgt.experts.rooms import room_of
from jgt.experts.whole import capacity_of


def can_count(exchange: Exchange, num_rows: int, num_experts: int) -> bool:
    """Whether the counts of rows of the batch say what each device sends: no other dim of the tokens is split."""
    return not any(exchange.rows[1:]) and num_rows % (exchange.num_parts * exchange.num_devices) == num_experts % exchange.num_devices == 0


def served(exchange: Exchange, counts: jax.Array, num_tokens: int, num_choices: int) -> tuple[jax.Array, jax.Array]:
    """The rounds that an exchange runs, int32[...], and the share of rows that it drops, f32[...].

    counts: int[..., rows, experts], the choices of each expert in each row of the batch. num_tokens: of a row. num_choices: of a token.
    """
    *outer, num_rows, num_experts = counts.shape
    n, num_parts = exchange.num_devices, exchange.num_parts
    assert exchange.axis is not None
    axes, sizes = exchange.rows[0], dict(exchange.sizes)
    split = counts.reshape(*outer, *(sizes[axis] for axis in axes), num_rows // (n * num_parts), num_experts)
    of_device = jnp.moveaxis(jnp.sum(split, axis=-2), len(outer) + axes.index(exchange.axis), len(outer))
    # From each device, in each part of the mesh, to each device.
    pairs = jnp.sum(of_device.reshape(*outer, n, num_parts, n, num_experts // n), axis=-1)
    tokens = num_tokens * num_rows // (n * num_parts)
    if exchange.method == "gather":
        needed, room = jnp.sum(pairs, axis=-3, keepdims=True), capacity_of(tokens, num_choices, n, exchange.room)
    else:
        needed, room = pairs, room_of(tokens, num_choices, n, exchange.room)
    inner = (-3, -2, -1)
    dropped = jnp.sum(jnp.maximum(needed - room, 0), axis=inner) / math.prod((num_tokens, num_rows, num_choices))
    if exchange.drops:
        return jnp.ones(outer, jnp.int32), dropped
    return -(-jnp.max(needed, axis=inner) // room), jnp.zeros(outer, jnp.float32)
