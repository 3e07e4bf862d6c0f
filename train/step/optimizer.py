"""The optimizer of a config, built from optax: AdamW for all parameters, or Muon for matrices and AdamW for the rest.

Which parameters decay and which are Muon's follows from their roles (`train/models/decoder.py`), never from their names. A moment may be
kept in bf16 between updates; the update itself is computed in f32. The learning rate is a function of the number of updates, so a resumed
run continues its schedule from the optimizer's own count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jgt.sharding.paths import path_text

from ..models.decoder import Role
from ..sections import OptimizerConfig
from .muon import MapMatrices, scale_by_muon

_BLOCK = 4096
"""Updates whose rates the host computes at once."""


def build_optimizer(
    config: OptimizerConfig, num_steps: int, roles: Any, *, dtype: Any = jnp.float32, map_matrices: MapMatrices = jax.tree.map
) -> optax.GradientTransformation:
    """The optimizer; its schedule counts updates.

    roles: the Role of each parameter, in a tree like theirs. dtype: of Muon's matmuls. map_matrices(fn, tree): maps a function over the
    matrices of a tree, wherever their shards are. Clipping is not part of it: the step clips, since it has the norm already.
    """
    rate = build_schedule(config, num_steps)

    def schedule(count: Any) -> Any:
        # Without the barrier XLA would fuse the schedule into the update of each parameter, and compute it once for each.
        return jax.lax.optimization_barrier(rate(count))

    decays = by_role(roles, {"matrix": True, "table": True}, default=False)
    optimizer = optax.adamw(schedule, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay, mask=decays)
    if config.name == "muon":
        # Each of the two keeps a state for its own parameters only.
        muon = optax.chain(
            scale_by_muon(config.momentum, dtype, map_matrices),
            optax.add_decayed_weights(config.weight_decay),
            optax.scale_by_learning_rate(schedule),
        )
        optimizer = optax.partition({"muon": muon, "adamw": optimizer}, by_role(roles, {"matrix": "muon"}, default="adamw"))
    return optimizer if config.moments == "f32" else with_moments_in(optimizer, jnp.bfloat16)


def by_role(roles: Any, labels: Mapping[Role, Any], *, default: Any) -> Callable[[Any], Any]:
    """A function from a tree of parameters to a tree of labels: of each parameter its role's.

    A parameter is looked up by its path, because optax also calls this with trees in which some parameters are left out.
    """
    by_path = {path_text(path): labels.get(role, default) for path, role in jax.tree.leaves_with_path(roles)}
    return lambda params: jax.tree.map_with_path(lambda path, _: by_path[path_text(path)], params)


def with_moments_in(optimizer: optax.GradientTransformation, dtype: Any) -> optax.GradientTransformation:
    """The optimizer with its moments rounded to `dtype`, to nearest, after each update, which it computes in f32.

    Moments are the floating arrays of its state that have the shape of a parameter.
    """

    def init(params: Any) -> Any:
        return _cast(optimizer.init(params), params, dtype)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = optimizer.update(updates, _cast(state, params, jnp.float32), params)
        return updates, _cast(state, params, dtype)

    return optax.GradientTransformation(init, update)


def _cast(state: Any, params: Any, dtype: Any) -> Any:
    # By shape, since a state does not say which of its arrays are moments. Counts are integers, so a scalar parameter is safe, too.
    shapes = {x.shape for x in jax.tree.leaves(params)}
    return jax.tree.map(lambda x: x.astype(dtype) if x.shape in shapes and jnp.issubdtype(x.dtype, jnp.floating) else x, state)


def build_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """The learning rate of each update: warm-up, then cosine, wsd (arXiv 2404.06395) or constant."""
    after_warmup = max(num_steps - config.warmup, 1)
    final = config.lr * config.final_lr
    if config.schedule == "cosine":
        main = optax.cosine_decay_schedule(config.lr, after_warmup, alpha=config.final_lr)
    elif config.schedule == "wsd":
        # At least one update, and none of the warm-up.
        falling = min(max(round(config.decay * num_steps), 1), after_warmup)
        main = optax.join_schedules(
            [optax.constant_schedule(config.lr), optax.linear_schedule(config.lr, final, falling)], [after_warmup - falling]
        )
    else:
        main = optax.constant_schedule(config.lr)
    # The first update already moves: warm-up starts at lr / (warmup + 1), not at 0.
    warm = optax.linear_schedule(config.lr / (config.warmup + 1), config.lr, config.warmup)
    return optax.join_schedules([warm, main], [config.warmup]) if config.warmup else main


def rates_on_host(schedule: optax.Schedule) -> Callable[[int], float]:
    """The schedule as a function of plain numbers, for the log.

    It computes thousands of rates at once. A rate at a time would queue on the device behind the steps in flight, and the log would wait.
    """

    # One block suffices, because steps are logged in order.
    @functools.lru_cache(maxsize=1)
    def block(number: int) -> np.ndarray:
        updates = np.arange(number * _BLOCK, (number + 1) * _BLOCK)
        # Under jit this is one program; without it, each operation of the schedule would compile as one of its own.
        return np.asarray(jax.jit(jax.vmap(lambda update: jnp.asarray(schedule(update), jnp.float32)))(updates))

    return lambda update: float(block(update // _BLOCK)[update % _BLOCK])
