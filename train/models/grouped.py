"""The matmul of experts: rows that are sorted by expert, each group of them by the matrix of its expert."""

from __future__ import annotations

import jax


def grouped(rows: jax.Array, sizes: jax.Array, weights: jax.Array) -> jax.Array:
    """Rows [n, k] by weights [experts, k, m] → [n, m]. sizes [experts]: how many rows each expert has, in their order."""
    return jax.lax.ragged_dot(rows, weights, sizes)
