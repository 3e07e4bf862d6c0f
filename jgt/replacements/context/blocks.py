"""Attention of some queries to some keys, with what it takes to put the results for different keys together.

The softmax of a query over all keys needs no array of all scores. A *block* is the attention of some queries to some of the keys: its
output, and the log-sum-exp of its scores. Two blocks of the same queries make one (`merged`), because the weights of each block are off
by one factor that the log-sum-exps know. Backward, a block needs the log-sum-exp of all keys, and then no other block (FlashAttention,
arXiv 2205.14135; Ring Attention, arXiv 2310.01889).

A block that no key is left in has the log-sum-exp `NOTHING` and weights of zero; with minus infinity, its gradients would be NaN.

b batch, c queries, d keys, n query heads, k key/value heads, g query heads of a key/value head, h head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

NOTHING = -1e30


class Block(NamedTuple):
    """An output f32[b, c, n, h] and the log-sum-exp f32[b, n, c] of its scores."""

    out: jax.Array
    lse: jax.Array

    def merged(self, other: Block) -> Block:
        """The attention to the keys of both blocks."""
        top = jnp.maximum(self.lse, other.lse)
        mine, others = (jnp.exp(one.lse - top) for one in (self, other))
        total = mine + others

        def share(weights: jax.Array) -> jax.Array:
            return jnp.swapaxes(weights / total, 1, 2)[..., None]  # [b, n, c] → [b, c, n, 1]

        return Block(share(mine) * self.out + share(others) * other.out, top + jnp.log(total))

    def with_sink(self, sink: jax.Array) -> Block:
        """The attention to one more key, whose scores f32[n] are the same for all queries, and whose value is zero (arXiv 2309.17453)."""
        lse = jnp.logaddexp(self.lse, sink[None, :, None])
        return Block(jnp.swapaxes(jnp.exp(self.lse - lse), 1, 2)[..., None] * self.out, lse)


class KeptRows(NamedTuple):
    """The arrays that the backward pass of a block reads.

    q, out and cotangent [b, c, n, h], k and v [b, d, k, h], and the log-sum-exp f32[b, n, c]; out and lse are those of all keys.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    out: jax.Array
    lse: jax.Array
    cotangent: jax.Array


class BlockGradients(NamedTuple):
    """The gradients of a block: q f32[b, c, n, h], k and v f32[b, d, k, h]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


@dataclass(frozen=True, kw_only=True)
class BlockKernel:
    """How a device computes blocks.

    forward(q, k, v, seen, is_causal, scale) → Block. backward(KeptRows, seen, is_causal, scale) → BlockGradients. seen: bool[b or 1, c, d],
    which keys a query sees; None: all, or with is_causal those up to its own.
    """

    forward: Callable[..., Block]
    backward: Callable[..., BlockGradients]


def _seen(seen: jax.Array | None, is_causal: bool, queries: int, keys: int) -> jax.Array | None:
    """bool[b or 1, 1, 1, c, d], or None if every query sees every key."""
    if seen is None and is_causal:
        seen = jnp.tril(jnp.ones((queries, keys), bool))[None]
    return None if seen is None else seen[:, None, None]


def _grouped(x: jax.Array, heads: int) -> jax.Array:
    """[b, c, n, h] → [b, c, k, g, h]: the query heads of a key/value head are neighbours."""
    return x.reshape(*x.shape[:2], heads, -1, x.shape[-1])


def _scores(q: jax.Array, k: jax.Array, scale: float) -> jax.Array:
    return jnp.einsum("bckgh,bdkh->bkgcd", q, k, preferred_element_type=jnp.float32) * scale


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array | None, is_causal: bool, scale: float) -> Block:
    (b, c, n, _), mask = q.shape, _seen(seen, is_causal, q.shape[1], k.shape[1])
    scores = _scores(_grouped(q, k.shape[2]), k, scale)
    scores = scores if mask is None else jnp.where(mask, scores, NOTHING)
    top = jnp.max(scores, -1, keepdims=True)
    weights = jnp.exp(scores - top)
    weights = weights if mask is None else jnp.where(mask, weights, 0.0)
    total = jnp.sum(weights, -1)
    # Rows that see no key have a total of zero.
    some = total if mask is None else jnp.where(total > 0, total, 1.0)
    out = jnp.einsum("bkgcd,bdkh->bckgh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    lse = top[..., 0] + jnp.log(some)
    return Block((out / jnp.moveaxis(some, 3, 1)[..., None]).reshape(b, c, n, -1), lse.reshape(b, n, c))


def _backward(rows: KeptRows, seen: jax.Array | None, is_causal: bool, scale: float) -> BlockGradients:
    q, k, v, out, lse, cotangent = rows
    (b, c, _, _), heads, mask = q.shape, k.shape[2], _seen(seen, is_causal, q.shape[1], k.shape[1])
    queries, behind = _grouped(q, heads), _grouped(cotangent, heads)
    weights = jnp.exp(_scores(queries, k, scale) - lse.reshape(b, heads, -1, c)[..., None])
    weights = weights if mask is None else jnp.where(mask, weights, 0.0)
    by_weights = jnp.einsum("bckgh,bdkh->bkgcd", behind, v, preferred_element_type=jnp.float32)
    # The sum of weights times their cotangents, which is one number for each query.
    mean = jnp.sum(behind.astype(jnp.float32) * _grouped(out, heads).astype(jnp.float32), -1)
    by_scores = (weights * (by_weights - jnp.moveaxis(mean, 1, 3)[..., None]) * scale).astype(q.dtype)
    return BlockGradients(
        q=jnp.einsum("bkgcd,bdkh->bckgh", by_scores, k, preferred_element_type=jnp.float32).reshape(q.shape),
        k=jnp.einsum("bkgcd,bckgh->bdkh", by_scores, queries, preferred_element_type=jnp.float32),
        v=jnp.einsum("bkgcd,bckgh->bdkh", weights.astype(v.dtype), behind, preferred_element_type=jnp.float32),
    )


XLA_BLOCKS = BlockKernel(forward=_forward, backward=_backward)
