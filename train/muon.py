"""Muon: momentum whose matrices are orthogonalised (kellerjordan.github.io/posts/muon), as an optax transformation.

That of optax.contrib computes on stacks as they are laid out; here whoever knows the layout maps the function over the matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

MapMatrices = Callable[[Callable[[jax.Array], jax.Array], Any], Any]
"""map_matrices(fn, tree): fn over the leaves [..., m, n] of a tree."""

_STEPS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_RMS = 0.2
"""The root mean square of an update, about that of AdamW's (arXiv 2502.16982, section 2.2)."""
_EPS = 1e-8


class MuonState(NamedTuple):
    """Updates done, and the momentum of each matrix."""

    count: Any
    mu: Any


def scale_by_muon(beta: float, dtype: Any, map_matrices: MapMatrices = jax.tree.map) -> optax.GradientTransformation:
    """Gradients [..., m, n] → orthogonal updates whose root mean square is 0.2, from Nesterov's momentum.

    dtype: of the matrices while they are orthogonalised; the momentum has the parameters' own.
    """

    def init(params: Any) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        ahead = jax.tree.map(
            lambda m, g: (beta * m + (1 - beta) * g).astype(dtype),
            optax.tree.bias_correction(mu, beta, optax.safe_increment(count)),
            optax.tree.bias_correction(updates, beta, count),
        )
        orthogonal = map_matrices(orthogonalize, ahead)
        updates = jax.tree.map(lambda o, g: o.astype(g.dtype) * (_RMS * math.sqrt(max(g.shape[-2:]))), orthogonal, updates)
        return updates, MuonState(count, mu)

    return optax.GradientTransformation(init, update)


def orthogonalize(x: jax.Array) -> jax.Array:
    """Matrices [..., m, n] with their singular values brought near 1, to 0.7 ... 1.2, by five Newton-Schulz steps; zero stays zero."""
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    norm = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(-2, -1), keepdims=True))
    x = (x / (norm + _EPS)).astype(x.dtype)
    a, b, c = _COEFFICIENTS
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if is_tall else x
