"""Tables of a row for each token: they embed tokens at the beginning of a model, and score them at its end.

b batch, s seq, d embed, v vocab.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jgt import signal

from .model import Table

TABLE_INIT = nnx.initializers.variance_scaling(1.0, "fan_out", "normal")
"""For a table [rows, embed]: rows start with a length of about 1."""
_TILE = 64


class Embedding(nnx.Module):
    """A table [v, d] that embeds tokens, [b, s] → [b, s, d], or that scores them (`scores`).

    name: the name of the parameter, so that rules tell the table of the input from the table of the output.
    """

    def __init__(self, vocab: int, embed: int, dtype: jnp.dtype, *, name: str, rngs: nnx.Rngs):
        setattr(self, name, Table(TABLE_INIT(rngs.params(), (vocab, embed), jnp.float32)))
        self.name = name
        self.dtype = dtype

    def __call__(self, tokens: jax.Array) -> jax.Array:
        if tokens.size == 1:
            # XLA makes a slice of a lookup of one row, for which it would gather a table that devices split.
            return self.table()[jnp.repeat(tokens, 2, axis=1)][:, :1]
        return self.table()[tokens]

    def table(self) -> jax.Array:
        """The table [v, d] in the type of matmuls."""
        return signal.tensor(jnp.asarray(getattr(self, self.name)[...], self.dtype), "table")


def with_bias(x: jax.Array, table: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The factors of logits to which a bias [v] is added: one more feature, which is 1, and zeros, as matmuls of odd sizes are slow."""
    ones, rest = jnp.ones((*x.shape[:-1], 1), x.dtype), [(0, 0), (0, _TILE - 1)]
    x = jnp.concatenate([x, jnp.pad(ones, [(0, 0), *rest])], axis=-1)
    return x, jnp.concatenate([table, jnp.pad(bias[:, None].astype(table.dtype), rest)], axis=-1)


def scores(x: jax.Array, table: jax.Array, softcap: float | None = None) -> jax.Array:
    """Logits [b, s, v] in f32 of every token at every position, from features [b, s, d] and a table [v, d]. softcap: their limit."""
    # Sums of products are f32 even of bf16 factors: the loss takes their exponential, which would magnify a rounding.
    logits = signal.tensor(jnp.einsum("bsd,vd->bsv", x, table, preferred_element_type=jnp.float32), "logits")
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)
