"""Matrices of a layer, applied in the type that the model computes in."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from train.models import fp8
from train.models.config import ModelConfig
from train.models.weights import INTO


def compute_type(config: ModelConfig) -> jnp.dtype:
    """Of activations, and of matmuls unless they run in eight bits."""
    return jnp.dtype(jnp.bfloat16 if config.dtype == "bf16" else jnp.float32)


def linear(config: ModelConfig, size_in: int, size_out: int, init: nnx.Initializer = INTO, *, use_bias: bool, rngs: nnx.Rngs) -> nnx.Linear:
    """[..., size_in] → [..., size_out]."""
    dot = fp8.dot_general if config.fp8 else jax.lax.dot_general
    return nnx.Linear(size_in, size_out, use_bias=use_bias, dtype=compute_type(config), dot_general=dot, kernel_init=init, rngs=rngs)
