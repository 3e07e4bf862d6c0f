"""Tokens in, logits out. b batch, s seq, d embed, v vocab."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jgt import signal
from train.models.weights import TABLE


class Embedding(nnx.Module):
    """A table [v, d] that embeds tokens [b, s] → [b, s, d], or scores them."""

    def __init__(self, vocab: int, embed: int, dtype: jnp.dtype, *, name: str, rngs: nnx.Rngs):
        setattr(self, name, nnx.Param(TABLE(rngs.params(), (vocab, embed), jnp.float32)))
        self.name = name
        self.dtype = dtype

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.table()[tokens]

    def table(self) -> jax.Array:
        """The table as matmuls read it."""
        return signal.tensor(jnp.asarray(getattr(self, self.name)[...], self.dtype), "table")


def scores(x: jax.Array, table: jax.Array) -> jax.Array:
    """Logits [b, s, v] of every token at every position, f32, from features [b, s, d]."""
    return signal.tensor(jnp.einsum("bsd,vd->bsv", x, table, preferred_element_type=jnp.float32), "logits")
