"""Causal self-attention. b batch, s seq, n query heads, k key/value heads, h head size, d embed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jgt import signal
from train.models.config import ModelConfig
from train.models.linear import linear
from train.models.weights import out_of

Kernel = Literal["xla", "cudnn"]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def attend_with(kernel: Kernel, *, recompute: bool) -> Attend:
    """Causal attention of q [b, s, n, h] to k and v [b, s, k, h]: [b, s, n, h].

    recompute: the backward pass finds q, k and v, and no scores [b, n, s, s], which cuDNN's kernel keeps in no case.
    """
    attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation=kernel)
    return jax.checkpoint(attend, prevent_cse=False) if recompute and kernel == "xla" else attend


class Attention(nnx.Module):
    """Grouped-query attention [b, s, d] → [b, s, d], with rotary positions if asked (RoFormer, arXiv 2104.09864)."""

    def __init__(self, config: ModelConfig, *, attend: Attend, use_bias: bool, rope: bool, rngs: nnx.Rngs):
        queries, keys = config.heads * config.head_size, config.num_kv_heads * config.head_size
        make = partial(linear, config, use_bias=use_bias, rngs=rngs)
        self.q_proj = make(config.embed, queries)
        self.k_proj = make(config.embed, keys)
        self.v_proj = make(config.embed, keys)
        self.out = make(queries, config.embed, out_of(config.layers))
        self.attend = attend
        self.head_size = config.head_size
        self.rope_theta = config.rope_theta if rope else None

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.rope_theta is not None:
            q, k = rotate(q, self.rope_theta), rotate(k, self.rope_theta)
        q, k, v = signal.tensor(q, "q"), signal.tensor(k, "k"), signal.tensor(v, "v")
        heads = signal.tensor(self.attend(q, k, v), "heads")
        return self.out(heads.reshape(*x.shape[:2], -1))

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, self.head_size)  # [b, s, n, h]


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary positions on [b, s, n, h], the two halves of a head forming the pairs."""
    size = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(size, dtype=jnp.float32) / size)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency[None, :]  # [s, h/2]
    cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
