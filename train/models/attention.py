"""Causal self-attention with the queries, keys and values of one array.

Tokens of one window may belong to several documents. `segments` [b, s] has, for each token, the position at which its
document begins. Equal entries are one document, and a token's position in its document is its position less its entry.

b batch, s seq, d embed, n query heads, k key/value heads, h head size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jgt import signal

from .config import ModelConfig
from .kernels import Attend
from .linear import adding_init, cheap, linear, make_norm, read_by
from .rope import LayerFlags, rotate


class Attention(nnx.Module):
    """Grouped-query attention (arXiv 2305.13245), [b, s, d] → [b, s, d]."""

    def __init__(self, config: ModelConfig, *, attend: Attend, rngs: nnx.Rngs):
        queries, keys = config.heads * config.head_size, config.num_kv_heads * config.head_size
        make = partial(linear, config, use_bias="qkv" in config.biases, rngs=rngs)
        self.q_proj = make(config.embed, queries)
        self.k_proj = make(config.embed, keys)
        self.v_proj = make(config.embed, keys)
        self.out = linear(config, queries, config.embed, adding_init(config.layers), use_bias="out" in config.biases, rngs=rngs)
        by_head = config.qk_norm == "head"
        self.q_norm: Any = make_norm(config, config.head_size if by_head else queries, rngs) if config.qk_norm else None
        self.k_norm: Any = make_norm(config, config.head_size if by_head else keys, rngs) if config.qk_norm else None
        self.attend, self.config = attend, config

    def __call__(self, x: jax.Array, segments: jax.Array | None, flags: LayerFlags) -> jax.Array:
        config = self.config
        q, k, v = read_by(x, self.q_proj, self.k_proj, self.v_proj)
        if config.qk_norm == "all":
            q, k = cheap(self.q_norm)(q), cheap(self.k_norm)(k)
        # [b, s, n · h] → [b, s, n, h]
        q, k, v = (y.reshape(*x.shape[:2], -1, config.head_size) for y in (q, k, v))
        if config.qk_norm == "head":
            q, k = cheap(self.q_norm)(q), cheap(self.k_norm)(k)
        if config.positions == "rotary":
            q, k = (rotate(y, config, flags, segments) for y in (q, k))
        q, k, v = signal.tensor(q, "q"), signal.tensor(k, "k"), signal.tensor(v, "v")
        mask = None if segments is None else segments[:, None, :, None] == segments[:, None, None, :]  # [b, 1, s, s]
        options = {"scale": config.attention_scale, "softcap": config.attention_softcap, "window": self._window(x.shape[1], flags)}
        # Only options that the model uses, since a kernel may not accept the others.
        given = {name: value for name, value in options.items() if value is not None}
        heads = signal.tensor(self.attend(q, k, v, mask=mask, **given), "heads")  # [b, s, n, h]
        return signal.tensor(self.out(heads.reshape(*x.shape[:2], -1)), "out")  # [b, s, n · h] → [b, s, d]

    def _window(self, seq: int, flags: LayerFlags) -> int | jax.Array | None:
        """The number of tokens that a token of this layer sees, itself included; None: all earlier ones."""
        window = self.config.window
        if window is None or window >= seq or flags.is_full is True:
            return None
        return window if flags.is_full is False else jnp.where(flags.is_full, seq, window)
