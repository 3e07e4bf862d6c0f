"""The training step and the evaluation step, as pure functions of state and batch.

A step averages the loss over the weights of the whole batch, even if the batch is too large to run at once: with `accumulate` it runs in
parts, one after another, whose gradients add up. Weights are divided by their sum before the batch is cut, so the parts need no further
scaling and a part that is mostly padding counts for little. An update that would do harm (a loss or a gradient that is not finite, a spike
of the loss) is computed and dropped: the step is one program whatever happens, and the host decides later whether to stop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import optax

from jgt import signal

from ..settings.training import SpikesConfig
from .gradients import GradientSum
from .objective import Arrays, Objective, mean_of_parts, with_weight
from .optimizer import MakeOptimizer, Settings
from .state import State, Tree
from .update import Update, update_all

StepFn = Callable[[State, Arrays, jax.Array], tuple[State, dict[str, jax.Array]]]


@dataclass(frozen=True, kw_only=True)
class StepFeatures:
    """Features of a step that look beyond it: skipped spikes of the loss, an average of the parameters, and the end of a run.

    ema: the decay of the average, if the run has one. stops: an update that is not finite is the run's last. The host learns of it when it
    has dispatched more steps, so these change nothing, and the state remains that before the update, with ~n instead of n for `step`.
    """

    spikes: SpikesConfig | None = None
    ema: float | None = None
    stops: bool = False

    def is_good(self, step: jax.Array, finite: jax.Array) -> jax.Array:
        """Whether an update may be applied. step: the state's. finite: whether loss and gradient are."""
        return finite & (step >= 0) if self.stops else finite

    def next_step(self, step: jax.Array, good: jax.Array) -> jax.Array:
        """The state's `step` after an update."""
        return jnp.where(good, step + 1, jnp.minimum(step, ~step)) if self.stops else step + 1

    def first_losses(self) -> jax.Array | None:
        """The window of losses before the first step."""
        return None if self.spikes is None else jnp.full(self.spikes.window, jnp.nan, jnp.float32)

    def first_average(self, params: Tree) -> Tree | None:
        """The average before the first step."""
        return None if self.ema is None else jax.tree.map(lambda p: p.astype(jnp.float32), params)

    def judge(self, losses: jax.Array | None, step: jax.Array, loss: jax.Array, good: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Whether to apply a step's update, and the window of losses after the step. good: whether it may be applied."""
        if self.spikes is None or losses is None:
            return good, losses
        # A spike enters the window. If the loss stays high, it is soon no longer a spike.
        applied = good & ~_is_spike(loss, losses, self.spikes.deviations)
        # A ring buffer. A loss that is not finite does not enter it: NaN means a step still to come.
        return applied, jnp.where(good, losses.at[step % self.spikes.window].set(loss), losses)

    def averaged(self, average: Tree | None, params: Tree, step: jax.Array, applied: jax.Array) -> Tree | None:
        """The average after a step, from the new parameters."""
        if self.ema is None:
            return None
        # As TensorFlow's ExponentialMovingAverage with num_updates: a short run's average would otherwise be its first parameters.
        weight = 1 - jnp.minimum(self.ema, (1 + step) / (10 + step))
        return jax.tree.map(lambda a, p: jnp.where(applied, a + weight * (p.astype(jnp.float32) - a), a), average, params)


_NO_FEATURES = StepFeatures()


def make_train_step(
    objective: Objective,
    make_optimizer: MakeOptimizer,
    *,
    gradients: GradientSum,
    clips: bool = False,
    features: StepFeatures = _NO_FEATURES,
    update: Update = update_all,
) -> StepFn:
    """step(state, batch of arrays [b, ...], settings f32[3]) → new state and {loss, grad_norm, applied, and the loss's own metrics}.

    gradients: adds up the gradient of the whole batch. clips: whether the gradient that the optimizer gets has at most the norm of the
    settings; grad_norm is the norm before.

    applied is false if the loss or the gradient is not finite, the loss is a spike, or an earlier update was the run's last: parameters,
    variables and optimizer state then stay the same, while state.step counts the step, unless the run ends.
    """

    def train_step(state: State, batch: Arrays, numbers: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        # Without the barrier XLA would slice the vector once for each parameter's update.
        settings = Settings(*jax.lax.optimization_barrier(tuple(numbers)))
        if objective.is_token_loss:
            # Not below 1, because a batch of padding alone would divide 0 by 0.
            batch = batch | {"weights": batch["weights"] / jnp.maximum(jnp.sum(batch["weights"]), 1.0)}
        of_trained = objective.beside(state.frozen)
        (total, part), gradient, waiting = gradients.differentiate(of_trained, state.params, state.variables, batch, state.waiting)
        with signal.context("optimizer"):
            value = total
            if not objective.is_token_loss:
                value = mean_of_parts(total, part.weight, gradients.parts)
                gradient = jax.tree.map(lambda g: mean_of_parts(g, part.weight, gradients.parts).astype(g.dtype), gradient)
            # Downhill for complex parameters, whose gradient JAX returns conjugated.
            gradient = jax.tree.map(jnp.conj, gradient)
            norm = optax.tree.norm(gradient)
            # A single element that is not finite makes the norm so. A late gradient is not this loss's.
            finite = jnp.isfinite(norm) if gradients.is_late else jnp.isfinite(value) & jnp.isfinite(norm)
            good = features.is_good(state.step, finite)
            applied, losses = features.judge(state.losses, state.step, value, good)
            if clips:
                # As optax.clip_by_global_norm, which would compute the norm again.
                factor = jnp.where(norm < settings.clip, 1.0, settings.clip / norm)
                gradient = jax.tree.map(lambda g: (g * factor).astype(g.dtype), gradient)
            # In the first step the late gradient is zero; applying it would fade moments and decay weights.
            moves = applied & (norm > 0) if gradients.is_late else applied
            params, opt_state = update(make_optimizer(settings), gradient, state.params, state.opt_state, moves)
            variables, more = objective.settle(part.variables)
            variables = jax.tree.map(lambda new, old: jnp.where(applied, new, old), variables, state.variables)
            average = features.averaged(state.average, params, state.step, applied)
            metrics = more | {name: mean_of_parts(*pair, gradients.parts) for name, pair in part.metrics.items()}
        step = features.next_step(state.step, good)
        after = replace(
            state, step=step, params=params, opt_state=opt_state, variables=variables, losses=losses, average=average, waiting=waiting
        )
        return after, {"loss": value, "grad_norm": norm, "applied": applied, **metrics}

    return train_step


def make_eval_step(objective: Objective) -> Callable[[Tree, Tree, Arrays], dict[str, tuple[jax.Array, jax.Array]]]:
    """step(params, variables, batch) → a sum and its weight by name: the loss and its metrics.

    The mean over several batches is the quotient of the sums of both.
    """

    def eval_step(params: Tree, variables: Tree, batch: Arrays) -> dict[str, tuple[jax.Array, jax.Array]]:
        total, part = objective.evaluated(objective.used(params), variables, batch)
        if objective.is_token_loss:
            return {"loss": (total, jnp.sum(batch["weights"]))}
        rows = len(next(iter(batch.values())))
        return {name: with_weight(*pair, rows) for name, pair in {"loss": (total, part.weight), **part.metrics}.items()}

    return eval_step


def _is_spike(loss: jax.Array, before: jax.Array, deviations: float) -> jax.Array:
    """Whether a loss lies more than `deviations` standard deviations above the mean of the losses `before`.

    Never before half a window of losses is known. As OLMo-core's SkipStepOptimizer (olmo_core/optim/skip_step_optimizer.py).
    """
    known = jnp.sum(~jnp.isnan(before)) >= max(2, before.size // 2)
    return known & (loss > jnp.nanmean(before) + deviations * jnp.nanstd(before, ddof=1))
