"""Rotary positions (RoFormer, arXiv 2104.09864), and the ways in which families slow them down for long sequences.

b batch, s seq, n heads, h head size, r rotated elements of a head.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from .options import Options, RopeScaling
from .tokens import LayerFlags, Rows


def rotate(x: jax.Array, options: Options, flags: LayerFlags, rows: Rows) -> jax.Array:
    """x [b, s, n, h] with the first elements of each head rotated by the token's position in its document."""
    seq, size = x.shape[1], int(x.shape[-1] * options.rope_share)
    # [r/2], or [b, 1, r/2] where texts of different lengths have different frequencies.
    frequency, magnitude = _frequencies(options, size // 2, seq if rows.lengths is None else rows.lengths[:, None, None], flags.is_full)
    if flags.rotates is not True:
        # Without rotation all angles are 0.
        frequency = jnp.where(flags.rotates, frequency, 0.0)
    placed = rows.in_documents(seq)
    if placed is None and frequency.ndim == 1:
        angle = jnp.arange(seq, dtype=jnp.float32)[:, None] * frequency[None, :]  # [s, r/2]
        # [s, r/2] → [1, s, 1, r/2], to be multiplied with all heads of all rows.
        cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    else:
        placed = jnp.arange(seq)[None, :] if placed is None else placed
        angle = placed.astype(jnp.float32)[..., None] * (frequency[None, None, :] if frequency.ndim == 1 else frequency)  # [b, s, r/2]
        cos, sin = jnp.cos(angle)[:, :, None, :], jnp.sin(angle)[:, :, None, :]
    if magnitude != 1.0:
        factor: float | jax.Array = magnitude
        for is_scaled in (flags.rotates, True if options.window_theta is None else flags.is_full):
            factor = factor if is_scaled is True else jnp.where(is_scaled, factor, 1.0)
        cos, sin = cos * factor, sin * factor
    rotated, rest = (x, None) if size == x.shape[-1] else (x[..., :size], x[..., size:])
    are_halves = options.rope_pairs == "halves"
    rotated = rotated.astype(jnp.float32)
    # Element i is paired with element i + r/2, as in most weights on Hugging Face, or with its neighbour as in the paper.
    a, b = jnp.split(rotated, 2, axis=-1) if are_halves else (rotated[..., ::2], rotated[..., 1::2])  # [b, s, n, r/2] each
    parts = a * cos - b * sin, b * cos + a * sin
    made = jnp.concatenate(parts, axis=-1) if are_halves else jnp.stack(parts, axis=-1).reshape(rotated.shape)
    made = made.astype(x.dtype)
    return made if rest is None else jnp.concatenate([made, rest], axis=-1)


def _frequencies(options: Options, half: int, length: int | jax.Array, is_full: bool | jax.Array) -> tuple[jax.Array, float]:
    """The angle f32[r/2] between neighbouring tokens of a text, and the factor of what is rotated. length: int, or int[b, 1, 1]."""
    # Angles are f32 whatever the model's type: bf16 cannot tell position 256 from 257.
    exponents = -jnp.arange(half, dtype=jnp.float32) / half
    frequency, magnitude = options.rope_theta**exponents, 1.0
    if options.rope_scaling is not None:
        frequency, magnitude = _scaled(frequency, options.rope_scaling, options.rope_theta, length)
    if options.window_theta is not None:
        # Windows are short, so theirs are not scaled.
        frequency = jnp.where(is_full, frequency, jnp.broadcast_to(options.window_theta**exponents, frequency.shape))
    return frequency, magnitude


def with_query_growth(q: jax.Array, scaling: RopeScaling | None, rows: Rows) -> jax.Array:
    """Queries [b, s, n, h] with the factor that grows with their position, where the model has one."""
    if scaling is None or scaling.query_growth is None:
        return q
    placed = rows.in_documents(q.shape[1])
    placed = jnp.arange(q.shape[1])[None, :] if placed is None else placed
    factor = 1 + scaling.query_growth * jnp.log1p((placed // scaling.original).astype(jnp.float32))
    return q * factor[:, :, None, None].astype(q.dtype)


def _scaled(frequency: jax.Array, scaling: RopeScaling, theta: float, length: int | jax.Array) -> tuple[jax.Array, float]:
    if scaling.kind == "dynamic":
        return frequency, 1.0
    if scaling.kind == "yarn":
        return _yarn(frequency, scaling, theta)
    if scaling.kind == "linear":
        return frequency / scaling.factor, scaling.magnitude or 1.0
    if scaling.kind == "llama3":
        turns = frequency * scaling.original / (2 * math.pi)
        # 0 for a frequency that is divided, 1 for one that is kept.
        kept = jnp.clip((turns - scaling.low) / (scaling.high - scaling.low), 0.0, 1.0)
        return frequency / scaling.factor * (1 - kept) + frequency * kept, scaling.magnitude or 1.0
    is_long = length > scaling.original
    if isinstance(is_long, bool):
        divisors = jnp.array(scaling.long if is_long else scaling.short, jnp.float32)
    else:
        long, short = (jnp.array(divisors, jnp.float32)[None, None, :] for divisors in (scaling.long, scaling.short))
        divisors = jnp.where(is_long, long, short)
    usual = 1.0 if scaling.factor <= 1 else math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original))
    return jnp.broadcast_to(frequency, divisors.shape) / divisors, scaling.magnitude or usual


def _yarn(frequency: jax.Array, scaling: RopeScaling, theta: float) -> tuple[jax.Array, float]:
    half = frequency.shape[0]
    # The numbers, with fractions, of the frequencies that turn `fast` and `slow` times in the original length.
    low, high = (half * math.log(scaling.original / (turns * 2 * math.pi)) / math.log(theta) for turns in (scaling.fast, scaling.slow))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    # 1 for a frequency that is divided, 0 for one that is kept.
    divided = jnp.clip((jnp.arange(half, dtype=jnp.float32) - low) / (high - low or 1e-3), 0.0, 1.0)
    usual = 0.1 * math.log(max(scaling.factor, 1.0)) + 1
    return frequency * (1 - divided) + frequency / scaling.factor * divided, scaling.magnitude or usual
