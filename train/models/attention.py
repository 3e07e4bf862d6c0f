"""Causal self-attention, and the kernels that can compute it.

The same attention can run as a program of XLA's own operations or as one fused kernel of a library. A kernel is faster and keeps no score
matrix, but it has conditions: a kind of device, a dtype, sizes of heads. So each kernel is one object here, with its function and with the
reason why it is not available to a model on a device, if there is one. `model.attention: auto` takes the first kernel without such a
reason, XLA's at the latest, and the run logs the choice. What jgt has to know of a kernel (its names in JAX and XLA, its FLOPs) is an
object of the same name in `jgt/program/kernels.py`.

Tokens of one window may belong to several documents. `segments` [b, s] then tells them apart: for each token, the position at which its
document begins. Equal entries are one document, and a token's position in its document is its position less its entry.

b batch, s seq, d embed, n query heads, k key/value heads, h head size.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jgt import signal

from . import scores
from .config import ModelConfig
from .linear import adding_init, linear, read_by

Attend = Callable[..., jax.Array]
"""attend(q [b, s, n, h], k [b, s, k, h], v [b, s, k, h], mask=bool [b, 1, s, s] or None) → [b, s, n, h]: causal attention.

A key/value head serves n / k query heads. mask: which pairs of a query and a key may meet, apart from their order; None: all of them.
"""


class Attention(nnx.Module):
    """Grouped-query attention (arXiv 2305.13245), [b, s, d] → [b, s, d], with rotary positions if the model's kind has them."""

    def __init__(self, config: ModelConfig, *, attend: Attend, use_bias: bool, rngs: nnx.Rngs):
        queries, keys = config.heads * config.head_size, config.num_kv_heads * config.head_size
        make = partial(linear, config, use_bias=use_bias, rngs=rngs)
        self.q_proj = make(config.embed, queries)
        self.k_proj = make(config.embed, keys)
        self.v_proj = make(config.embed, keys)
        self.out = make(queries, config.embed, adding_init(config.layers))
        self.attend = attend
        self.head_size, self.num_kv_heads = config.head_size, config.num_kv_heads
        self.rope_theta = config.rope_theta if config.facts.positions == "rotary" else None

    def __call__(self, x: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        made = read_by(x, self.q_proj, self.k_proj, self.v_proj)
        # [b, s, n · h] → [b, s, n, h]
        q, k, v = (y.reshape(*x.shape[:2], -1, self.head_size) for y in made)
        if self.rope_theta is not None:
            q, k = rotate(q, self.rope_theta, segments), rotate(k, self.rope_theta, segments)
        q, k, v = signal.tensor(q, "q"), signal.tensor(k, "k"), signal.tensor(v, "v")
        mask = None if segments is None else segments[:, None, :, None] == segments[:, None, None, :]  # [b, 1, s, s]
        heads = signal.tensor(self.attend(q, k, v, mask=mask), "heads")  # [b, s, n, h]
        return signal.tensor(self.out(heads.reshape(*x.shape[:2], -1)), "out")  # [b, s, n · h] → [b, s, d]


def rotate(x: jax.Array, theta: float, segments: jax.Array | None = None) -> jax.Array:
    """Rotary positions (RoFormer, arXiv 2104.09864) on [b, s, n, h].

    Element i is paired with element i + h/2, as in Llama's weights on Hugging Face, not with its neighbour as in the paper.
    """
    half = x.shape[-1] // 2
    # Angles are f32 whatever the model's type: bf16 cannot tell position 256 from 257.
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    positions = jnp.arange(x.shape[1], dtype=jnp.float32)
    if segments is None:
        angle = positions[:, None] * frequency[None, :]  # [s, h/2]
        # [s, h/2] → [1, s, 1, h/2], to be multiplied with all heads of all rows.
        cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    else:
        angle = (positions[None, :] - segments)[..., None] * frequency[None, None, :]  # [b, s, h/2]
        cos, sin = jnp.cos(angle)[:, :, None, :], jnp.sin(angle)[:, :, None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)  # [b, s, n, h/2] each
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


@dataclass(frozen=True, kw_only=True)
class AttentionKernel:
    """A way to compute attention.

    Nothing else asks which kernel a run has. `jgt/program/kernels.py` says what jgt has to know of one.

    name: as in `model.attention`. label: as in the log. keeps_scores: its backward pass reads the scores [b, n, s, s] that its forward pass
    leaves in memory. forward: how the name of the JAX primitive begins that is its forward pass; empty if that is several primitives.
    obstacle(config, device, sharing): why the model cannot have it there; empty if it can. has_foreign_mask(text): whether it gets the mask
    of other rows than those of its queries in a compiled program; None if it cannot.
    """

    name: str
    label: str
    attend: Attend
    keeps_scores: bool
    forward: str = ""
    obstacle: Callable[[ModelConfig, Any, int], str]
    has_foreign_mask: Callable[[str], bool] | None = None


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
    devices that compute a stage of a pipeline together on the same rows.
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
    if config.num_kv_heads % sharing:
        return f"its {config.num_kv_heads} kv_heads do not divide over the {sharing} devices of a pipeline's stage"
    # [1, s, n, h] and [1, s, k, h]
    q, k = (jax.ShapeDtypeStruct((1, config.seq, n, config.head_size), jnp.bfloat16) for n in (config.heads, config.num_kv_heads))

    def summed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(CUDNN.attend(q, k, v).astype(jnp.float32))

    try:
        # With the gradient, because the backward kernel has conditions of its own.
        jax.eval_shape(partial(jax.grad(summed), q), k, k)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        # JAX knows best which sizes this cuDNN supports on this GPU, and raises while it traces.
        return str(error).splitlines()[0].rstrip(".")
    return ""


def has_foreign_mask(program: str) -> bool:
    """Whether cuDNN's kernel gets the mask of other rows than those of its queries, in the text of a compiled program.

    JAX splits the kernel's operands over devices as it finds them, and compares the rows of q, k and v, but not those of the mask
    (`_check_qkv_bias_mask_spec` in jax/_src/cudnn/fused_attention_stablehlo.py).
    """
    calls = (line for line in program.splitlines() if '"__cudnn$fmhaScaleBias' in line)
    operands = (re.search(r"operand_layout_constraints=\{([^=]*)\}", line) for line in calls)
    # Those with four dims are q, k, v, the mask, and backward the output and its cotangent.
    rows = (set(re.findall(r"\[(\d+)(?:,\d+){3}\]", found[1])) for found in operands if found)
    return any(len(counts) > 1 for counts in rows)


CUDNN = AttentionKernel(
    name="cudnn",
    label="cuDNN's kernel",
    attend=partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"),
    keeps_scores=False,
    forward="dot_product_attention_fwd",
    obstacle=_cudnn_obstacle,
    has_foreign_mask=has_foreign_mask,
)
XLA = AttentionKernel(
    name="xla",
    label="XLA's program",
    attend=scores.attend,
    keeps_scores=True,
    obstacle=lambda config, device, sharing: "",
)
KERNELS = (CUDNN, XLA)
"""In the order in which `auto` prefers them."""
