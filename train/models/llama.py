"""Llama (arXiv 2302.13971): RMSNorm, rotary positions, grouped-query attention, SwiGLU. b batch, s seq, d embed, v vocab."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jgt import signal
from train.models.block import Block
from train.models.config import ModelConfig
from train.models.embedding import Embedding
from train.models.stack import Remat, scan_layers, stacked
from train.models.weights import INTO, out_of


class Llama(nnx.Module):
    """Tokens [b, s] → logits [b, s, v] in f32."""

    def __init__(self, config: ModelConfig, remat: Remat = "none", *, rngs: nnx.Rngs):
        dtype = jnp.bfloat16 if config.dtype == "bf16" else jnp.float32
        self.embed = Embedding(config.vocab, config.embed, dtype, name="embedding", rngs=rngs)
        block = partial(Block, config, dtype, norm=nnx.RMSNorm, mlp=GatedMLP, use_bias=False, rope=True)
        self.layers = stacked(lambda rngs: block(rngs=rngs), config.layers, rngs)
        self.norm = nnx.RMSNorm(config.embed, epsilon=config.norm_eps, dtype=dtype, rngs=rngs)
        self.head = None if config.is_tied else Embedding(config.vocab, config.embed, dtype, name="unembedding", rngs=rngs)
        self.remat = remat

    def __call__(self, tokens: jax.Array) -> jax.Array:
        with signal.context("embed"):
            x = self.embed(tokens)
        with signal.context("layers"):
            x = scan_layers(self.layers, x, self.remat)
        with signal.context("head"):
            return (self.head or self.embed).logits(self.norm(x))


class GatedMLP(nnx.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, *, rngs: nnx.Rngs):
        embed, ffn = config.embed, config.ffn_size
        self.gate_proj = nnx.Linear(embed, ffn, use_bias=False, dtype=dtype, kernel_init=INTO, rngs=rngs)
        self.up_proj = nnx.Linear(embed, ffn, use_bias=False, dtype=dtype, kernel_init=INTO, rngs=rngs)
        self.down = nnx.Linear(ffn, embed, use_bias=False, dtype=dtype, kernel_init=out_of(config.layers), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(signal.tensor(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x), "hidden"))
