"""Causal attention in XLA's own operations, which keeps one array of scores for its backward pass.

The scores [b, n, s, s] are the largest array of a layer. `jax.nn.dot_product_attention` keeps four of that shape: the mask, the scores
with the mask, their exponentials, and the probabilities in the type of the values. The last one suffices. With p = softmax(x) and the
cotangent g of p, the cotangent of x is p · (g − Σ g · p), which is zero where p is: so neither the scores nor the mask are read again.

In bf16 the derivative of the softmax reads the probabilities as the values' matmul has them, rounded to bf16. Its sums are in f32.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


def attend(q: jax.Array, k: jax.Array, v: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
    """q [b, s, n, h], k and v [b, s, k, h], mask bool [b, 1, s, s] or None → [b, s, n, h]. Scores and softmax are in f32."""
    (b, s, _, h), heads = q.shape, k.shape[2]
    # [b, s, n, h] → [b, s, k, g, h]: the query heads of a key/value head are neighbours.
    groups = q.reshape(b, s, heads, -1, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", groups, k, preferred_element_type=jnp.float32) * h**-0.5
    is_seen = jnp.tril(jnp.ones((s, s), bool))[None, None, None]
    # [b, 1, s, s] → [b, 1, 1, s, s]
    is_seen = is_seen if mask is None else is_seen & mask[:, :, None]
    return jnp.einsum("bkgts,bskh->btkgh", _probabilities(scores, is_seen, v.dtype), v).reshape(q.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _probabilities(scores: jax.Array, is_seen: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The softmax over the last dim of those scores [b, k, g, s, s] that a query sees, in `dtype`."""
    seen = jnp.where(is_seen, scores, jnp.finfo(scores.dtype).min)
    return jnp.asarray(jax.nn.softmax(seen, axis=-1), dtype)


def _forward(scores: jax.Array, is_seen: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    p = jnp.asarray(_probabilities(scores, is_seen, dtype))
    return p, p


def _backward(dtype: jnp.dtype, p: jax.Array, g: jax.Array) -> tuple[jax.Array, None]:
    p, g = p.astype(jnp.float32), g.astype(jnp.float32)
    return p * (g - jnp.sum(g * p, axis=-1, keepdims=True)), None


_probabilities.defvjp(_forward, _backward)
