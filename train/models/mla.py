"""Attention whose keys and values are made of one latent of a token (multi-head latent attention, arXiv 2405.04434 and 2412.19437).

    c, k_r = x W_kv_a        c = norm(c)        k = [c W_k, k_r]        v = c W_v        q = [q_n, q_r]

The last elements of a key, k_r, are the same for all heads, and they alone are rotated. W_k and W_v are one matrix [r, n · (m + u)]. A text
that is read at once has keys and values of its own for each head, so attention is that of `attention.py`, by any of its kernels.

A cache keeps c and k_r, as one head. For the next token they are not expanded: q_n · (c W_k) is (q_n W_kᵀ) · c, so each query meets the
latents themselves, and W_v multiplies their sum (section 2.1.2 there).

b batch, s seq, d embed, n heads, h head size, e rotated elements of it, m = h - e the others, u value size, r rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jgt import signal

from .attention import Attention
from .cache import Cache, KeysValues
from .config import ModelConfig
from .kernels import Attend
from .linear import adding_init, cheap, linear, make_norm, read_by
from .rope import rotate, with_query_growth
from .tokens import LayerFlags, Rows


class LatentAttention(Attention):
    """Multi-head latent attention, [b, s, d] → [b, s, d], and the latents and rotated keys [b, s, 1, r] and [b, s, 1, e]."""

    def __init__(self, config: ModelConfig, *, attend: Attend, rngs: nnx.Rngs):  # pyright: ignore[reportMissingSuperCall]
        latent = config.latent
        assert latent is not None
        queries, expanded = config.heads * config.head_size, config.heads * (config.head_size - latent.rope_dim + config.value_size)
        read = partial(linear, config, config.embed, use_bias="qkv" in config.biases, rngs=rngs)
        norm = partial(make_norm, replace(config, norm_eps=latent.norm_eps), rngs=rngs)
        if latent.query_rank is None:
            self.q_proj = linear(config, config.embed, queries, use_bias=False, rngs=rngs)
        else:
            self.q_a_proj, self.q_a_norm = read(latent.query_rank), norm(latent.query_rank)
            self.q_b_proj = linear(config, latent.query_rank, queries, use_bias=False, rngs=rngs)
        self.kv_a_proj, self.kv_a_norm = read(latent.rank + latent.rope_dim), norm(latent.rank)
        self.kv_b_proj = linear(config, latent.rank, expanded, use_bias=False, rngs=rngs)
        size = config.heads * config.value_size
        self.out = linear(config, size, config.embed, adding_init(config.layers), use_bias="out" in config.biases, rngs=rngs)
        self.sinks = nnx.Param(jnp.zeros(config.heads, jnp.float32)) if config.attention_sinks else None
        self.attend, self.config, self.latent = attend, config, latent
        self.options = {"scale": config.attention_scale or config.head_size**-0.5}
        if config.attention_softcap is not None:
            self.options["softcap"] = config.attention_softcap

    def __call__(self, x: jax.Array, rows: Rows, flags: LayerFlags, cache: Cache | None = None) -> tuple[jax.Array, Any]:
        q, new = self._projected(x, rows, flags)
        if cache is None:
            q, k, v = (signal.tensor(y, name) for y, name in zip((q, *self._expanded(new)), "qkv", strict=True))
            heads, kept = self._attended(q, k, v, rows.segments, flags), new
        else:
            of_keys, of_values = self._matrices()
            free, turned = self._parts(q)
            q = jnp.concatenate([jnp.einsum("bsnm,rnm->bsnr", free, of_keys), turned], axis=-1)
            heads, kept = self._recalled(signal.tensor(q, "q"), new, rows, flags, cache)
            heads = jnp.einsum("bsnr,rnu->bsnu", heads, of_values)
        heads = signal.tensor(heads, "heads")  # [b, s, n, u]
        return signal.tensor(self.out(heads.reshape(*x.shape[:2], -1)), "out"), kept  # [b, s, n · u] → [b, s, d]

    def _projected(self, x: jax.Array, rows: Rows, flags: LayerFlags) -> tuple[jax.Array, KeysValues]:
        """Queries [b, s, n, h], latents [b, s, 1, r] and rotated keys [b, s, 1, e]."""
        config, rank = self.config, self.latent.rank
        q, c = read_by(x, self.q_proj if self.latent.query_rank is None else self.q_a_proj, self.kv_a_proj)
        if self.latent.query_rank is not None:
            q = self.q_b_proj(signal.tensor(cheap(self.q_a_norm)(q), "query_latent"))
        c, k = jnp.split(c[:, :, None], [rank], axis=-1)
        c = signal.tensor(cheap(self.kv_a_norm)(c), "latent")
        free, turned = self._parts(q.reshape(*x.shape[:2], config.heads, config.head_size))
        q = jnp.concatenate([free, rotate(turned, config, flags, rows)], axis=-1)
        return with_query_growth(q, config.rope_scaling, rows), KeysValues(c, rotate(k, config, flags, rows))

    def _parts(self, q: jax.Array) -> list[jax.Array]:
        """The elements of queries [b, s, n, h] that positions leave alone, and the others."""
        return jnp.split(q, [self.config.head_size - self.latent.rope_dim], axis=-1)

    def _expanded(self, new: KeysValues) -> tuple[jax.Array, jax.Array]:
        """Keys [b, s, n, h] and values [b, s, n, u] of all heads."""
        c, turned = new
        size = self.config.head_size - self.latent.rope_dim
        kv = self.kv_b_proj(c[:, :, 0]).reshape(*c.shape[:2], self.config.heads, -1)  # [b, s, n, m + u]
        free, v = jnp.split(kv, [size], axis=-1)
        return jnp.concatenate([free, jnp.broadcast_to(turned, (*free.shape[:3], turned.shape[-1]))], axis=-1), v

    def _matrices(self) -> list[jax.Array]:
        """The matrices [r, n, m] and [r, n, u] that make keys and values of latents."""
        kernel = self.kv_b_proj.kernel[...].astype(self.kv_b_proj.dtype)
        return jnp.split(kernel.reshape(self.latent.rank, self.config.heads, -1), [self.config.head_size - self.latent.rope_dim], axis=-1)

    def _read(self, kept: KeysValues) -> KeysValues:
        """Latents with their rotated keys [b, s, 1, r + e] as keys, and the latents as values."""
        return KeysValues(jnp.concatenate(kept, axis=-1), kept.keys)
