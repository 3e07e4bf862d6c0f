"""GPT-2: LayerNorm, learned positions, GELU, tied embedding. b batch, s seq, d embed, v vocab."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jgt import signal
from train.models.attention import Kernel, attend_with
from train.models.block import Block
from train.models.config import ModelConfig
from train.models.embedding import Embedding, scores
from train.models.linear import compute_type, linear
from train.models.stack import Remat, scan_layers, stacked
from train.models.weights import TABLE, out_of


class GPT(nnx.Module):
    """Tokens [b, s] → logits [b, s, v] in f32."""

    def __init__(self, config: ModelConfig, remat: Remat = "none", attention: Kernel = "xla", *, rngs: nnx.Rngs):
        dtype = compute_type(config)
        self.embed = Embedding(config.vocab, config.embed, dtype, name="embedding", rngs=rngs)
        self.positions = nnx.Param(TABLE(rngs.params(), (config.seq, config.embed), jnp.float32))
        attend = attend_with(attention, recompute=remat == "attention")
        block = partial(Block, config, attend=attend, norm=nnx.LayerNorm, mlp=MLP, use_bias=True, rope=False)
        self.layers = stacked(lambda rngs: block(rngs=rngs), config.layers, rngs)
        self.norm = nnx.LayerNorm(config.embed, epsilon=config.norm_eps, dtype=dtype, rngs=rngs)
        self.remat = remat

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x, table = self.features(tokens)
        with signal.context("head"):
            return scores(x, table)

    def features(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What the logits are the product of: normed activations [b, s, d] and a table [v, d]."""
        with signal.context("embed"):
            x = self.embed(tokens)
            x = x + self.positions[...][None, : tokens.shape[1]].astype(x.dtype)
        with signal.context("layers"):
            x = scan_layers(self.layers, x, self.remat)
        with signal.context("head"):
            return self.norm(x), self.embed.table()


class MLP(nnx.Module):
    """Up, GELU, down."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        embed, ffn = config.embed, config.ffn_size
        self.up_proj = linear(config, embed, ffn, use_bias=True, rngs=rngs)
        self.down = linear(config, ffn, embed, out_of(config.layers), use_bias=True, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(signal.tensor(jax.nn.gelu(self.up_proj(x)), "hidden"))
