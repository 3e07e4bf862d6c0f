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

from .cache import Cache, KeysValues, layer_of, seen, written
from .config import ModelConfig
from .kernels import Attend, attend_to
from .linear import adding_init, cheap, linear, make_norm, read_by
from .rope import rotate, with_query_growth
from .tokens import LayerFlags, Rows


class Attention(nnx.Module):
    """Grouped-query attention (arXiv 2305.13245), [b, s, d] → [b, s, d], and the keys and values.

    With a cache the tokens [b, 1, d] follow those of the cache and see them too. Their keys and values are in the cache that is returned.
    """

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
        self.gate_proj: Any = make(config.embed, config.heads * config.value_size) if config.attention_gate else None
        self.sinks = nnx.Param(jnp.zeros(config.heads, jnp.float32)) if config.attention_sinks else None
        self.attend, self.config = attend, config
        options = {"scale": config.attention_scale, "softcap": config.attention_softcap}
        # Only options that the model uses, since a kernel may not accept the others.
        self.options = {name: value for name, value in options.items() if value is not None}

    def __call__(self, x: jax.Array, rows: Rows, flags: LayerFlags, cache: Cache | None = None) -> tuple[jax.Array, Any]:
        config = self.config
        q, k, v, *gates = read_by(x, self.q_proj, self.k_proj, self.v_proj, *([self.gate_proj] if self.gate_proj else []))
        if config.qk_norm == "all":
            q, k = cheap(self.q_norm)(q), cheap(self.k_norm)(k)
        # [b, s, n · h] → [b, s, n, h]
        q, k, v = (y.reshape(*x.shape[:2], -1, config.head_size) for y in (q, k, v))
        if config.qk_norm == "head":
            q, k = cheap(self.q_norm)(q), cheap(self.k_norm)(k)
        if config.positions == "rotary":
            q, k = (rotate(y, config, flags, rows) for y in (q, k))
            q = with_query_growth(q, config.rope_scaling, rows)
        q, k, v = signal.tensor(q, "q"), signal.tensor(k, "k"), signal.tensor(v, "v")
        if cache is None:
            heads, kept = self._attended(q, k, v, rows.segments, flags), KeysValues(k, v)
        else:
            heads, kept = self._recalled(q, KeysValues(k, v), rows, flags, cache)
        heads = signal.tensor(heads, "heads").reshape(*x.shape[:2], -1)  # [b, s, n, h] → [b, s, n · h]
        for gate in gates:
            heads = cheap(_gated)(heads, gate)
        return signal.tensor(self.out(heads), "out"), kept  # [b, s, n · h] → [b, s, d]

    def _attended(self, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, flags: LayerFlags) -> jax.Array:
        mask = None if segments is None else segments[:, None, :, None] == segments[:, None, None, :]  # [b, 1, s, s]
        window = self._window(q.shape[1], flags)
        return self.attend(q, k, v, mask=mask, **self._options(), **({} if window is None else {"window": window}))

    def _recalled(self, q: jax.Array, new: KeysValues, rows: Rows, flags: LayerFlags, cache: Cache) -> tuple[jax.Array, Cache]:
        """The heads of tokens behind those of a cache, and the cache with them."""
        lengths = rows.lengths
        assert lengths is not None
        cache = written(cache, new, flags.place, flags.is_full)

        def over(stack: KeysValues) -> jax.Array:
            keys, values = self._read(layer_of(stack, flags.place))
            is_seen = seen(keys.shape[1], cache.step, lengths - 1)
            return attend_to(q, keys, values, is_seen[:, None, None, None, :], **self._options())

        full, window = cache.full, cache.window
        if full is not None and window is not None:
            return jax.lax.cond(flags.is_full, over, lambda _: over(window), full), cache
        stack = window if full is None else full
        assert stack is not None
        return over(stack), cache

    def _read(self, kept: KeysValues) -> KeysValues:
        """The keys and values that queries meet, from what a cache keeps of a layer."""
        return kept

    def _options(self) -> dict[str, Any]:
        return self.options if self.sinks is None else {**self.options, "sinks": self.sinks[...]}

    def _window(self, seq: int, flags: LayerFlags) -> int | jax.Array | None:
        """The number of tokens that a token of this layer sees, itself included; None: all earlier ones."""
        window = self.config.window
        if window is None or window >= seq or flags.is_full is True:
            return None
        return window if flags.is_full is False else jnp.where(flags.is_full, seq, window)


def _gated(x: jax.Array, gate: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(gate)
