"""GPT-2: LayerNorm, learned positions, GELU, biases, one table that embeds and scores."""

from __future__ import annotations

import jax
from flax import nnx

from jgt import signal

from .config import ModelConfig
from .decoder import Block, Decoder
from .linear import adding_init, cheap, linear, read_by


class MLP(nnx.Module):
    """Up, GELU, down: [b, s, d] → [b, s, d] by way of [b, s, ffn]."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        embed, ffn = config.embed, config.ffn_size
        self.up_proj = linear(config, embed, ffn, use_bias=True, rngs=rngs)
        self.down = linear(config, ffn, embed, adding_init(config.layers), use_bias=True, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        (up,) = read_by(x, self.up_proj)  # [b, s, ffn]
        up = signal.tensor(up, "up")
        return self.down(signal.tensor(cheap(jax.nn.gelu)(up), "hidden"))


class GPT(Decoder):
    """Tokens [b, s] → logits [b, s, v] in f32."""

    make_block = Block
    make_norm = nnx.LayerNorm
    make_mlp = MLP
    use_bias = True
