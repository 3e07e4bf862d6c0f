"""The optimizer of a config, from optax."""

from __future__ import annotations

from typing import Any

import jax
import optax

from train.sections import OptimizerConfig

UNDECAYED = ("scale", "bias", "positions")


def build_optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """AdamW behind a clip of the global gradient norm; the schedule counts updates."""
    adamw = optax.adamw(
        build_schedule(config, num_steps),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decayed,
    )
    # Without a clip the state has the same tree, so that a run may change it.
    clip = optax.identity() if config.clip is None else optax.clip_by_global_norm(config.clip)
    return optax.chain(clip, adamw)


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


def decayed(params: Any) -> Any:
    """Which parameters decay: matrices, not norms, biases and learned positions."""
    return jax.tree.map_with_path(lambda path, _: str(path[-1].key) not in UNDECAYED, params)
