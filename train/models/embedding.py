"""Tokens in, logits out. b batch, s seq, d embed, v vocab."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jgt import signal
from train.models.weights import TABLE


class Embedding(nnx.Module):
    """A table [v, d] that embeds tokens [b, s] → [b, s, d] or turns activations into logits [b, s, v]."""

    def __init__(self, vocab: int, embed: int, dtype: jnp.dtype, *, name: str, rngs: nnx.Rngs):
        setattr(self, name, nnx.Param(TABLE(rngs.params(), (vocab, embed), jnp.float32)))
        self.name = name
        self.dtype = dtype

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self._table()[tokens]

    def logits(self, x: jax.Array) -> jax.Array:
        """Scores of every token at every position, f32."""
        logits = jnp.einsum("bsd,vd->bsv", x, self._table(), preferred_element_type=jnp.float32)
        return signal.tensor(logits, "logits")

    def _table(self) -> jax.Array:
        return signal.tensor(jnp.asarray(getattr(self, self.name)[...], self.dtype), "table")
