"""Causal self-attention with the queries, keys and values of one array.

Tokens of one window may belong to several documents. `segments` [b, s] has, for each token, the position at which its
document begins. Equal entries are one document, and a token's position in its document is its position less its entry.

b batch, s seq, d embed, n query heads, k key/value heads, h head size.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jgt import signal

from .config import ModelConfig
from .kernels import Attend
from .linear import adding_init, linear, read_by


class Attention(nnx.Module):
    """Grouped-query attention (arXiv 2305.13245), [b, s, d] → [b, s, d], with rotary positions if the model's kind has them."""

    def __init__(self, config: ModelConfig, *, attend: Attend, use_bias: bool, rngs: nnx.Rngs):
        queries, keys = config.heads * config.head_size, config.num_kv_heads * config.head_size
        make = partial(linear, config, use_bias=use_bias, rngs=rngs)
        self.q_proj = make(config.embed, queries)
        self.k_proj = make(config.embed, keys)
        self.v_proj = make(config.embed, keys)
        self.out = make(queries, config.embed, adding_init(config.layers))
        self.attend = attend
        self.head_size, self.num_kv_heads = config.head_size, config.num_kv_heads
        self.rope_theta = config.rope_theta if config.facts.positions == "rotary" else None

    def __call__(self, x: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        made = read_by(x, self.q_proj, self.k_proj, self.v_proj)
        # [b, s, n · h] → [b, s, n, h]
        q, k, v = (y.reshape(*x.shape[:2], -1, self.head_size) for y in made)
        if self.rope_theta is not None:
            q, k = rotate(q, self.rope_theta, segments), rotate(k, self.rope_theta, segments)
        q, k, v = signal.tensor(q, "q"), signal.tensor(k, "k"), signal.tensor(v, "v")
        mask = None if segments is None else segments[:, None, :, None] == segments[:, None, None, :]  # [b, 1, s, s]
        heads = signal.tensor(self.attend(q, k, v, mask=mask), "heads")  # [b, s, n, h]
        return signal.tensor(self.out(heads.reshape(*x.shape[:2], -1)), "out")  # [b, s, n · h] → [b, s, d]


def rotate(x: jax.Array, theta: float, segments: jax.Array | None = None) -> jax.Array:
    """Rotary positions (RoFormer, arXiv 2104.09864) on [b, s, n, h].

    Element i is paired with element i + h/2, as in Llama's weights on Hugging Face, not with its neighbour as in the paper.
    """
    half = x.shape[-1] // 2
    # Angles are f32 whatever the model's type: bf16 cannot tell position 256 from 257.
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    positions = jnp.arange(x.shape[1], dtype=jnp.float32)
    if segments is None:
        angle = positions[:, None] * frequency[None, :]  # [s, h/2]
        # [s, h/2] → [1, s, 1, h/2], to be multiplied with all heads of all rows.
        cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    else:
        angle = (positions[None, :] - segments)[..., None] * frequency[None, None, :]  # [b, s, h/2]
        cos, sin = jnp.cos(angle)[:, :, None, :], jnp.sin(angle)[:, :, None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)  # [b, s, n, h/2] each
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
