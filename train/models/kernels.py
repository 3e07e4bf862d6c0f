"""The kernels that can compute attention.

The same attention can run as a program of XLA's own operations or as one fused kernel of a library. A kernel is faster and keeps no score
matrix, but it has conditions: a kind of device, a dtype, sizes of heads. So each kernel is one object here, with its function and with the
reason why it is not available to a model on a device, if there is one. `model.attention: auto` takes the first kernel without such a
reason, XLA's at the latest, and the run logs the choice. What jgt has to know of a kernel (its name in JAX, its FLOPs) is an
object of the same name in `jgt/program/kernels.py`. Others ask a kernel for its properties, not for its name.

XLA's program keeps one array of scores for its backward pass. The scores [b, n, s, s] are the largest array of a layer.
`jax.nn.dot_product_attention` keeps four of that shape: the mask, the scores with the mask, their exponentials, and the probabilities in
the type of the values. The last one suffices. With p = softmax(x) and the cotangent g of p, the cotangent of x is p · (g − Σ g · p), which
is zero where p is: so neither the scores nor the mask are read again. In bf16 the derivative of the softmax reads the probabilities as the
values' matmul has them, rounded to bf16. Its sums are in f32.

b batch, s seq, n query heads, k key/value heads, g query heads of a key/value head, h head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from .config import ModelConfig

Attend = Callable[..., jax.Array]
"""attend(q [b, s, n, h], k [b, s, k, h], v [b, s, k, h], mask=bool [b, 1, s, s] or None) → [b, s, n, h]: causal attention.

