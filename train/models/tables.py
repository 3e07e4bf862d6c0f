"""The gradients of tables, as sums over devices of which each gets its part alone.

A table [v, d] is looked up and scored at every position, so each device has a gradient of the whole table from its own rows, and devices
add theirs up. Where the table is split over some of the axes that split the batch, a device needs its part of that sum alone: half of
the bytes. XLA sends that little where it sums over just the axes that split the result. Over more axes at once (`batch: [data, fsdp]`,
a table split over fsdp) it gives every device the whole sum, of which each then takes its part.

So the devices' gradients stay apart as a dim of the array, [groups, v, d], and are added up one axis after the other. The last axis
comes first: rules name the axes that split parameters last, and after such an axis less is left to send over the others.

b batch, s seq, d embed, v vocab, g groups: devices that split the batch.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp

Groups = tuple[int, ...]
"""Over how many devices each of its axes splits the batch, without axes of one device."""


def groups_of(groups: Groups, rows: int) -> Groups:
    """The groups of a batch of so many rows: none if they do not divide it, as in a call with a single row."""
    return groups if rows % math.prod(groups) == 0 else ()


def by_group(x: jax.Array, groups: Groups) -> jax.Array:
    """[b, ...] → [g, b / g, ...]."""
    return x.reshape(math.prod(groups), -1, *x.shape[1:])


def sum_of_groups(x: jax.Array, groups: Groups) -> jax.Array:
    """[g, ...] → [...], in the type of x, in which it also travels."""
    rank = x.ndim - 1
    x = x.reshape(*groups or (1,), *x.shape[1:])
    for last in reversed(range(x.ndim - rank)):
        # Not by jnp.sum, which would widen bf16 to f32.
        x = jax.lax.reduce(x, x.dtype.type(0), jax.lax.add, (last,))
        # Or XLA would make one sum of all.
        x = jax.lax.optimization_barrier(x) if last else x
    return x


def lookup(table: jax.Array, tokens: jax.Array, groups: Groups = (), *, wide: bool = False) -> jax.Array:
    """Rows [b, s, d] of a table [v, d]. wide: devices add up the table's gradient in f32."""
    groups = groups_of(groups, len(tokens))
    # JAX's own derivative is the same sum, over all axes at once.
    return _lookup(groups, wide, table, tokens) if wide or len(groups) > 1 else table[tokens]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _lookup(groups: Groups, wide: bool, table: jax.Array, tokens: jax.Array) -> jax.Array:
    del groups, wide
    return table[tokens]


def _forward(groups: Groups, wide: bool, table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    del groups, wide
    return table[tokens], (table, tokens)


def _backward(groups: Groups, wide: bool, residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, None]:
    table, tokens = residuals
    zero = jnp.zeros(table.shape, jnp.float32 if wide else cotangent.dtype)

    def added(tokens: jax.Array, cotangent: jax.Array) -> jax.Array:
        return zero.at[tokens].add(cotangent.astype(zero.dtype))

    if len(groups) < 2:
        return added(tokens, cotangent).astype(table.dtype), None
    found = jax.vmap(added)(by_group(tokens, groups), by_group(cotangent, groups))  # [g, v, d]
    return sum_of_groups(found, groups).astype(table.dtype), None


_lookup.defvjp(_forward, _backward)
