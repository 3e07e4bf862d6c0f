"""Llama (arXiv 2302.13971): RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases."""

from __future__ import annotations

import jax
from flax import nnx

from jgt import signal

from .config import ModelConfig
from .decoder import Block, Decoder
from .linear import adding_init, gated, linear, read_by


class GatedMLP(nnx.Module):
    """SwiGLU (arXiv 2002.05202), [b, s, d] → [b, s, d] by way of [b, s, ffn]."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        embed, ffn = config.embed, config.ffn_size
        self.gate_proj = linear(config, embed, ffn, use_bias=False, rngs=rngs)
        self.up_proj = linear(config, embed, ffn, use_bias=False, rngs=rngs)
        self.down = linear(config, ffn, embed, adding_init(config.layers), use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = read_by(x, self.gate_proj, self.up_proj)  # [b, s, ffn] each
        gate, up = signal.tensor(gate, "gate"), signal.tensor(up, "up")
        return self.down(signal.tensor(gated(gate, up), "hidden"))


class Llama(Decoder):
    """Tokens [b, s] → logits [b, s, v] in f32."""

    make_block = Block
    make_norm = nnx.RMSNorm
    make_mlp = GatedMLP
    use_bias = False