A key/value head serves n / k query heads. mask: which pairs of a query and a key may meet, apart from their order; None: all of them.
Models that need them also pass scale (of the scores), softcap (their limit), window (the number of tokens that a token sees) and sinks,
f32[n]: a score of each query head that joins the softmax's sum, as of one more key whose value is zero (arXiv 2309.17453).
"""


@dataclass(frozen=True, kw_only=True)
class AttentionKernel:
    """A way to compute attention.

    name: its name in `model.attention`. label: its name in the log. keeps_scores: whether its backward pass reads the scores
    [b, n, s, s] that its forward pass leaves in memory. forward: how the name of the JAX primitive begins that is its forward pass; empty
    if that is several primitives. obstacle(config, device, sharing): why the model cannot have it there; empty if it can.
    splits_mask: whether JAX splits its mask over devices by the mask's own layout, so that a device may get the mask of other rows.
    """

    name: str
    label: str
    attend: Attend
    keeps_scores: bool
    forward: str = ""
    obstacle: Callable[[ModelConfig, Any, int], str]
    splits_mask: bool = False


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """The kernel of a run, and why the preferred one is not available; empty if this is the preferred one."""

    kernel: AttentionKernel
    why: str = ""

    @property
    def text(self) -> str:
        """The choice as a line of the log says it."""
        return f"{self.kernel.label} ({self.why})" if self.why else self.kernel.label


def choose_attention(config: ModelConfig, device: Any, *, sharing: int = 1) -> AttentionChoice:
    """The first kernel of those that `model.attention` allows, all of them with auto, that the model can have; XLA's otherwise.

    device: one of the run's, which may be a description of an absent GPU; None if nothing is known of them. sharing: the number of
    devices that compute a stage of a pipeline together on the same tokens.
    """
    why = ""
    for kernel in KERNELS:
        if config.attention in ("auto", kernel.name):
            obstacle = kernel.obstacle(config, device, sharing)
            if not obstacle:
                return AttentionChoice(kernel=kernel, why=why)
            why = why or obstacle
    return AttentionChoice(kernel=XLA, why=why)


def _cudnn_obstacle(config: ModelConfig, device: Any, sharing: int) -> str:
    if device is None or device.platform != "gpu" or "NVIDIA" not in device.device_kind:
        return "there is no NVIDIA GPU"
    if config.dtype != "bf16":
        return "it needs model.dtype: bf16"
    if config.attention_softcap is not None:
        return "it has no attention_softcap"
    if config.attention_sinks:
        return "it has no attention_sinks"
    if config.window is not None and config.window < config.seq and config.full_layers:
        return "its window is the same in all layers"
    if config.num_kv_heads % sharing:
        return f"its {config.num_kv_heads} kv_heads do not divide over the {sharing} devices of a pipeline's stage"
    # [1, s, n, h] and [1, s, k, h]
    sizes = ((config.heads, config.head_size), (config.num_kv_heads, config.head_size), (config.num_kv_heads, config.value_size))
    q, k, v = (jax.ShapeDtypeStruct((1, config.seq, *size), jnp.bfloat16) for size in sizes)

    def summed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        window = {} if config.window is None or config.window >= config.seq else {"window": config.window}
        return jnp.sum(CUDNN.attend(q, k, v, **window).astype(jnp.float32))

    try:
        # The gradient is traced too, because the backward kernel has other conditions.
        jax.eval_shape(partial(jax.grad(summed), q), k, v)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        # JAX knows best which sizes this cuDNN supports on this GPU, and raises while it traces.
        return str(error).splitlines()[0].rstrip(".")
    return ""


# -- XLA's program -----------------------------------------------------------------------------------------------------


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """q [b, s, n, h], k and v [b, s, k, h], mask bool [b, 1, s, s] or None → [b, s, n, h]. Scores and softmax are in f32."""
    s = q.shape[1]
    is_seen = jnp.tril(jnp.ones((s, s), bool))
    if window is not None:
        is_seen = is_seen & (jnp.arange(s)[:, None] - jnp.arange(s)[None, :] < window)
    is_seen = is_seen[None, None, None]
    # [b, 1, s, s] → [b, 1, 1, s, s]
    return attend_to(q, k, v, is_seen if mask is None else is_seen & mask[:, :, None], scale=scale, softcap=softcap, sinks=sinks)


def attend_to(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    is_seen: jax.Array,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Queries [b, t, n, h], and keys and values [b, s, k, h] of which each query sees some, bool [b, 1, 1, t, s] → [b, t, n, h]."""
    (b, t, _, h), heads = q.shape, k.shape[2]
    # The heads of queries and keys have one width, those of values and results may have another.
    # [b, t, n, h] → [b, t, k, g, h]: the query heads of a key/value head are neighbours.
    grouped = q.reshape(b, t, heads, -1, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32) * (scale or h**-0.5)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    sinks = None if sinks is None else sinks.reshape(1, heads, -1, 1, 1)
    return jnp.einsum("bkgts,bskh->btkgh", _probabilities(scores, is_seen, sinks, v.dtype), v).reshape(*q.shape[:3], -1)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _probabilities(scores: jax.Array, is_seen: jax.Array, sinks: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """The softmax over the last dim of those scores [b, k, g, s, s] that a query sees, in `dtype`. sinks: [1, k, g, 1, 1]."""
    seen = jnp.where(is_seen, scores, jnp.finfo(scores.dtype).min)
    return jnp.asarray(jax.nn.softmax(seen, axis=-1) if sinks is None else _with_sinks(seen, sinks)[0], dtype)


def _with_sinks(seen: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The softmax over scores [..., s] and a sink [..., 1]: the probabilities of both."""
    most = jnp.maximum(jnp.max(seen, axis=-1, keepdims=True), sinks)
    weights, of_sinks = jnp.exp(seen - most), jnp.exp(sinks - most)
    total = jnp.sum(weights, axis=-1, keepdims=True) + of_sinks
    return weights / total, of_sinks / total


_Kept = tuple[jax.Array, jax.Array | None]
"""The probabilities [b, k, g, s, s], and those of sinks [b, k, g, s, 1]."""


def _forward(scores: jax.Array, is_seen: jax.Array, sinks: jax.Array | None, dtype: jnp.dtype) -> tuple[jax.Array, _Kept]:
    if sinks is None:
        p = jnp.asarray(_probabilities(scores, is_seen, None, dtype))
        return p, (p, None)
    p, of_sinks = _with_sinks(jnp.where(is_seen, scores, jnp.finfo(scores.dtype).min), sinks)
    p = p.astype(dtype)
    return p, (p, of_sinks)


def _backward(dtype: jnp.dtype, kept: _Kept, g: jax.Array) -> tuple[jax.Array, None, jax.Array | None]:
    (p, of_sinks), g = kept, g.astype(jnp.float32)
    p = p.astype(jnp.float32)
    mean = jnp.sum(g * p, axis=-1, keepdims=True)
    # The value of a sink is zero, and so is the cotangent of its probability.
    return p * (g - mean), None, None if of_sinks is None else -jnp.sum(of_sinks * mean, axis=(0, 3, 4), keepdims=True)


_probabilities.defvjp(_forward, _backward)


def _attend_by_cudnn(q: jax.Array, k: jax.Array, v: jax.Array, *, window: int | None = None, **options: Any) -> jax.Array:
    if q.shape[-1] != v.shape[-1]:
        # JAX's public function has values of the keys' width only, though the kernel has others (multi-head latent attention).
        options = {"scale": q.shape[-1] ** -0.5, "sliding_window_length": window, **options}
        made: Any = cudnn.dot_product_attention(q, k, v, mask_type=cudnn.MaskType.CAUSAL, **options)
        return made
    limited = {} if window is None else {"local_window_size": (window - 1, 0)}
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn", **limited, **options)


CUDNN = AttentionKernel(
    name="cudnn",
    label="cuDNN's kernel",
    attend=_attend_by_cudnn,
    keeps_scores=False,
    forward="dot_product_attention_fwd",
    obstacle=_cudnn_obstacle,
    splits_mask=True,
)
XLA = AttentionKernel(
    name="xla",
    label="XLA's program",
    attend=_attend,
    keeps_scores=True,
    obstacle=lambda config, device, sharing: "",
)
KERNELS = (CUDNN, XLA)
"""In the order in which `auto` prefers them."""
