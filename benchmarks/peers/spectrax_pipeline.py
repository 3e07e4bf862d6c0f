"""Gradients of a llama pipelined by SpectraX, with the schedules in turn. Needs spectrax-lib.

`python spectrax_pipeline.py SIZES WEIGHTS`, with SIZES as `peers.py` passes them, prints JSON: for each schedule, CPU-seconds and seconds
per step (medians), the loss and the norm of the gradient. The blocks, their weights and the tokens are those of jgt_pipeline.py.

SpectraX runs as in its README: modules, stage markers that name the sharding of the values crossing them, and `sxvalue_and_grad` of an
`sxjit` function. Where the README leaves a choice, this program takes the fastest: weights sharded over fsdp, tokens sharded over fsdp on
the first and the last stage, and no remat of the blocks, because the backward pass recomputes a stage from the stage's input anyway.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from typing import Any

SIZES, WEIGHTS = json.loads(sys.argv[1]), sys.argv[2]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={SIZES['devices']} {os.environ.get('XLA_FLAGS', '')}"
os.environ |= {"JAX_PLATFORMS": "cpu", "LOGGING_LEVEL_ED": "ERROR"}

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import spectrax as spx  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402
from spectrax import nn  # noqa: E402
from spectrax.core.sharding import Sharding  # noqa: E402
from spectrax.runtime import schedules, sxjit, sxstage_iter, sxvalue_and_grad  # noqa: E402

from benchmarks.harness import interleave, spread  # noqa: E402

EMBED, FFN, HEADS, THETA, EPSILON = SIZES["embed"], SIZES["ffn"], SIZES["heads"], 10_000.0, 1e-5
ROWS = Sharding(mesh_axes=("fsdp", None))
COLUMNS = Sharding(mesh_axes=(None, "fsdp"))
BLOCK = {
    "attn_norm": "attn_norm/scale",
    "q": "attn/q_proj/kernel",
    "k": "attn/k_proj/kernel",
    "v": "attn/v_proj/kernel",
    "out": "attn/out/kernel",
    "mlp_norm": "mlp_norm/scale",
    "gate": "mlp/gate_proj/kernel",
    "up": "mlp/up_proj/kernel",
    "down": "mlp/down/kernel",
}
"""The modules of a block, and the names of their weights in the file."""


def linear(features_in: int, features_out: int, sharding: Sharding) -> nn.Linear:
    """A linear layer without bias."""
    return nn.Linear(features_in, features_out, use_bias=False, rngs=spx.Rngs(0), sharding=sharding)


class Block(spx.Module):
    """Attention and SwiGLU, each with a normed input, and added to the residual stream [b, s, d]."""

    def __init__(self):
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.RMSNorm(EMBED, eps=EPSILON), nn.RMSNorm(EMBED, eps=EPSILON)
        self.q, self.k, self.v = (linear(EMBED, EMBED, ROWS) for _ in range(3))
        self.gate, self.up = linear(EMBED, FFN, ROWS), linear(EMBED, FFN, ROWS)
        self.out, self.down = linear(EMBED, EMBED, COLUMNS), linear(FFN, EMBED, COLUMNS)

    def forward(self, x: jax.Array) -> jax.Array:
        normed = self.attn_norm(x)
        q, k, v = (proj(normed).reshape(*x.shape[:2], HEADS, -1) for proj in (self.q, self.k, self.v))
        heads = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.out(heads.reshape(x.shape))
        normed = self.mlp_norm(x)
        return x + self.down(jax.nn.silu(self.gate(normed)) * self.up(normed))


class Llama(spx.Module):
    """The weights of a decoder. `loss` computes its loss."""

    def __init__(self, weights: Any):
        super().__init__()
        self.embedding = spx.Parameter(jnp.asarray(weights["embed/embedding"]), sharding=ROWS)
        self.unembedding = spx.Parameter(jnp.asarray(weights["head/unembedding"]), sharding=ROWS)
        self.norm = nn.RMSNorm(EMBED, eps=EPSILON)
        self.norm.weight.value = jnp.asarray(weights["norm/scale"])
        self.blocks = nn.ModuleList([Block() for _ in range(SIZES["layers"])])
        for layer, block in enumerate(self.blocks):
            for name, path in BLOCK.items():
                getattr(block, name).weight.value = jnp.asarray(weights[f"layers/{path}"][layer])


def rotate(x: jax.Array) -> jax.Array:
    """Rotary position embedding of x [b, s, n, h]; the two halves of a head form the pairs."""
    size = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * THETA ** (-jnp.arange(size, dtype=jnp.float32) / size)  # [s, h/2]
    cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def loss(model: Llama, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean cross entropy of the targets [b, s], in nats. Each block is one stage."""
    x = model.embedding.value[tokens]
    for layer, block in enumerate(model.blocks):
        x = block(sxstage_iter(x, sharding=PartitionSpec("fsdp", None, None)) if layer else x)
    logits = jnp.einsum("bsd,vd->bsv", model.norm(x), model.unembedding.value)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


class Program:
    """The loss and gradient of a schedule. Each call waits for its results."""

    def __init__(self, model: Llama, mesh: Any, schedule: str, tokens: Any):
        made = getattr(schedules, schedule)(SIZES["microbatches"])
        self._step = sxvalue_and_grad(sxjit(loss, mesh=mesh, schedule=made, batch_argnums=(1, 2), static_argnums=()))
        last = mesh.mpmd_mesh.mpmd_dim - 1
        rows = [NamedSharding(mesh.mpmd_mesh.submesh(stage), PartitionSpec("fsdp")) for stage in (0, last)]
        self._arguments = (model, jax.device_put(tokens[:, :-1], rows[0]), jax.device_put(tokens[:, 1:], rows[1]))
        self._found: Any = None

    def __call__(self) -> None:
        self._found = jax.block_until_ready(self._step(*self._arguments))

    def results(self) -> dict[str, float]:
        value, gradients = self._found
        squares = sum(np.sum(np.square(np.asarray(x, np.float64))) for x in jax.tree.leaves(gradients))
        return {"loss": float(value), "grad_norm": float(np.sqrt(squares))}


def main() -> None:
    """Prints the figures."""
    weights = np.load(WEIGHTS)
    model = Llama(weights)
    mesh = spx.create_mesh(axis_dims=(SIZES["mesh"]["stage"], SIZES["mesh"]["fsdp"]), axis_names=("pp", "fsdp"), mpmd_axis="pp")
    programs = {name: Program(model, mesh, name, weights["tokens"]) for name in SIZES["schedules"]}
    samples = interleave(programs, SIZES["steps"])
    found = {
        name: {kind: spread(getattr(s, kind) for s in samples[name])["median"] for kind in ("cpu_s", "s")} | program.results()
        for name, program in programs.items()
    }
    versions = {name: metadata.version(name) for name in ("spectrax-lib", "jax", "jaxlib")}
    print(json.dumps({"schedules": found, "parameters": sum(x.size for x in jax.tree.leaves(model)), "versions": versions}))


if __name__ == "__main__":
    main()
