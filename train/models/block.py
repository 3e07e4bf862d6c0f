"""A layer of a decoder. b batch, s seq, d embed."""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import nnx

from jgt import signal
from train.models.attention import Attend, Attention
from train.models.config import ModelConfig
from train.models.linear import compute_type


class Block(nnx.Module):
    """Attention and MLP, each on a normed input and added to the stream [b, s, d] (pre-norm, arXiv 2002.04745)."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        attend: Attend,
        norm: Callable[..., nnx.Module],
        mlp: Callable[..., nnx.Module],
        use_bias: bool,
        rope: bool,
        rngs: nnx.Rngs,
    ):
        self.attn_norm = norm(config.embed, epsilon=config.norm_eps, dtype=compute_type(config), rngs=rngs)
        self.attn = Attention(config, attend=attend, use_bias=use_bias, rope=rope, rngs=rngs)
        self.mlp_norm = norm(config.embed, epsilon=config.norm_eps, dtype=compute_type(config), rngs=rngs)
        self.mlp = mlp(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        with signal.context("attn"):
            x = x + self.attn(signal.tensor(self.attn_norm(x), "normed"))
        with signal.context("mlp"):
            return x + self.mlp(signal.tensor(self.mlp_norm(x), "normed"))
