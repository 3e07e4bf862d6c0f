"""How a model computes one token after the texts so far. Models differ in what they keep for it, and in nothing else here.

The trainer's decoders keep keys and values. A module of the user's own may have two methods:

    init_cache(rows, length)            → a tree of arrays [rows, ...], for texts of at most `length` tokens
    decode(tokens, positions, cache)    → the logits [rows, vocab] after one token of each row, int32[rows], and the new cache

A module without them is called with the whole texts for every token.

b rows, s tokens of a text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..models import cache as caches
from ..models.config import ModelConfig, OwnModel
from ..step.state import Tree

Module = Any
Result = tuple[jax.Array, Tree]
"""Logits [b, v] after the last token of each row, and a cache."""
_LEAST = 16


@dataclass(frozen=True, kw_only=True)
class Caching:
    """The state that a model keeps between tokens. A cache is a tree of arrays, whose rows are dim `rows_dim`; scalars have none.

    read(module, tokens [b, s], lengths [b], step, slots): texts, of which each has its own length and the cache has `slots` slots. step:
    the steps of the batch so far. write(module, tokens [b], lengths [b], cache): the next token of each row, which has `lengths` tokens.
    grown(cache, slots): the same texts with more slots; None: a cache has room for `longest` tokens from the beginning. switches_at: a text
    that becomes longer than this is read again, because its keys are others then.
    """

    read: Callable[[Module, jax.Array, jax.Array, jax.Array, int], Result]
    write: Callable[[Module, jax.Array, jax.Array, Tree], Result]
    grown: Callable[[Any, int], Any] | None = None
    rows_dim: int = 0
    longest: int
    switches_at: int | None = None

    def padded(self, tokens: int) -> int:
        """The length to which texts of this many tokens are padded: a multiple of an eighth of the next power of two.

        So few programs are compiled, and less than a quarter is read for nothing.
        """
        part = max(power_of_two(tokens) // 8, _LEAST)
        return min(-(-tokens // part) * part, self.longest)

    def slots(self, tokens: int) -> int:
        """The slots of a cache of texts of this many tokens: a power of two, since a step is compiled for each."""
        return self.longest if self.grown is None else min(power_of_two(max(tokens, _LEAST)), self.longest)


def caching_of(config: ModelConfig | OwnModel, *, has_cache: bool) -> Caching:
    """The caching of a model. has_cache: whether a module of the user's own has the two methods."""
    if isinstance(config, ModelConfig):
        scaling = config.rope_scaling
        return Caching(
            read=lambda module, tokens, lengths, step, slots: module.read(tokens, lengths, step, slots),
            write=lambda module, tokens, lengths, cache: module.write(tokens, lengths, cache),
            grown=lambda cache, slots: caches.grown(cache, config, slots),
            rows_dim=1,
            longest=config.seq,
            switches_at=scaling.original if scaling is not None and scaling.kind == "longrope" else None,
        )
    read, write = (_read_own, _write_own) if has_cache else (_read_whole, _write_whole)
    return Caching(read=read, write=write, longest=config.seq)


def _write_own(module: Module, tokens: jax.Array, lengths: jax.Array, cache: Tree) -> Result:
    return module.decode(tokens, lengths, cache)


def _read_own(module: Module, tokens: jax.Array, lengths: jax.Array, step: jax.Array, slots: int) -> Result:
    """One token after another: a module need not know of texts of different lengths."""
    rows, length = tokens.shape

    def read(carry: Result, position: jax.Array) -> tuple[Result, None]:
        token = jax.lax.dynamic_index_in_dim(tokens, position, axis=1, keepdims=False)
        new = module.decode(token, jnp.full(rows, position), carry[1])

        def kept(old: jax.Array, new: jax.Array) -> jax.Array:
            return jnp.where((position < lengths).reshape(rows, *(1,) * (old.ndim - 1)), new, old)

        return jax.tree.map(kept, carry, new), None

    cache = module.init_cache(rows, slots)
    logits = jax.eval_shape(lambda: module.decode(tokens[:, 0], lengths, cache))[0]
    return jax.lax.scan(read, (jnp.zeros(logits.shape, logits.dtype), cache), jnp.arange(length))[0]


def _write_whole(module: Module, tokens: jax.Array, lengths: jax.Array, cache: Any) -> Result:
    texts = jnp.where(jnp.arange(cache.shape[1])[None, :] == lengths[:, None], tokens[:, None], cache)
    return jnp.take_along_axis(module(texts), lengths[:, None, None], axis=1)[:, 0], texts


def _read_whole(module: Module, tokens: jax.Array, lengths: jax.Array, step: jax.Array, slots: int) -> Result:
    texts = jnp.pad(tokens, ((0, 0), (0, slots - tokens.shape[1])))
    return jnp.take_along_axis(module(texts), lengths[:, None, None] - 1, axis=1)[:, 0], texts


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()
