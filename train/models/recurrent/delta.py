"""Linear attention by gated delta nets (arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.

Queries, keys and values pass a short convolution over the tokens before, and queries and keys have unit length. What each head keeps of
earlier tokens is a matrix of constant size (`recurrence.py`). A gate multiplies the normed result.

A cache has that matrix, and the last inputs of the convolutions. Heads are independent but for queries and keys that several share, so
rules split them as those of attention. The sequence is not split: a token needs the matrix that all earlier ones have made.

b batch, s seq, d embed, k key heads, g value heads of each, n = k · g, h key size, e value size, t taps of the convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jgt import signal

from ..cache import Cache, States
from ..config import ModelConfig
from ..linear import adding_init, cheap, compute_type, linear, read_by
from ..model import Vector
from ..tokens import LayerFlags, Rows
from .recurrence import TokenSteps, chunked, stepped


class DeltaNet(nnx.Module):
    """[b, s, d] → [b, s, d], and its states: those after the texts, or with a cache, the cache with them."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        own = config.linear
        assert own is not None
        keys, values = own.num_key_heads * own.key_dim, own.heads * own.value_dim
        make = partial(linear, config, config.embed, use_bias=False, rngs=rngs)
        self.q_proj, self.k_proj, self.v_proj = make(keys), make(keys), make(values)
        self.gate_proj, self.beta_proj, self.decay_proj = make(values), make(own.heads), make(own.heads)
        taps = nnx.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=0, out_axis=(), batch_axis=1)
        self.q_conv, self.k_conv, self.v_conv = (
            Vector(taps(rngs.params(), (own.taps, size), jnp.float32)) for size in (keys, keys, values)
        )
        # A token's decay begins between exp(-1.6) and exp(-0.001), as in Mamba-2.
        self.decay_rate = Vector(jnp.log(jax.random.uniform(rngs.params(), (own.heads,), minval=1.0, maxval=16.0)))
        steps = jnp.exp(jax.random.uniform(rngs.params(), (own.heads,), minval=jnp.log(1e-3), maxval=jnp.log(0.1)))
        self.decay_bias = Vector(jnp.log(jnp.expm1(steps)))
        self.norm = nnx.RMSNorm(own.value_dim, epsilon=config.norm_eps, dtype=compute_type(config), rngs=rngs)
        self.out = linear(config, values, config.embed, adding_init(config.layers), use_bias=False, rngs=rngs)
        self.config = own

    def __call__(self, x: jax.Array, rows: Rows, flags: LayerFlags, cache: Cache | None = None) -> tuple[jax.Array, Any]:
        *made, gate, beta, decay = read_by(x, self.q_proj, self.k_proj, self.v_proj, self.gate_proj, self.beta_proj, self.decay_proj)
        if cache is None:
            heads, kept = self._read(made, decay, beta, rows)
        else:
            heads, kept = self._recalled(made, decay, beta, rows, flags, cache)
        heads = heads.reshape(*x.shape[:2], -1, self.config.value_dim)
        heads = signal.tensor(cheap(self._gated)(heads, gate.reshape(heads.shape)), "heads")  # [b, s, n, e]
        return signal.tensor(self.out(heads.reshape(*x.shape[:2], -1)), "out"), kept

    def _read(self, made: Sequence[jax.Array], decay: jax.Array, beta: jax.Array, rows: Rows) -> tuple[jax.Array, States | None]:
        """The heads of texts that are read at once, and the states behind each, if their lengths are known."""
        steps = self._steps(made, decay, beta, rows, (None,) * 3)
        if rows.lengths is None:
            return chunked(steps, rows.segments)[1], None
        matrices, heads = chunked(_silent_behind(steps, rows.lengths), rows.segments)
        q, k, v = (_last(x, self.config.taps, rows.lengths) for x in made)
        return heads, States(q, k, v, matrices)

    def _recalled(
        self, made: Sequence[jax.Array], decay: jax.Array, beta: jax.Array, rows: Rows, flags: LayerFlags, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """The heads of tokens behind those of a cache, and the cache with them."""
        assert cache.linear is not None
        *pasts, matrices = (x[flags.place] for x in cache.linear)
        matrices, heads = stepped(matrices, self._steps(made, decay, beta, rows, pasts))
        new = [*(jnp.concatenate([past, x], axis=1)[:, 1:] for past, x in zip(pasts, made, strict=True)), matrices]
        return heads, cache._replace(linear=States._make(_put(old, x, flags.place) for old, x in zip(cache.linear, new, strict=True)))

    def _steps(
        self, made: Sequence[jax.Array], decay: jax.Array, beta: jax.Array, rows: Rows, pasts: Sequence[jax.Array | None]
    ) -> TokenSteps:
        kernels = self.q_conv[...], self.k_conv[...], self.v_conv[...]
        q, k, v = (cheap(convolved)(x, own, rows.segments, past) for x, own, past in zip(made, kernels, pasts, strict=True))
        own, by_head = self.config, (*q.shape[:2], self.config.num_key_heads, -1)
        q, k = (cheap(_unit)(y.reshape(*by_head[:3], own.key_dim)) for y in (q, k))
        q = q * jnp.asarray(own.key_dim**-0.5, q.dtype)
        v = v.reshape(*v.shape[:2], own.heads, own.value_dim)
        q, k, v = signal.tensor(q, "q"), signal.tensor(k, "k"), signal.tensor(v, "v")
        rate, bias = (y[...][None, None] for y in (self.decay_rate, self.decay_bias))
        decay = -jnp.exp(rate) * jax.nn.softplus(decay.astype(jnp.float32) + bias)
        beta = jax.nn.sigmoid(beta.astype(jnp.float32))
        return TokenSteps(q, k, v.reshape(*by_head, own.value_dim), decay.reshape(by_head), beta.reshape(by_head))

    def _gated(self, heads: jax.Array, gate: jax.Array) -> jax.Array:
        return self.norm(heads) * jax.nn.silu(gate)


def convolved(x: jax.Array, kernel: jax.Array, segments: jax.Array | None, past: jax.Array | None) -> jax.Array:
    """Each channel of x [b, s, c] through a causal convolution [t, c] within its document, and silu. past: inputs before, [b, t - 1, c]."""
    seq, taps = x.shape[1], len(kernel)
    before = jnp.zeros((len(x), taps - 1, x.shape[2]), x.dtype) if past is None else past.astype(x.dtype)
    padded, kernel, made = jnp.concatenate([before, x], axis=1), kernel.astype(x.dtype), 0
    for tap in range(taps):
        seen = padded[:, tap : tap + seq]
        if segments is not None:
            seen = jnp.where((jnp.arange(seq)[None, :] - (taps - 1 - tap) >= segments)[..., None], seen, 0)
        made = made + seen * kernel[tap][None, None]
    return jax.nn.silu(jnp.asarray(made))


def _unit(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def _silent_behind(steps: TokenSteps, lengths: jax.Array) -> TokenSteps:
    """The steps of texts, of which those behind the last token change nothing. lengths: int[b]."""
    is_text = (jnp.arange(steps.q.shape[1])[None, :] < lengths[:, None])[..., None, None]
    return steps._replace(k=jnp.where(is_text, steps.k, 0), decay=jnp.where(is_text, steps.decay, 0))


def _last(x: jax.Array, taps: int, lengths: jax.Array) -> jax.Array:
    """The last inputs [b, t - 1, c] of a convolution over texts x [b, s, c]; zeros before their beginning."""
    place = lengths[:, None] - (taps - 1) + jnp.arange(taps - 1)[None, :]
    return jnp.where((place >= 0)[..., None], jnp.take_along_axis(x, jnp.maximum(place, 0)[..., None], axis=1), 0)


def _put(stack: jax.Array, new: jax.Array, place: jax.Array | bool) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, new.astype(stack.dtype), place, 0)
