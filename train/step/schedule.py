"""The numbers of a run that change from step to step, or between two starts: learning rate, weight decay, the clipping norm.

They are arguments of the compiled step and not constants in it. So a sweep over learning rates, or a run that is continued for more steps,
runs the program that is compiled already. The host computes them, one short vector for each step; it knows the number of each step, so the
learning rate does not depend on an optimizer's own count.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .config import OptimizerConfig, OwnOptimizer


class Settings(NamedTuple):
    """The numbers of one step; on the devices, scalars f32[]. clip is 0 if gradients are not clipped."""

    lr: Any
    weight_decay: Any
    clip: Any


def settings_of_step(config: OptimizerConfig | OwnOptimizer, num_steps: int, step: int) -> np.ndarray:
    """The `Settings` of a step, counted from 1, as f32[3]."""
    return np.array([learning_rate(config, num_steps, step), config.weight_decay, config.clip or 0.0], np.float32)


def learning_rate(config: OptimizerConfig | OwnOptimizer, num_steps: int, step: int) -> float:
    """The learning rate of a step, counted from 1: warm-up, then cosine, wsd (arXiv 2404.06395) or constant."""
    done, warmup = step - 1, config.warmup
    if done < warmup:
        # The first update already moves: warm-up starts at lr / (warmup + 1), not at 0.
        first = config.lr / (warmup + 1)
        return first + (config.lr - first) * done / warmup
    total, done = max(num_steps - warmup, 1), done - warmup
    final = config.lr * config.final_lr
    if config.schedule == "cosine":
        return final + (config.lr - final) * 0.5 * (1 + math.cos(math.pi * min(done / total, 1.0)))
    if config.schedule == "wsd":
        # At least one update, and none of the warm-up.
        falling = min(max(round(config.decay * num_steps), 1), total)
        return config.lr + (final - config.lr) * min(max((done - (total - falling)) / falling, 0.0), 1.0)
    return config.lr
