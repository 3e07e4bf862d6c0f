"""The llama of `train/models` in plain JAX with every sharding constraint written by hand. The benchmarks compare jgt with it.

b batch, s seq, d embed, n heads, h head size, f ffn, v vocab. The parameters form the same tree as the trainer's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

BATCH = ("data", "fsdp")
COLUMN, ROW = P(None, "fsdp", "tensor"), P(None, "tensor", "fsdp")
TABLE = P(("tensor", "fsdp"), None)

PARAM_SPECS = {
    "embed": {"embedding": TABLE},
    "head": {"unembedding": TABLE},
    "layers": {
        "attn": {
            "q_proj": {"kernel": COLUMN},
            "k_proj": {"kernel": COLUMN},
            "v_proj": {"kernel": COLUMN},
            "out": {"kernel": ROW},
        },
        "attn_norm": {"scale": P(None, None)},
        "mlp": {"gate_proj": {"kernel": COLUMN}, "up_proj": {"kernel": COLUMN}, "down": {"kernel": ROW}},
        "mlp_norm": {"scale": P(None, None)},
    },
    "norm": {"scale": P(None)},
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Settings that the shapes do not show. dtype: of matmuls and activations. attention: `implementation` of JAX's attention."""

    heads: int
    kv_heads: int
    remat: bool
    dtype: Any = jnp.float32
    attention: Literal["xla", "cudnn"] = "xla"


def make_loss(mesh: Mesh, sizes: Sizes) -> Callable[[Any, dict[str, jax.Array]], jax.Array]:
    """Returns loss(params, batch) as in train/step/loss.py, with the layout of configs/rules/fsdp_tensor.yaml."""
    heads, kv_heads, dtype = sizes.heads, sizes.kv_heads, sizes.dtype

    def pin(x: jax.Array, *spec: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    @jax.custom_vjp
    def gathered(table: jax.Array) -> jax.Array:
        return pin(table, "tensor", None)

    # The cotangent gets the parameter's layout directly, so that XLA inserts a reduce-scatter instead of an all-reduce.
    gathered.defvjp(lambda table: (gathered(table), None), lambda _, ct: (pin(ct, *TABLE),))

    def kernel(p: Any, name: str) -> jax.Array:
        return p[name]["kernel"].astype(dtype)

    def attention(p: Any, x: jax.Array) -> jax.Array:
        b, s, _ = x.shape
        q = (x @ kernel(p, "q_proj")).reshape(b, s, heads, -1)
        k = (x @ kernel(p, "k_proj")).reshape(b, s, kv_heads, -1)
        v = (x @ kernel(p, "v_proj")).reshape(b, s, kv_heads, -1)
        q, k, v = (pin(t, BATCH, None, "tensor", None) for t in (rotate(q), rotate(k), v))
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=sizes.attention)
        return pin(out, BATCH, None, "tensor", None).reshape(b, s, -1) @ kernel(p, "out")

    def mlp(p: Any, x: jax.Array) -> jax.Array:
        hidden = jax.nn.silu(x @ kernel(p, "gate_proj")) * (x @ kernel(p, "up_proj"))
        return pin(hidden, BATCH, None, "tensor") @ kernel(p, "down")

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        x = pin(x + attention(p["attn"], rms_norm(x, p["attn_norm"]["scale"])), BATCH, None, None)
        x = pin(x + mlp(p["mlp"], rms_norm(x, p["mlp_norm"]["scale"])), BATCH, None, None)
        return x, None

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        params = jax.tree.map(lambda x, spec: pin(x, *spec), params, PARAM_SPECS)
        tokens, targets, weights = (pin(batch[k], BATCH) for k in ("inputs", "targets", "weights"))
        x = pin(gathered(params["embed"]["embedding"].astype(dtype))[tokens], BATCH, None, None)
        body = jax.checkpoint(layer, prevent_cse=False) if sizes.remat else layer
        x, _ = jax.lax.scan(body, x, params["layers"])
        normed = rms_norm(x, params["norm"]["scale"])
        logits = pin(scores(normed, gathered(params["head"]["unembedding"].astype(dtype))), BATCH, None, "tensor")
        is_target = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == targets[..., None]
        picked = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
        return jnp.sum(weights * (jax.nn.logsumexp(logits, axis=-1) - picked))

    return loss


def make_step(mesh: Mesh, optimizer: optax.GradientTransformation, clip: float | None, sizes: Sizes) -> Callable[..., Any]:
    """Returns step(params, opt_state, batch) → (params, opt_state, loss, grad_norm).

    The gradients are clipped by their global norm. If the loss or the norm is not finite, the step skips the update.
    """
    loss = make_loss(mesh, sizes)

    def step(params: Any, opt_state: Any, batch: dict[str, jax.Array]) -> Any:
        batch = batch | {"weights": batch["weights"] / jnp.maximum(jnp.sum(batch["weights"]), 1.0)}
        value, gradients = jax.value_and_grad(loss)(params, batch)
        norm = optax.tree.norm(gradients)
        if clip is not None:
            gradients = jax.tree.map(lambda g: jnp.where(norm < clip, g, g / norm * clip), gradients)
        updates, new_state = optimizer.update(gradients, opt_state, params)
        new, old = (optax.apply_updates(params, updates), new_state), (params, opt_state)
        params, opt_state = jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(value) & jnp.isfinite(norm), new, old), new, old)
        return params, opt_state, value, norm

    return step


@jax.custom_vjp
def scores(x: jax.Array, table: jax.Array) -> jax.Array:
    """Logits [b, s, v] in f32. The matmuls of the backward pass are in the dtype of x."""
    return jnp.einsum("bsd,vd->bsv", x, table, preferred_element_type=jnp.float32)


def _scores_backward(kept: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, table = kept
    cotangent = cotangent.astype(x.dtype)
    return jnp.einsum("bsv,vd->bsd", cotangent, table), jnp.einsum("bsv,bsd->vd", cotangent, x)


scores.defvjp(lambda x, table: (scores(x, table), (x, table)), _scores_backward)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """x / rms(x) · scale, with the mean in f32."""
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return (x * (jax.lax.rsqrt(mean + 1e-5) * scale[None, None, :])).astype(x.dtype)


def rotate(x: jax.Array, theta: float = 10_000.0) -> jax.Array:
    """Rotary position embedding of x [b, s, n, h]."""
    size = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * theta ** (-jnp.arange(size, dtype=jnp.float32) / size)[None, :]
    cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
