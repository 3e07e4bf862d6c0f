"""Permutations of rows, written as gathers in both directions.

The derivative of a gather is a scatter, which adds rows one by one because it cannot know that no two of them meet. Here they don't: rows
are permuted, and the inverse permutation is at hand. So both directions are gathers: forward by the one, backward by the other.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp


def sorted_by_expert(choice: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The order of all choices [..., k] by expert [n], the place of each choice in it [n], and the choices of each expert [experts]."""
    flat = choice.reshape(-1).astype(jnp.int32)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    return order, inverse(order), counts_of(flat, num_experts)


def inverse(order: jax.Array) -> jax.Array:
    """The inverse of a permutation [n]."""
    return jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)


def counts_of(flat: jax.Array, num_experts: int) -> jax.Array:
    """The count of each number below `num_experts` in [n]; others do not count."""
    return jnp.zeros((num_experts,), jnp.int32).at[flat].add(1, mode="drop")


def rows_by_expert(x: jax.Array, order: jax.Array, place: jax.Array, num_choices: int) -> jax.Array:
    """A row of x [n, d] for each of its choices, in order: [n · k, d]."""

    @jax.custom_vjp
    def gather(x: jax.Array, order: jax.Array, place: jax.Array) -> jax.Array:
        return x[order // num_choices]

    def forward(x: jax.Array, order: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x[order // num_choices], place

    def backward(place: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None, None]:
        rows = cotangent[place].reshape(-1, num_choices, cotangent.shape[-1])
        return jnp.sum(rows, axis=1, dtype=jnp.float32).astype(cotangent.dtype), None, None

    gather.defvjp(forward, backward)
    return cast(jax.Array, gather(x, order, place))


def results_by_choice(results: jax.Array, order: jax.Array, place: jax.Array) -> jax.Array:
    """The results [n, d] of sorted rows, in the order of the choices."""

    @jax.custom_vjp
    def take(results: jax.Array, order: jax.Array, place: jax.Array) -> jax.Array:
        return results[place]

    def forward(results: jax.Array, order: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
        return results[place], order

    def backward(order: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None, None]:
        return cotangent[order], None, None

    take.defvjp(forward, backward)
    return cast(jax.Array, take(results, order, place))


def weighted_sum(results: jax.Array, scale: Any) -> jax.Array:
    """The sum of results [n, k, d], times scale [n, k], in their type."""
    total = jnp.einsum("nkd,nk->nd", results, scale.astype(results.dtype), preferred_element_type=jnp.float32)
    return total.astype(results.dtype)
