"""Llama (arXiv 2302.13971): RMSNorm, rotary positions, grouped-query attention, SwiGLU. b batch, s seq, d embed, v vocab."""

from __future__ import annotations

from functools import partial

import jax
from flax import nnx

from jgt import signal
from train.models.attention import Kernel, attend_with
from train.models.block import Block
from train.models.config import ModelConfig
from train.models.embedding import Embedding, scores
from train.models.linear import compute_type, linear
from train.models.stack import Remat, scan_layers, stacked
from train.models.weights import out_of


class Llama(nnx.Module):
    """Tokens [b, s] → logits [b, s, v] in f32."""

    def __init__(self, config: ModelConfig, remat: Remat = "none", attention: Kernel = "xla", *, rngs: nnx.Rngs):
        dtype = compute_type(config)
        self.embed = Embedding(config.vocab, config.embed, dtype, name="embedding", rngs=rngs)
        attend = attend_with(attention, recompute=remat == "attention")
        block = partial(Block, config, attend=attend, norm=nnx.RMSNorm, mlp=GatedMLP, use_bias=False, rope=True)
        self.layers = stacked(lambda rngs: block(rngs=rngs), config.layers, rngs)
        self.norm = nnx.RMSNorm(config.embed, epsilon=config.norm_eps, dtype=dtype, rngs=rngs)
        self.head = None if config.is_tied else Embedding(config.vocab, config.embed, dtype, name="unembedding", rngs=rngs)
        self.remat = remat

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x, table = self.features(tokens)
        with signal.context("head"):
            return scores(x, table)

    def features(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What the logits are the product of: normed activations [b, s, d] and a table [v, d]."""
        with signal.context("embed"):
            x = self.embed(tokens)
        with signal.context("layers"):
            x = scan_layers(self.layers, x, self.remat)
        with signal.context("head"):
            return self.norm(x), (self.head or self.embed).table()


class GatedMLP(nnx.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        embed, ffn = config.embed, config.ffn_size
        self.gate_proj = linear(config, embed, ffn, use_bias=False, rngs=rngs)
        self.up_proj = linear(config, embed, ffn, use_bias=False, rngs=rngs)
        self.down = linear(config, ffn, embed, out_of(config.layers), use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(signal.tensor(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x), "hidden"))
