"""A mixture of experts in the place of a layer's MLP: a router chooses k of E gated MLPs for each token.

    y = Σ over the chosen experts of scale · expert(x)  [+ gate(x) · shared(x)]

The layer says which rows go through which expert (`signal.experts`), and neither how they get there nor where the experts are. Without
rules that is a sort, a grouped matmul and the inverse of the sort; rules exchange the rows between the devices of a mesh axis.

b batch, s seq, d embed, f the width of an expert, E experts, k choices of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jgt import signal

from .. import eight_bits
from ..config import ModelConfig
from ..linear import READING_INIT, adding_init, compute_type, gated
from ..mlp import MLP
from ..model import Vector
from .balance import Bias, Load, Routed, routed
from .config import ExpertsConfig
from .routing import route


class MoE(nnx.Module):
    """[b, s, d] → [b, s, d] and what was routed."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        experts = config.experts
        assert experts is not None
        ffn = experts.ffn or config.ffn_size
        # Logits are f32 whatever the model's type: a rounding may change which experts are chosen.
        make = partial(nnx.Linear, use_bias="router" in config.biases, dtype=jnp.float32, kernel_init=READING_INIT)
        self.router = make(config.embed, experts.count, rngs=rngs)
        self.experts = GatedExperts(config, experts.count, ffn, rngs=rngs)
        self.expert_biases = ExpertBiases(config, experts.count, ffn) if "experts" in config.biases else None
        self.shared = MLP(replace(config, ffn=experts.shared * ffn), rngs=rngs) if experts.shared else None
        self.shared_gate = nnx.Linear(config.embed, 1, use_bias=False, dtype=jnp.float32, rngs=rngs) if experts.shared_gate else None
        self.load = Load(jnp.zeros(experts.count, jnp.int32))
        self.bias = Bias(jnp.zeros(experts.count, jnp.float32)) if experts.balance == "bias" else None
        self.config: ExpertsConfig = experts

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Routed]:
        with signal.context("router"):
            logits = signal.tensor(self.router(x), "logits")  # [b, s, E]
            choice, scale = route(logits, None if self.bias is None else self.bias[...], self.config)
            choice, sums = signal.tensor(choice, "choice"), routed(logits, choice, self.config)
        y = self.experts(x, choice, scale, self.expert_biases)
        if self.shared is not None:
            with signal.context("shared"):
                shared = self.shared(x)
                y = y + (shared if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x)).astype(x.dtype) * shared)
        return y, sums


class GatedExperts(nnx.Module):
    """E gated MLPs (SwiGLU), as stacked matrices [E, d, f] and [E, f, d]."""

    def __init__(self, config: ModelConfig, count: int, ffn: int, *, rngs: nnx.Rngs):
        def made(size_in: int, size_out: int, init: nnx.Initializer) -> nnx.Param[jax.Array]:
            keys = jax.random.split(rngs.params(), count)
            # One after another, as `init` scales by the dims of one matrix.
            return nnx.Param(jax.vmap(lambda key: init(key, (size_in, size_out), jnp.float32))(keys))

        self.gate = made(config.embed, ffn, READING_INIT)
        self.up = made(config.embed, ffn, READING_INIT)
        self.down = made(ffn, config.embed, adding_init(config.layers))
        self.dtype = compute_type(config)
        self.run = partial(_gated_mlps, eight_bits.ragged_dot if config.fp8 else jax.lax.ragged_dot, config)

    def __call__(self, x: jax.Array, choice: jax.Array, scale: jax.Array, biases: ExpertBiases | None = None) -> jax.Array:
        # In the type of matmuls, so that this is the type that travels.
        weights = {name: jnp.asarray(getattr(self, name)[...], self.dtype) for name in _PARTS}
        if biases is not None:
            weights |= {f"{name}_bias": jnp.asarray(getattr(biases, name)[...], self.dtype) for name in _PARTS}
        return signal.tensor(signal.experts(self.run, weights, x, choice, scale), "routed")


_PARTS = ("gate", "up", "down")


class ExpertBiases(nnx.Module):
    """The biases of E gated MLPs, [E, f] and [E, d]. They are beside the matrices, as rules for these have a dim more."""

    def __init__(self, config: ModelConfig, count: int, ffn: int):
        self.gate, self.up, self.down = (Vector(jnp.zeros((count, size), jnp.float32)) for size in (ffn, ffn, config.embed))


def _gated_mlps(
    matmul: Callable[..., jax.Array], config: ModelConfig, rows: jax.Array, sizes: jax.Array, weights: Mapping[str, jax.Array]
) -> jax.Array:
    """Rows [n, d] that are sorted by expert → [n, d]."""

    def part(name: str, rows: jax.Array) -> jax.Array:
        y, bias = matmul(rows, weights[name], sizes), weights.get(f"{name}_bias")
        return y if bias is None else y + _by_row(bias, sizes, len(rows))

    return part("down", signal.tensor(gated(config, part("gate", rows), part("up", rows)), "hidden"))


def _by_row(bias: jax.Array, sizes: jax.Array, num_rows: int) -> jax.Array:
    """The bias of each row's expert, [E, m] → [n, m]."""
    ends, row = jnp.cumsum(sizes)[None], jnp.arange(num_rows)[:, None]
    # A matmul, since the derivative of a lookup would add up rows in any order.
    is_own = (row < ends) & (row >= ends - sizes[None])
    # Cotangents of rows behind the last group may be NaN.
    return jnp.where(row < ends[:, -1:], is_own.astype(bias.dtype) @ bias, 0)
