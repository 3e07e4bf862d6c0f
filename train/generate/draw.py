"""The next token of each row, drawn from logits.

A draw depends on the request's seed and number, and on the token's position, and on nothing else: not on the mesh, nor on the rows beside
it, nor on when the request began. DrawSettings are arrays [b], so that one program serves requests with different ones.

b rows, v the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_Row = jax.Array | np.ndarray


class DrawSettings(NamedTuple):
    """The settings of each row, [b]: of the draw, the request's seed and number, and whether the row has a request.

    temperature: f32, 0: the likeliest token. top_k: int32, only this many of the likeliest; 0: all. top_p: f32, only the likeliest that
    have this probability together (arXiv 1904.09751). min_p: f32, only those of at least this share of the likeliest one's (arXiv
    2407.01082). penalty: f32, divides positive and multiplies negative logits of tokens that the text has (arXiv 1909.05858).
    """

    temperature: _Row
    top_k: _Row
    top_p: _Row
    min_p: _Row
    penalty: _Row
    seed: _Row
    number: _Row
    is_live: _Row


def draw(logits: jax.Array, used: jax.Array, positions: jax.Array, settings: DrawSettings, known: int) -> tuple[jax.Array, jax.Array]:
    """Tokens int32[b] from logits f32[b, v], and the logarithms of their probabilities f32[b] without any settings.

    used: bool[b, v], the tokens of each text. positions: int32[b], where the tokens will be. known: ids from here on are never drawn, since
    the vocabulary of a model may be larger than its tokenizer's.
    """
    vocab = logits.shape[-1]
    logits = jnp.where(jnp.arange(vocab)[None, :] < known, logits, -jnp.inf)
    penalty = settings.penalty[:, None]
    ranked = jnp.where(used, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    is_warm = settings.temperature > 0
    warm = jnp.where(is_warm, settings.temperature, 1.0)[:, None]
    limits = is_warm & ((settings.top_k > 0) | (settings.top_p < 1) | (settings.min_p > 0))

    def drawn(ranked: jax.Array) -> jax.Array:
        scaled = ranked / warm
        scaled = jax.lax.cond(jnp.any(limits), lambda x: _limited(x, settings), lambda x: x, scaled)
        noise = jax.vmap(_noise, in_axes=(0, 0, 0, None))(settings.seed, settings.number, positions, vocab)
        return jnp.where(is_warm[:, None], scaled + noise, ranked)

    # Argmax of logits with Gumbel's noise is a draw from their softmax.
    chosen = jnp.argmax(jax.lax.cond(jnp.any(is_warm), drawn, lambda x: x, ranked), axis=-1).astype(jnp.int32)
    one = jnp.take_along_axis(logits, chosen[:, None], axis=-1)[:, 0]
    return chosen, one - jax.nn.logsumexp(logits, axis=-1)


def _noise(seed: _Row, number: _Row, position: jax.Array, vocab: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), position)
    return jax.random.gumbel(key, (vocab,))


def _limited(logits: jax.Array, settings: DrawSettings) -> jax.Array:
    """Logits [b, v], of tokens beyond the limits -inf: first top_k, of these top_p, of these min_p."""
    vocab = logits.shape[-1]
    ordered = -jnp.sort(-logits, axis=-1)
    count = jnp.where(settings.top_k > 0, jnp.minimum(settings.top_k, vocab), vocab)[:, None]
    first = jnp.where(jnp.arange(vocab)[None, :] < count, ordered, -jnp.inf)
    shares = jax.nn.softmax(first, axis=-1)
    # A token stays if those before it have less than top_p together, so one always does.
    stays = (jnp.cumsum(shares, axis=-1) - shares < settings.top_p[:, None]) & (first > -jnp.inf)
    last = jnp.maximum(jnp.sum(stays, axis=-1, keepdims=True) - 1, 0)
    least = jnp.take_along_axis(ordered, last, axis=-1)
    least = jnp.maximum(least, ordered[:, :1] + jnp.log(settings.min_p)[:, None])
    return jnp.where(logits >= least, logits, -jnp.inf)
