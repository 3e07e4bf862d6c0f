"""Matmuls with both sides in eight bits, and a scale a tensor (arXiv 2209.05433): e4m3 forward, e5m2 for gradients.

A scale is that of the tensor at hand, its largest value on the format's largest, so there is no state of past steps (as torchao's dynamic
tensorwise scaling). XLA makes one cuBLASLt matmul of scale, convert and dot on GPUs of compute capability 8.9 and newer.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Scaled = tuple[jax.Array, jax.Array]


def dot_general(x: jax.Array, kernel: jax.Array, dimension_numbers: Any, **_: Any) -> jax.Array:
    """jax.lax.dot_general for nnx.Linear: x [..., k] · kernel [k, n] → [..., n], in the type of x."""
    assert dimension_numbers == (((x.ndim - 1,), (0,)), ((), ())), dimension_numbers
    return _matmul(x.reshape(-1, x.shape[-1]), kernel).reshape(*x.shape[:-1], -1)


@jax.custom_vjp
def _matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _forward(x, kernel)[0]


def _forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[Scaled, Scaled, jax.Array]]:
    a, b = _scaled(x, jnp.float8_e4m3fn), _scaled(kernel, jnp.float8_e4m3fn)
    # Of the types only an empty array needs to be kept.
    return _dot(a, b, (1, 0), x.dtype), (a, b, jnp.zeros((0,), kernel.dtype))


def _backward(kept: tuple[Scaled, Scaled, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    a, b, like = kept
    c = _scaled(cotangent, jnp.float8_e5m2)
    return _dot(c, b, (1, 1), cotangent.dtype), _dot(a, c, (0, 0), like.dtype)


_matmul.defvjp(_forward, _backward)


def _scaled(x: jax.Array, dtype: Any) -> Scaled:
    """x in eight bits, and what to multiply it by."""
    largest = float(jnp.finfo(dtype).max)
    scale = jnp.maximum(jnp.max(jnp.abs(x)).astype(jnp.float32), 1e-30) / largest
    return jnp.clip(x.astype(jnp.float32) / scale, -largest, largest).astype(dtype), scale


def _dot(a: Scaled, b: Scaled, contracted: tuple[int, int], dtype: Any) -> jax.Array:
    left, right = (values.astype(dtype) * scale.astype(dtype) for values, scale in (a, b))
    return jax.lax.dot_general(left, right, (((contracted[0],), (contracted[1],)), ((), ())), preferred_element_type=dtype)
