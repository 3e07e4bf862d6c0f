"""A layer of a decoder. b batch, s seq, d embed."""

from __future__ import annotations

import jax
from flax import nnx

from jgt import signal


class Block(nnx.Module):
    """Attention and MLP, each on a normed input and added to the stream [b, s, d] (pre-norm, arXiv 2002.04745)."""

    def __init__(self, *, attn_norm: nnx.Module, attn: nnx.Module, mlp_norm: nnx.Module, mlp: nnx.Module):
        self.attn_norm = attn_norm
        self.attn = attn
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, x: jax.Array) -> jax.Array:
        with signal.context("attn"):
            x = x + self.attn(signal.tensor(self.attn_norm(x), "normed"))
        with signal.context("mlp"):
            return x + self.mlp(signal.tensor(self.mlp_norm(x), "normed"))
