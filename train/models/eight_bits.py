"""Matmuls in eight bits: e4m3 in the forward pass, which needs precision, e5m2 for cotangents, which need range (arXiv 2209.05433).

Each array has one scale, which maps its own largest value to the format's largest, as in torchao's dynamic tensorwise scaling: no history
of past steps has to be checkpointed. XLA turns scale, convert and dot into one cuBLASLt matmul on GPUs of compute capability 8.9 and
newer. Rounding has no useful derivative, so the backward pass is written out.

On a mesh, three things keep eight bits from costing more traffic than sixteen. Arrays keep their dims: a dim that merges batch and sequence
has no sharding if both are split, and a reduce-scatter would become an all-reduce. Layers that read one array are one matmul: a cotangent
that each of them scales by itself is summed over devices for each of them. And rules can gather what is rounded already, by its name.

A scale depends on all rows, in a pipeline on those of a microbatch, which `signal.per_microbatch` says.

k the dim that is contracted, n columns, g groups of columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import traceback_util

from jgt import signal

# A plan names the source line of each matmul. Without this it would be a line of this file for all of them, not the model's.
traceback_util.register_exclusion(__file__)

Scaled = tuple[jax.Array, jax.Array]
"""An array in eight bits, and the f32 scalar or array to multiply it by."""

_Dims = Sequence[int]


def dot(wide: bool, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [..., k] · kernel [k, n] → [..., n] in the type of x. wide: see `linear.Dot.has_wide_gradients`."""
    with signal.per_microbatch():
        return _matmul(wide, None, x, kernel)


def dots(wide: bool, x: jax.Array, kernels: Sequence[jax.Array], *, groups: int, name: str) -> list[jax.Array]:
    """x [..., k] · each kernel [k, n_i] → [..., n_i] in the type of x, by one matmul.

    groups: a divisor of each n_i. Rules may split the columns of all kernels into as many parts: each part has columns of all kernels.
    name: the signal's tensor that is x in eight bits.
    """
    # [k, n_i] → [k, g, n_i / g] → [k, g, Σ n_i / g]
    side = jnp.concatenate([kernel.reshape(kernel.shape[0], groups, -1) for kernel in kernels], axis=-1)
    ends = list(itertools.accumulate(kernel.shape[1] // groups for kernel in kernels))
    with signal.per_microbatch():
        made = cast(jax.Array, _matmul(wide, name, x, side))  # [..., g, Σ n_i / g]
    return [part.reshape(*x.shape[:-1], -1) for part in jnp.split(made, ends[:-1], axis=-1)]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _matmul(wide: bool, name: str | None, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [..., k] · kernel [k, *columns] → [..., *columns]."""
    return _forward(wide, name, x, kernel)[0]


def _forward(wide: bool, name: str | None, x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[Scaled, Scaled, jax.Array]]:
    a, b = scaled(x, jnp.float8_e4m3fn, name), scaled(kernel, jnp.float8_e4m3fn)
    # The backward pass needs the kernel's type. Residuals are arrays, so an empty one carries it.
    return scaled_dot(a, b, (x.ndim - 1,), (0,), x.dtype), (a, b, jnp.zeros((0,), kernel.dtype))


def _backward(
    wide: bool, name: str | None, residuals: tuple[Scaled, Scaled, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    a, b, like_kernel = residuals
    c = scaled(cotangent, jnp.float8_e5m2)
    rows = range(a[0].ndim - 1)
    columns = range(len(rows), cotangent.ndim)
    by_x = scaled_dot(c, b, columns, range(1, b[0].ndim), cotangent.dtype)
    by_kernel = scaled_dot(a, c, rows, rows, jnp.float32 if wide else like_kernel.dtype)
    return by_x, by_kernel.astype(like_kernel.dtype)


_matmul.defvjp(_forward, _backward)


def scaled(x: jax.Array, dtype: Any, name: str | None = None, *, over: _Dims | None = None) -> Scaled:
    """x in eight bits of this type. over: the dims that share a scale, which has size 1 there; None: one scalar for all."""
    largest = float(jnp.finfo(dtype).max)
    most = jnp.max(jnp.abs(x), axis=None if over is None else tuple(over), keepdims=over is not None)
    # The lower limit keeps an array of zeros from being divided by zero.
    scale = jnp.maximum(most.astype(jnp.float32), 1e-30) / largest
    # Clipped, because rounding in the division may pass the largest value, which e4m3 would make NaN.
    values = jnp.clip(x.astype(jnp.float32) / scale, -largest, largest).astype(dtype)
    return values if name is None else signal.tensor(values, name), scale


def scaled_dot(a: Scaled, b: Scaled, of_a: _Dims, of_b: _Dims, dtype: Any) -> jax.Array:
    """The product, contracted over these dims of both sides."""
    # XLA recognises this form: eight bits, converted, times a scalar, into a dot.
    left, right = (values.astype(dtype) * scale.astype(dtype) for values, scale in (a, b))
    return jax.lax.dot_general(left, right, ((tuple(of_a), tuple(of_b)), ((), ())), preferred_element_type=dtype)
