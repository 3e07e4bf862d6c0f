"""Matrices of a layer, applied in the type that the model computes in."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traceback_util

from train.models import fp8
from train.models.config import ModelConfig
from train.models.weights import INTO

# A plan names the line of a program: of a matmul that is the model's, as with nnx.Linear's own.
traceback_util.register_exclusion(__file__)


def compute_type(config: ModelConfig) -> jnp.dtype:
    """Of activations, and of matmuls unless they run in eight bits."""
    return jnp.dtype(jnp.bfloat16 if config.dtype == "bf16" else jnp.float32)


def linear(config: ModelConfig, size_in: int, size_out: int, init: nnx.Initializer = INTO, *, use_bias: bool, rngs: nnx.Rngs) -> nnx.Linear:
    """[..., size_in] → [..., size_out]."""
    dot = fp8.dot_general if config.fp8 else dot_general
    return nnx.Linear(size_in, size_out, use_bias=use_bias, dtype=compute_type(config), dot_general=dot, kernel_init=init, rngs=rngs)


def dot_general(x: jax.Array, kernel: jax.Array, dimension_numbers: Any, **_: Any) -> jax.Array:
    """jax.lax.dot_general for nnx.Linear: x [..., k] · kernel [k, n] → [..., n], in the type of x, with a backward pass of its own."""
    assert dimension_numbers == (((x.ndim - 1,), (0,)), ((), ())), dimension_numbers
    return _matmul(x, kernel)


@jax.custom_vjp
def _matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))


def _forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _matmul(x, kernel), (x, kernel)


def _backward(kept: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = kept
    by_x = jax.lax.dot_general(cotangent, kernel, (((x.ndim - 1,), (1,)), ((), ())))
    return by_x, _sum_of_products(x, cotangent)


_matmul.defvjp(_forward, _backward)


def _sum_of_products(a: jax.Array, b: jax.Array) -> jax.Array:
    """Over all positions: a [..., k], b [..., n] → [k, n].

    A CPU lays the left side of a matmul out anew, and what computes that side runs in the wrong order. JAX would take the cotangent;
    this takes the smaller one, which several matmuls may share.
    """
    positions = tuple(range(a.ndim - 1))
    if a.shape[-1] > b.shape[-1]:
        return _sum_of_products(b, a).T
    return jax.lax.dot_general(a, b, ((positions, positions), ((), ())))
