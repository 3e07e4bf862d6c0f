"""GPT-2: LayerNorm, learned positions, GELU, tied embedding. b batch, s seq, d embed, v vocab."""

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
from train.models.weights import INTO, TABLE, out_of


class GPT(nnx.Module):
    """Tokens [b, s] → logits [b, s, v] in f32."""

    def __init__(self, config: ModelConfig, remat: Remat = "none", *, rngs: nnx.Rngs):
        dtype = jnp.bfloat16 if config.dtype == "bf16" else jnp.float32
        self.embed = Embedding(config.vocab, config.embed, dtype, name="embedding", rngs=rngs)
        self.positions = nnx.Param(TABLE(rngs.params(), (config.seq, config.embed), jnp.float32))
        block = partial(Block, config, dtype, norm=nnx.LayerNorm, mlp=MLP, use_bias=True, rope=False)
        self.layers = stacked(lambda rngs: block(rngs=rngs), config.layers, rngs)
        self.norm = nnx.LayerNorm(config.embed, epsilon=config.norm_eps, dtype=dtype, rngs=rngs)
        self.remat = remat

    def __call__(self, tokens: jax.Array) -> jax.Array:
        with signal.context("embed"):
            x = self.embed(tokens)
            x = x + self.positions[...][None, : tokens.shape[1]].astype(x.dtype)
        with signal.context("layers"):
            x = scan_layers(self.layers, x, self.remat)
        with signal.context("head"):
            return self.embed.logits(self.norm(x))


class MLP(nnx.Module):
    """Up, GELU, down."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, *, rngs: nnx.Rngs):
        embed, ffn = config.embed, config.ffn_size
        self.up_proj = nnx.Linear(embed, ffn, dtype=dtype, kernel_init=INTO, rngs=rngs)
        self.down = nnx.Linear(ffn, embed, dtype=dtype, kernel_init=out_of(config.layers), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(signal.tensor(jax.nn.gelu(self.up_proj(x)), "hidden"))
