"""Muon: momentum whose matrices are orthogonalised (kellerjordan.github.io/posts/muon), as an optax transformation.

AdamW scales each element of a gradient by its own history. Muon instead takes the momentum of a whole matrix and replaces it by the
nearest matrix whose singular values are all equal, so that rare directions move as far as frequent ones. Five Newton-Schulz steps, which
are matmuls alone, come close enough to that matrix.

They need whole matrices. optax.contrib has a Muon too, which leaves sharded matrices to XLA's partitioner; on sharded layers that sends
many times the bytes. Here the caller, who knows the layout, passes a function that maps over the matrices (`Placement.map_matrices`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jgt import path_text

from .state import Tree

MapMatrices = Callable[[Callable[[jax.Array], jax.Array], Tree], Tree]
"""map_matrices(fn, tree): fn over the leaves [..., m, n] of a tree."""

_STEPS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Muon's author chose them: they raise small singular values fastest, at the price of ending between 0.7 and 1.2 instead of at 1."""
_RMS = 0.2
"""The root mean square of an update, about that of AdamW's (arXiv 2502.16982, section 2.2), so that both share one learning rate."""
_EPS = 1e-8


class MuonState(NamedTuple):
    """The number of updates so far, and the momentum of each matrix."""

    count: Any
    mu: Tree


def scale_by_muon(
    beta: float, dtype: jax.typing.DTypeLike, map_matrices: MapMatrices = jax.tree.map, sizes: Mapping[str, Sequence[int]] | None = None
) -> optax.GradientTransformation:
    """Gradients [..., m, n] → orthogonalised updates with a root mean square of 0.2, from Nesterov's momentum.

    dtype: the type in which matrices are orthogonalised; the momentum has the parameters' type. sizes: m and n of matrices that are padded
    with zeros, by path. Padding changes no singular value, and so only the root mean square.
    """

    def init(params: Tree) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Tree, state: Any, params: Tree | None = None) -> tuple[Tree, MuonState]:
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        # Nesterov: the momentum as it will be after one more step with the same gradient.
        ahead = jax.tree.map(
            lambda m, g: (beta * m + (1 - beta) * g).astype(dtype),
            optax.tree.bias_correction(mu, beta, optax.safe_increment(count)),
            optax.tree.bias_correction(updates, beta, count),
        )
        orthogonal = map_matrices(orthogonalize, ahead)
        # An orthogonal [m, n] has a root mean square of 1 / sqrt(max(m, n)).
        updates = jax.tree.map_with_path(scaled, orthogonal, updates)
        return updates, MuonState(count, mu)

    def scaled(path: jax.tree_util.KeyPath, orthogonal: jax.Array, like: jax.Array) -> jax.Array:
        size = (sizes or {}).get(path_text(path), like.shape[-2:])
        return orthogonal.astype(like.dtype) * (_RMS * math.sqrt(max(size)))

    return optax.GradientTransformation(init, update)


def orthogonalize(x: jax.Array) -> jax.Array:
    """Matrices [..., m, n] with their singular values brought to about 1 (0.7 to 1.2); a matrix of zeros stays zero."""
    # The Gram matrix has the rows' size: transposing a tall matrix makes it the smaller one.
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    # The iteration converges for singular values up to 1, which the Frobenius norm bounds from above.
    norm = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(-2, -1), keepdims=True))
    x = (x / (norm + _EPS)).astype(x.dtype)
    a, b, c = _COEFFICIENTS
    for _ in range(_STEPS):
        # [..., m, n] · [..., n, m] → [..., m, m]
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if is_tall else x
