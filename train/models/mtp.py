"""A layer behind the last one, which predicts the second next token (multi-token prediction, arXiv 2412.19437, section 2.2).

    x_2 = norm(block(W [norm(e), norm(x)]))

x is the stream behind the layers, and e the embedding of the next token. The head that scores x scores x_2 too. It is trained with the
model, and used for nothing else.

b batch, s seq, d embed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jgt import signal

from .config import ModelConfig
from .experts.balance import Routed
from .linear import cheap, linear, make_norm
from .tokens import LayerFlags, Rows

Both = tuple[jax.Array, jax.Array]


class SecondToken(nnx.Module):
    """The stream and the embeddings of next tokens, both [b, s, d] → x_2 [b, s, d] and the embeddings, and what a block returns."""

    def __init__(self, config: ModelConfig, block: Any, *, rngs: nnx.Rngs):
        self.stream_norm, self.token_norm, self.last_norm = (make_norm(config, config.embed, rngs) for _ in range(3))
        self.join = linear(config, 2 * config.embed, config.embed, use_bias=False, rngs=rngs)
        self.block = block

    def __call__(self, x: Both, rows: Rows, flags: LayerFlags, cache: Any) -> tuple[Both, Routed | None, Any]:
        stream, following = x
        with signal.context("mtp"):
            both = jnp.concatenate([cheap(self.token_norm)(following), cheap(self.stream_norm)(stream)], axis=-1)
            stream = signal.tensor(self.join(signal.tensor(both, "operand")), "out")
        stream, sums, kept = self.block(stream, rows, flags, cache)
        with signal.context("mtp"):
            return (cheap(self.last_norm)(stream), following), sums, kept
