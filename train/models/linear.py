"""The linear layer and the norm, and the operations between matmuls, which a backward pass computes again.

Parameters are f32, and a matmul runs in the type that `model.dtype` names, so the kernel is cast each time it is used. With `model.fp8`
both sides are rounded to eight bits as well (`eight_bits.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx, traceback_util

from jgt import signal

from . import eight_bits
from .config import ModelConfig, OwnModel

# A plan names the source line of each matmul. Without this it would be a line of this file for most of them, not the model's.
traceback_util.register_exclusion(__file__)

READING_INIT = nnx.initializers.variance_scaling(1.0, "fan_in", "normal")
"""The initializer of a kernel that reads the residual stream: outputs start with the variance of the inputs."""

_F = TypeVar("_F", bound=Callable[..., Any])


def adding_init(num_layers: int) -> nnx.Initializer:
    """The initializer of a kernel that adds to the residual stream, which keeps its variance: two in each layer do (GPT-2, section 2.3)."""
    return nnx.initializers.variance_scaling(1.0 / (2 * num_layers), "fan_in", "normal")


def compute_type(config: ModelConfig | OwnModel) -> jnp.dtype:
    """The type of activations, and of matmuls unless they run in eight bits."""
    return jnp.dtype(jnp.bfloat16 if config.dtype == "bf16" else jnp.float32)


def linear(
    config: ModelConfig, size_in: int, size_out: int, init: nnx.Initializer = READING_INIT, *, use_bias: bool, rngs: nnx.Rngs
) -> nnx.Linear:
    """A layer [..., size_in] → [..., size_out] of a model."""
    dot = eight_bits.dot if config.fp8 else jax.lax.dot_general
    return nnx.Linear(size_in, size_out, use_bias=use_bias, dtype=compute_type(config), dot_general=dot, kernel_init=init, rngs=rngs)


def read_by(x: jax.Array, *layers: nnx.Linear) -> list[jax.Array]:
    """x [..., k] through each of several layers that read it. In eight bits it is rounded once for all of them."""
    # It has another name than the norm's result: rules may split that along the sequence and gather what the matmuls read. Both are in the
    # type of the matmuls, so that is the type which travels.
    if layers[0].dot_general is not eight_bits.dot:
        x = signal.tensor(x, "operand")
        return [layer(x) for layer in layers]
    made = eight_bits.dots(x, [layer.kernel[...].astype(x.dtype) for layer in layers], "operand")
    return [_biased(y, layer) for y, layer in zip(made, layers, strict=True)]


def _biased(y: jax.Array, layer: nnx.Linear) -> jax.Array:
    return y if layer.bias is None else y + layer.bias[...].astype(y.dtype).reshape(*(1,) * (y.ndim - 1), -1)


def cheap(function: _F) -> _F:
    """A function of norms and elementwise operations, whose backward pass reads its operands and computes the rest again.

    On a GPU reading three arrays takes longer than computing them from one, and on a CPU it takes as long. The results of its sums are
    kept as well: they are small, and a sum over a sharded dim would be sent again.
    """
    # Layers run in a scan, which is a barrier to common subexpression elimination already; JAX's own would only cost speed.
    return jax.checkpoint(function, policy=_is_sum, prevent_cse=False)  # pyright: ignore[reportReturnType]


def _is_sum(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive is jax.lax.reduce_sum_p


def gated(config: ModelConfig, gate: jax.Array, up: jax.Array) -> jax.Array:
    """The hidden units of a gated MLP (SwiGLU, arXiv 2002.05202)."""
    return cheap(_gate(config.activation, config.swiglu_alpha, config.swiglu_limit, config.swiglu_offset))(gate, up)


ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
}
"""By their names in `model.activation`. gelu is exact, gelu_tanh the usual approximation of it."""


# One function for the same options, since JAX stores what it traces by function.
@cache
def _gate(activation: str, alpha: float, limit: float | None, offset: float) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def hidden(gate: jax.Array, up: jax.Array) -> jax.Array:
        if limit is not None:
            gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        active = ACTIVATIONS[activation](gate) if alpha == 1 else gate * jax.nn.sigmoid(alpha * gate)
        return active * (up if offset == 0 else up + offset)

    return hidden


class OffsetRMSNorm(nnx.Module):
    """RMSNorm (arXiv 1910.07467) over the last dim whose factor is 1 + scale, as in Gemma (arXiv 2403.08295), all of it in f32."""

    def __init__(self, size: int, *, epsilon: float, dtype: jnp.dtype, rngs: nnx.Rngs):
        del rngs
        self.scale = nnx.Param(jnp.zeros(size, jnp.float32))
        self.epsilon, self.dtype = epsilon, dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        factor = (1 + self.scale[...]).reshape(*(1,) * (x.ndim - 1), -1)
        return (normed * factor).astype(self.dtype)


_NORMS: Mapping[str, Callable[..., nnx.Module]] = {
    "rms": nnx.RMSNorm,
    "rms_plus_one": OffsetRMSNorm,
    "layer": nnx.LayerNorm,
    "layer_unbiased": partial(nnx.LayerNorm, use_bias=False),
}


def make_norm(config: ModelConfig, size: int, rngs: nnx.Rngs) -> Any:
    """The norm of a model over a last dim of this size."""
    return _NORMS[config.norm](size, epsilon=config.norm_eps, dtype=compute_type(config), rngs=rngs)
