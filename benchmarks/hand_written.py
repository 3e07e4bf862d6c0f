"""The llama of `train/models` in plain JAX, every constraint written by hand: what jgt is measured against.

b batch, s seq, d embed, n heads, h head size, f ffn, v vocab. Parameters are the same tree as the trainer's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def make_loss(mesh: Mesh, *, heads: int, kv_heads: int, remat: bool) -> Callable[[Any, dict[str, jax.Array]], jax.Array]:
    """loss(params, batch) as in train/loss.py, laid out as configs/rules/fsdp_tensor.yaml says."""

    def pin(x: jax.Array, *spec: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    @jax.custom_vjp
    def gathered(table: jax.Array) -> jax.Array:
        return pin(table, "tensor", None)

    # The gradient goes straight to the parameter's layout: a reduce-scatter where an all-reduce would stand.
    gathered.defvjp(lambda table: (gathered(table), None), lambda _, ct: (pin(ct, *TABLE),))

    def attention(p: Any, x: jax.Array) -> jax.Array:
        b, s, _ = x.shape
        q = (x @ p["q_proj"]["kernel"]).reshape(b, s, heads, -1)
        k = (x @ p["k_proj"]["kernel"]).reshape(b, s, kv_heads, -1)
        v = (x @ p["v_proj"]["kernel"]).reshape(b, s, kv_heads, -1)
        q, k, v = (pin(t, BATCH, None, "tensor", None) for t in (rotate(q), rotate(k), v))
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return pin(out, BATCH, None, "tensor", None).reshape(b, s, -1) @ p["out"]["kernel"]

    def mlp(p: Any, x: jax.Array) -> jax.Array:
        hidden = jax.nn.silu(x @ p["gate_proj"]["kernel"]) * (x @ p["up_proj"]["kernel"])
        return pin(hidden, BATCH, None, "tensor") @ p["down"]["kernel"]

    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        x = pin(x + attention(p["attn"], rms_norm(x, p["attn_norm"]["scale"])), BATCH, None, None)
        x = pin(x + mlp(p["mlp"], rms_norm(x, p["mlp_norm"]["scale"])), BATCH, None, None)
        return x, None

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        params = jax.tree.map(lambda x, spec: pin(x, *spec), params, PARAM_SPECS)
        tokens, targets, weights = (pin(batch[k], BATCH) for k in ("inputs", "targets", "weights"))
        x = pin(gathered(params["embed"]["embedding"])[tokens], BATCH, None, None)
        body = jax.checkpoint(layer, prevent_cse=False) if remat else layer
        x, _ = jax.lax.scan(body, x, params["layers"])
        normed = rms_norm(x, params["norm"]["scale"])
        logits = jnp.einsum("bsd,vd->bsv", normed, gathered(params["head"]["unembedding"]))
        logits = pin(logits, BATCH, None, "tensor")
        is_target = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == targets[..., None]
        picked = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
        return jnp.sum(weights * (jax.nn.logsumexp(logits, axis=-1) - picked))

    return loss


def make_step(mesh: Mesh, optimizer: optax.GradientTransformation, *, heads: int, kv_heads: int, remat: bool) -> Callable[..., Any]:
    """step(params, opt_state, batch) → (params, opt_state, loss, grad_norm)."""
    loss = make_loss(mesh, heads=heads, kv_heads=kv_heads, remat=remat)

    def step(params: Any, opt_state: Any, batch: dict[str, jax.Array]) -> Any:
        batch = batch | {"weights": batch["weights"] / jnp.maximum(jnp.sum(batch["weights"]), 1.0)}
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, optax.tree.norm(gradients)

    return step


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """x / rms(x) · scale."""
    return x * (jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-5) * scale[None, None, :])


def rotate(x: jax.Array, theta: float = 10_000.0) -> jax.Array:
    """Rotary positions on [b, s, n, h]."""
    size = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * theta ** (-jnp.arange(size, dtype=jnp.float32) / size)[None, :]
    cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
