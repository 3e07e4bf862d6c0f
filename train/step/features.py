"""Optional features of a step that keep arrays from step to step: skipped spikes of the loss, and an average of the parameters."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ..sections import SpikesConfig
from .state import Kept, Tree


@dataclass(frozen=True, kw_only=True)
class StepFeatures:
    """The features of a run. ema: the decay of the average of the parameters, if the run has one."""

    spikes: SpikesConfig | None = None
    ema: float | None = None

    def first(self, params: Tree) -> Kept:
        """The arrays before the first step."""
        return Kept(losses=self.first_losses(), average=self.first_average(params))

    def first_losses(self) -> jax.Array | None:
        """The window of losses before the first step."""
        return None if self.spikes is None else jnp.full(self.spikes.window, jnp.nan, jnp.float32)

    def first_average(self, params: Tree) -> Tree | None:
        """The average before the first step."""
        return None if self.ema is None else jax.tree.map(lambda p: p.astype(jnp.float32), params)

    def judge(self, kept: Kept, step: jax.Array, loss: jax.Array, finite: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Whether to apply a step's update, and the window of losses after the step. finite: whether the loss is."""
        if self.spikes is None or kept.losses is None:
            return finite, kept.losses
        losses = kept.losses
        # A spike enters the window. If the loss stays high, it is soon no longer a spike.
        applied = finite & ~_is_spike(loss, losses, self.spikes.deviations)
        # A ring buffer. A loss that is not finite does not enter it: NaN means a step still to come.
        return applied, jnp.where(finite, losses.at[step % self.spikes.window].set(loss), losses)

    def averaged(self, kept: Kept, params: Tree, step: jax.Array, applied: jax.Array) -> Tree | None:
        """The average after a step, from the new parameters."""
        if self.ema is None:
            return None
        # As TensorFlow's ExponentialMovingAverage with num_updates: a short run's average would otherwise be its first parameters.
        weight = jnp.where(applied, 1 - jnp.minimum(self.ema, (1 + step) / (10 + step)), 0.0)
        return jax.tree.map(lambda a, p: a + weight * (p.astype(jnp.float32) - a), kept.average, params)


def _is_spike(loss: jax.Array, before: jax.Array, deviations: float) -> jax.Array:
    """Whether a loss lies more than `deviations` standard deviations above the mean of the losses `before`.

    Never before half a window of losses is known. As OLMo-core's SkipStepOptimizer (olmo_core/optim/skip_step_optimizer.py).
    """
    known = jnp.sum(~jnp.isnan(before)) >= max(2, before.size // 2)
    return known & (loss > jnp.nanmean(before) + deviations * jnp.nanstd(before, ddof=1))
