"""Keys and values of earlier tokens, so that a decoder computes one token at a time.

The rows of a batch are texts of different lengths, and each step writes one token of every row. All rows write at the same slot, the step's
number modulo the number of slots, so that a step writes one slice in place wherever its rows are in their texts. A key is then known by its
age, the steps since it was written, and a row of length n sees the keys of an age below n. A text that enters later is placed so that its
last token has the youngest slot.

Layers with a window have a stack of their own, of no more slots than the window: what is older is overwritten, and needs no mask.

A stack has its heads before its slots, as the matmuls of attention read it. XLA for GPUs would transpose the stack for every token if it
had another order.

Latent attention keeps latents and rotated keys in the place of keys and values, as of one head; their widths differ. Linear attention keeps
states of constant size, whatever the number of slots.

L layers of a stack, b rows, n slots, s tokens, k key/value heads, h head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgt import signal

from .config import ModelConfig


class KeysValues(NamedTuple):
    """Keys and values: stacks [L, b, k, n, h], or those of tokens [L, b, s, k, h]; of one layer without the first dim."""

    keys: jax.Array
    values: jax.Array


class States(NamedTuple):
    """The states of linear attention: the last inputs of its convolutions [L, b, t - 1, c], and matrices f32[L, b, k, g, h, e].

    Of one layer without the first dim. t taps of a convolution, c channels, k heads of keys, g heads of values of each.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    matrices: jax.Array


class Cache(NamedTuple):
    """The stacks of layers that see all earlier tokens, of layers with a window, and of linear attention; None without such layers.

    step: int32[].
    """

    full: KeysValues | None
    window: KeysValues | None
    linear: States | None
    step: jax.Array


def kinds_of(config: ModelConfig) -> tuple[list[int], list[int], list[int]]:
    """The layers that see all earlier tokens, those with a window, and those with linear attention."""
    is_full = [config.window is None or config.window >= config.seq or n in config.full_layers for n in range(config.layers)]
    attention = [n for n, kind in enumerate(config.kinds) if kind == "attention"]
    linear = [n for n, kind in enumerate(config.kinds) if kind == "linear"]
    return [n for n in attention if is_full[n]], [n for n in attention if not is_full[n]], linear


def places_of(config: ModelConfig) -> list[int]:
    """The place of each layer in its stack."""
    return [kind.index(n) for n in range(config.layers) for kind in kinds_of(config) if n in kind]


def filled(config: ModelConfig, new: Mapping[str, Any], lengths: jax.Array, step: jax.Array, slots: int) -> Cache:
    """The cache of texts that are read at once. new: of all layers of a kind, `KeysValues` of tokens or `States`. lengths: int[b]."""
    full, window, _ = kinds_of(config)
    attention = sorted([*full, *window])

    def stack(layers: Sequence[int], size: int) -> KeysValues | None:
        if not layers:
            return None
        ages = jnp.mod(step - 1 - jnp.arange(size), size)
        token = jnp.clip(lengths[:, None] - 1 - ages[None, :], 0)[None, :, :, None, None]  # [1, b, n, 1, 1]
        places = jnp.array([attention.index(n) for n in layers])
        return KeysValues(*(jnp.take_along_axis(x[places], token, axis=2).swapaxes(2, 3) for x in new["attention"]))

    return Cache(stack(full, slots), stack(window, min(slots, config.window or slots)), new.get("linear"), step)


def grown(cache: Cache, config: ModelConfig, slots: int) -> Cache:
    """The same texts with more slots."""

    def stack(old: KeysValues | None, size: int) -> KeysValues | None:
        if old is None or old.keys.shape[3] == size:
            return old
        ages = jnp.mod(cache.step - 1 - jnp.arange(size), size)
        return KeysValues(*(jnp.take(x, jnp.mod(cache.step - 1 - ages, x.shape[3]), axis=3) for x in old))

    return cache._replace(full=stack(cache.full, slots), window=stack(cache.window, min(slots, config.window or slots)))


def written(cache: Cache, new: KeysValues, place: jax.Array | bool, is_full: bool | jax.Array) -> Cache:
    """The cache with the keys and values [b, 1, k, h] of a layer at the slot of the step. place: the layer's in its stack."""

    def stack(old: KeysValues | None, is_own: bool | jax.Array) -> KeysValues | None:
        if old is None or is_own is False:
            return old
        return KeysValues(*(_written(x, y, place, cache.step, is_own) for x, y in zip(old, new, strict=True)))

    # A model with stacks of one kind has its layers there, whatever the flag says.
    is_full, has_window = (True, False) if cache.window is None else (False, True) if cache.full is None else (is_full, None)
    if has_window is None:
        has_window = jnp.logical_not(is_full)
    return cache._replace(full=stack(cache.full, is_full), window=stack(cache.window, has_window))


def _written(stack: jax.Array, new: jax.Array, place: jax.Array | bool, step: jax.Array, is_own: bool | jax.Array) -> jax.Array:
    start = (place, 0, 0, jnp.mod(step, stack.shape[3]), 0)
    new = new.swapaxes(1, 2)[None].astype(stack.dtype)
    if is_own is not True:
        # A layer of the other stack writes what was there, since one program serves all layers.
        new = jnp.where(is_own, new, jax.lax.dynamic_slice(stack, start, new.shape))
    return jax.lax.dynamic_update_slice(stack, new, start)


def layer_of(stack: KeysValues, place: jax.Array | bool) -> KeysValues:
    """The keys and values [b, n, k, h] of a layer."""
    keys, values = (jax.lax.dynamic_index_in_dim(x, place, keepdims=False).swapaxes(1, 2) for x in stack)
    return KeysValues(signal.tensor(keys, "k_cache"), signal.tensor(values, "v_cache"))


def seen(slots: int, step: jax.Array, lengths: jax.Array) -> jax.Array:
    """The slots bool[b, n] that the token of this step sees, its own included. lengths: int[b], the tokens before it."""
    return jnp.mod(step - jnp.arange(slots), slots)[None, :] <= lengths[:, None]
