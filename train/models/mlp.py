"""The MLP of a layer, [b, s, d] → [b, s, d] by way of [b, s, ffn]: gated (SwiGLU, arXiv 2002.05202) or not."""

from __future__ import annotations

import jax
from flax import nnx

from jgt import signal

from .config import ModelConfig
from .linear import ACTIVATIONS, adding_init, cheap, gated, linear, read_by


class MLP(nnx.Module):
    """[b, s, d] → [b, s, d]."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        embed, ffn, use_bias = config.embed, config.ffn_size, "mlp" in config.biases
        self.gate_proj = linear(config, embed, ffn, use_bias=use_bias, rngs=rngs) if config.gated else None
        self.up_proj = linear(config, embed, ffn, use_bias=use_bias, rngs=rngs)
        self.down = linear(config, ffn, embed, adding_init(config.layers), use_bias=use_bias, rngs=rngs)
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.gate_proj is None:
            (up,) = read_by(x, self.up_proj)  # [b, s, ffn]
            hidden = cheap(ACTIVATIONS[self.config.activation])(signal.tensor(up, "up"))
        else:
            gate, up = read_by(x, self.gate_proj, self.up_proj)  # [b, s, ffn] each
            hidden = gated(self.config, signal.tensor(gate, "gate"), signal.tensor(up, "up"))
        return self.down(signal.tensor(hidden, "hidden"))
