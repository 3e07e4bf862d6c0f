"""The optimizer of a config, from optax."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jgt.placement import path_text
from train.moments import kept_as
from train.muon import MapMatrices, scale_by_muon
from train.sections import OptimizerConfig

UNDECAYED = ("scale", "bias", "positions")
_BLOCK = 4096


def build_optimizer(
    config: OptimizerConfig, num_steps: int, *, dtype: Any = jnp.float32, map_matrices: MapMatrices = jax.tree.map
) -> optax.GradientTransformation:
    """AdamW, or Muon for the layers' matrices and AdamW for the rest; gradients are clipped before. The schedule counts updates.

    dtype: of Muon's matmuls; map_matrices(fn, tree): maps a function over the matrices of a tree, where they are.
    """
    rate = build_schedule(config, num_steps)

    def schedule(count: Any) -> Any:
        # XLA would compute it anew in the update of each parameter.
        return jax.lax.optimization_barrier(rate(count))

    optimizer = optax.adamw(schedule, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay, mask=decayed)
    if config.name == "muon":
        muon = optax.chain(
            scale_by_muon(config.momentum, dtype, map_matrices),
            optax.add_decayed_weights(config.weight_decay),
            optax.scale_by_learning_rate(schedule),
        )
        optimizer = optax.partition({"muon": muon, "adamw": optimizer}, kinds)
    return optimizer if config.moments == "f32" else kept_as(optimizer, jnp.bfloat16)


def kinds(params: Any) -> Any:
    """Which parameters are Muon's: the matrices of layers. Tables, norms, biases and learned positions are AdamW's."""
    return jax.tree.map_with_path(lambda path, x: "muon" if _is_matrix(path) else "adamw", params)


def _is_matrix(path: Any) -> bool:
    return path_text(path).endswith("/kernel")


def build_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """The learning rate at each step, warm-up included."""
    rest = max(num_steps - config.warmup, 1)
    final = config.lr * config.final_lr
    if config.schedule == "cosine":
        main = optax.cosine_decay_schedule(config.lr, rest, alpha=config.final_lr)
    elif config.schedule == "wsd":
        falling = min(max(round(config.decay * num_steps), 1), rest)
        main = optax.join_schedules(
            [optax.constant_schedule(config.lr), optax.linear_schedule(config.lr, final, falling)], [rest - falling]
        )
    else:
        main = optax.constant_schedule(config.lr)
    # The first update already moves: warm-up starts at lr / (warmup + 1), not at 0.
    warm = optax.linear_schedule(config.lr / (config.warmup + 1), config.lr, config.warmup)
    return optax.join_schedules([warm, main], [config.warmup]) if config.warmup else main


def known_rates(schedule: optax.Schedule) -> Callable[[int], float]:
    """The schedule as numbers on the host, thousands at a time: one by one each would wait for the steps that are under way."""

    @functools.lru_cache(maxsize=1)
    def block(number: int) -> np.ndarray:
        updates = np.arange(number * _BLOCK, (number + 1) * _BLOCK)
        # Under jit one program, where each of its operations would be one.
        return np.asarray(jax.jit(jax.vmap(lambda update: jnp.asarray(schedule(update), jnp.float32)))(updates))

    return lambda update: float(block(update // _BLOCK)[update % _BLOCK])


def decayed(params: Any) -> Any:
    """Which parameters decay: matrices, not norms, biases and learned positions."""
    return jax.tree.map_with_path(lambda path, _: str(path[-1].key) not in UNDECAYED, params)
