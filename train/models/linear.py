"""The linear layer: x [..., k] · kernel [k, n] → [..., n], in the model's type or in eight bits.

Parameters are f32, and a matmul runs in the type that `model.dtype` names, so the kernel is cast each time it is used. With `model.fp8`
both sides are rounded to eight bits as well (`eight_bits.py`). In the model's type the backward pass is written out here, because JAX's own
runs slowly on CPUs.

nnx.Linear takes both as its `dot_general`, so the layer keeps its parameters' names.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx, traceback_util

from jgt import signal

from . import eight_bits
from .config import ModelConfig, OwnModel

# A plan names the source line of each matmul. Without this it would be a line of this file for all of them, not the model's.
traceback_util.register_exclusion(__file__)

READING_INIT = nnx.initializers.variance_scaling(1.0, "fan_in", "normal")
"""For a kernel that reads the residual stream: outputs start with the variance of the inputs."""


def adding_init(num_layers: int) -> nnx.Initializer:
    """For a kernel that adds to the residual stream, which two in each layer do: their sum keeps its variance (GPT-2, section 2.3)."""
    return nnx.initializers.variance_scaling(1.0 / (2 * num_layers), "fan_in", "normal")


def compute_type(config: ModelConfig | OwnModel) -> jnp.dtype:
    """The type of activations, and of matmuls unless they run in eight bits."""
    return jnp.dtype(jnp.bfloat16 if config.dtype == "bf16" else jnp.float32)


def linear(
    config: ModelConfig, size_in: int, size_out: int, init: nnx.Initializer = READING_INIT, *, use_bias: bool, rngs: nnx.Rngs
) -> nnx.Linear:
    """A layer [..., size_in] → [..., size_out] of a model."""
    dot = Dot(has_eight_bits=config.fp8)
    return nnx.Linear(size_in, size_out, use_bias=use_bias, dtype=compute_type(config), dot_general=dot, kernel_init=init, rngs=rngs)


def read_by(x: jax.Array, *layers: nnx.Linear, groups: int) -> list[jax.Array]:
    """x [..., k] through each of several layers that read it. In eight bits they are one matmul, whose columns are in `groups` groups."""
    # A name of its own besides the norm's: rules may split the norm's result along the sequence and gather what the matmuls read. Both
    # are in the type of the matmuls, so that is the type which travels.
    dot = cast(Dot, layers[0].dot_general)
    if not dot.has_eight_bits:
        x = signal.tensor(x, "operand")
        return [layer(x) for layer in layers]
    kernels = [layer.kernel[...].astype(x.dtype) for layer in layers]
    made = eight_bits.dots(dot.has_wide_gradients, x, kernels, groups=groups, name="operand")
    return [_biased(y, layer) for y, layer in zip(made, layers, strict=True)]


def _biased(y: jax.Array, layer: nnx.Linear) -> jax.Array:
    return y if layer.bias is None else y + layer.bias[...].astype(y.dtype).reshape(*(1,) * (y.ndim - 1), -1)


@dataclass(frozen=True, kw_only=True)
class Dot:
    """x [..., k] · kernel [k, n] → [..., n] in the type of x; called as jax.lax.dot_general is.

    has_wide_gradients: the sums over positions that are the kernel's gradient leave the matmul in f32. Devices then add up theirs in f32;
    what the caller gets has the kernel's type in any case.
    """

    has_eight_bits: bool = False
    has_wide_gradients: bool = False

    def __call__(self, x: jax.Array, kernel: jax.Array, dimension_numbers: Any, **_: Any) -> jax.Array:
        assert dimension_numbers == (((x.ndim - 1,), (0,)), ((), ())), dimension_numbers
        dot = eight_bits.dot if self.has_eight_bits else _matmul
        return dot(self.has_wide_gradients, x, kernel)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(wide: bool, x: jax.Array, kernel: jax.Array) -> jax.Array:
    del wide
    return _product(x, kernel)


def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))  # [..., k] · [k, n] → [..., n]


def _forward(wide: bool, x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # Not by `_matmul`, whose call would hide the matmul from a policy of jax.checkpoint.
    return _product(x, kernel), (x, kernel)


def _backward(wide: bool, residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = residuals
    by_x = jax.lax.dot_general(cotangent, kernel, (((x.ndim - 1,), (1,)), ((), ())))  # [..., n] · [k, n] → [..., k]
    return by_x, _sum_of_products(x, cotangent, jnp.float32 if wide else None).astype(kernel.dtype)


_matmul.defvjp(_forward, _backward)


def _sum_of_products(a: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
    """a [..., k], b [..., n] → [k, n], summed over all positions. dtype: of the result; None: that of a and b.

    XLA's CPU backend transposes the left side of such a matmul, and fuses what computes that side into the transposed order, which is
    slow. JAX would always put the cotangent there. This puts the smaller side there; several matmuls may share it (q, k and v read one x).
    """
    positions = tuple(range(a.ndim - 1))
    if a.shape[-1] > b.shape[-1]:
        return _sum_of_products(b, a, dtype).T
    return jax.lax.dot_general(a, b, ((positions, positions), ((), ())), preferred_element_type=dtype)
