# pyright: basic
"""cuDNN's attention as a kernel of blocks.

JAX's public function does not do: its log-sum-exp has the type of q, and the derivative takes it for a constant. So the primitives of the
forward and of the backward pass are called here as they are. The forward one returns the log-sum-exp in f32, and the backward one takes
that of all keys.

This file depends on internals of JAX, whose facts are in tests/replacements/context/test_cudnn.py.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from jgt.program.jaxpr import Equation
from jgt.program.kernels import CUDNN as NAMES
from jgt.replacements.context.blocks import Block, BlockGradients, BlockKernel, KeptRows

_NUM_OTHERS = 6
"""Lengths, offsets and pages, which stay empty."""
_MORE = {"score_mod": None} if "score_mod" in inspect.signature(cudnn.dot_product_attention).parameters else {}
"""jax 0.12 may change scores by a function of the user's."""
_UNSEEN = -1e9
"""It is added to the scores of keys that a query does not see, since cuDNN takes no mask."""


def is_attention(equation: Equation) -> bool:
    """Whether an equation is cuDNN's forward pass on [b, s, n, h], without dropout, lengths or offsets."""
    params = equation.params
    return (
        equation.primitive.name in NAMES.primitives
        and "is_training" in params
        and not params["dropout_rate"]
        and params.get("score_mod") is None
        and params["layout"] == cudnn.AttentionLayout.BTNH.value
        and params["mask_type"] in (cudnn.MaskType.NO_MASK, cudnn.MaskType.CAUSAL)
    )


def options(equation: Equation) -> tuple[float, bool, int | None]:
    """The scale of an equation that is attention, whether it is causal, and its window."""
    params = equation.params
    return params["scale"], params["mask_type"] == cudnn.MaskType.CAUSAL, params["sliding_window_length"]


def obstacle(q: Any, k: Any, v: Any, device: Any) -> str:
    """Why a device cannot have this kernel for q [b, c, n, h], k [b, d, k, h] and v [b, d, k, u]; empty if it can."""
    if device is None or "NVIDIA" not in device.device_kind:
        return "there is no NVIDIA GPU"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it has no {q.dtype}"
    try:
        jax.eval_shape(lambda q, k, v: cudnn.dot_product_attention(q, k, v, mask_type=cudnn.MaskType.CAUSAL), q, k, v)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        # JAX knows best which sizes this cuDNN supports, and raises while it traces.
        return str(error).splitlines()[0].rstrip(".")
    return ""


def _options(seen: jax.Array | None, is_causal: bool, scale: float) -> dict[str, object]:
    return {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (seen is not None, False),
        "mask_type": cudnn.MaskType.CAUSAL if is_causal and seen is None else cudnn.MaskType.NO_MASK,
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
        **_MORE,
    }


def _operands(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array | None) -> list[jax.Array]:
    nothing = jnp.zeros((0,), q.dtype)
    bias = nothing if seen is None else jnp.where(seen[:, None], 0.0, _UNSEEN).astype(q.dtype)
    return [q, k, v, bias, *[nothing] * _NUM_OTHERS]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array | None, is_causal: bool, scale: float) -> Block:
    run = cudnn._dot_product_attention_fwd_p_wrapper
    out, lse = run.bind(*_operands(q, k, v, seen), is_training=True, **_options(seen, is_causal, scale))
    return Block(out.astype(jnp.float32), lse)


def _backward(rows: KeptRows, seen: jax.Array | None, is_causal: bool, scale: float) -> BlockGradients:
    q, k, v, out, lse, cotangent = rows
    run = cudnn._dot_product_attention_bwd_p_wrapper
    grads = run.bind(*_operands(q, k, v, seen), lse, out.astype(q.dtype), cotangent, **_options(seen, is_causal, scale))
    return BlockGradients(*(x.astype(jnp.float32) for x in grads[:3]))


CUDNN_BLOCKS = BlockKernel(forward=_forward, backward=_backward)
