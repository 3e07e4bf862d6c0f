"""Matmuls in eight bits: e4m3 in the forward pass, which needs precision, e5m2 for cotangents, which need range (arXiv 2209.05433).

Each array has one scale, which maps its own largest value to the format's largest, as in torchao's dynamic tensorwise scaling: no history
of past steps has to be checkpointed. XLA turns scale, convert and dot into one cuBLASLt matmul on GPUs of compute capability 8.9 and
newer. Rounding has no useful derivative, so the backward pass is written out.

Arrays keep their dims: a dim that merges batch and sequence could not be split over devices if both are.

A scale depends on all rows, in a pipeline on the rows of a microbatch, which `signal.per_microbatch` says. k is the dim that is contracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
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


def dot(x: jax.Array, kernel: jax.Array, dimension_numbers: Any, **_: Any) -> jax.Array:
    """x [..., k] · kernel [k, n] → [..., n] in the type of x: the `dot_general` of an nnx.Linear."""
    assert dimension_numbers == (((x.ndim - 1,), (0,)), ((), ())), dimension_numbers
    return dots(x, [kernel])[0]


def dots(x: jax.Array, kernels: Sequence[jax.Array], name: str | None = None) -> tuple[jax.Array, ...]:
    """x [..., k] · each kernel [k, n_i] → [..., n_i] in the type of x, which is rounded once.

    name: the name of x in eight bits as a tensor of the signal.
    """
    with signal.per_microbatch():
        return cast("tuple[jax.Array, ...]", _products(name, x, *kernels))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(name: str | None, x: jax.Array, *kernels: jax.Array) -> tuple[jax.Array, ...]:
    return _forward(name, x, *kernels)[0]


def _forward(name: str | None, x: jax.Array, *kernels: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[Scaled, list[Scaled]]]:
    a, sides = scaled(x, jnp.float8_e4m3fn, name), [scaled(kernel, jnp.float8_e4m3fn) for kernel in kernels]
    return tuple(scaled_dot(a, b, (x.ndim - 1,), (0,), x.dtype) for b in sides), (a, sides)


def _backward(name: str | None, residuals: tuple[Scaled, list[Scaled]], cotangents: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    (a, sides), dtype = residuals, cotangents[0].dtype
    last, rows = a[0].ndim - 1, range(a[0].ndim - 1)
    rounded = [scaled(cotangent, jnp.float8_e5m2) for cotangent in cotangents]
    by_x = reduce(jnp.add, (scaled_dot(c, b, (last,), (1,), dtype) for c, b in zip(rounded, sides, strict=True)))
    return by_x, *(scaled_dot(a, c, rows, rows, dtype) for c in rounded)


_products.defvjp(_forward, _backward)


@jax.custom_vjp
def ragged_dot(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """As `jax.lax.ragged_dot`: rows [n, k] that are sorted by group, weights [e, k, m], sizes [e] → [n, m] in the type of rows.

    Each row has its own scale, because its result must not depend on other rows, and so has each group's matrix. The gradient of
    weights is a sum over rows, so their scales cannot be taken out of it: there all rows have one.
    """
    return _ragged_forward(rows, weights, sizes)[0]


def _ragged_forward(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    (x, by_row), (w, by_group) = scaled(rows, jnp.float8_e4m3fn, over=(1,)), scaled(weights, jnp.float8_e4m3fn, over=(1, 2))
    y = jax.lax.ragged_dot(x, w, sizes, preferred_element_type=rows.dtype)
    scale = by_row * _of_rows(by_group, sizes, len(rows))
    return (y * scale).astype(rows.dtype), (rows, w, by_group, sizes)


def _ragged_backward(residuals: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    rows, w, by_group, sizes = residuals
    n, dtype = len(rows), cotangent.dtype
    c, by_row = scaled(cotangent, jnp.float8_e5m2, over=(1,))
    by_rows = jax.lax.ragged_dot_general(c, w, sizes, _TRANSPOSED, preferred_element_type=dtype)
    by_rows = by_rows * (by_row * _of_rows(by_group, sizes, n))
    # Rows behind the last group may be NaN, which must not be the largest value.
    is_in_group = (jnp.arange(n) < jnp.sum(sizes))[:, None]
    x, c = (jnp.where(is_in_group, side, 0) for side in (rows, cotangent))
    (x, of_x), (c, of_c) = scaled(x, jnp.float8_e4m3fn), scaled(c, jnp.float8_e5m2)
    by_weights = jax.lax.ragged_dot_general(x, c, sizes, _OUTER, preferred_element_type=jnp.float32)
    return by_rows.astype(dtype), (by_weights * (of_x * of_c)).astype(dtype), None


ragged_dot.defvjp(_ragged_forward, _ragged_backward)


def _of_rows(by_group: jax.Array, sizes: jax.Array, num_rows: int) -> jax.Array:
    """Scales of groups [e, 1, 1] as scales of their rows, [n, 1]."""
    return jnp.repeat(by_group[:, 0], sizes, axis=0, total_repeat_length=num_rows)


_TRANSPOSED = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,)
)
_OUTER = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=()
)


def scaled(x: jax.Array, dtype: Any, name: str | None = None, *, over: _Dims | None = None) -> Scaled:
    """x in eight bits of this type. over: the dims that share a scale, which has size 1 there; None: one scalar for all."""
    largest = float(jnp.finfo(dtype).max)
    most = jnp.max(jnp.abs(x), axis=None if over is None else tuple(over), keepdims=over is not None)
    # The lower limit keeps an array of zeros from being divided by zero.
    scale = jnp.maximum(most.astype(jnp.float32), 1e-30) / largest
    # Clipped, because rounding in the division may pass the largest value, which e4m3 would make NaN.
    values = jnp.clip(x.astype(jnp.float32) / scale, -largest, largest).astype(dtype)
    # Where a rule gathers the value, the partitioner would gather x, in four times the bytes, if it could join the two.
    return values if name is None else signal.tensor(jax.lax.optimization_barrier(values), name), scale


def scaled_dot(a: Scaled, b: Scaled, of_a: _Dims, of_b: _Dims, dtype: Any) -> jax.Array:
    """The product, contracted over these dims of both sides."""
    # XLA recognises this form: eight bits, converted, times a scalar, into a dot.
    left, right = (values.astype(dtype) * scale.astype(dtype) for values, scale in (a, b))
    return jax.lax.dot_general(left, right, ((tuple(of_a), tuple(of_b)), ((), ())), preferred_element_type=dtype)
