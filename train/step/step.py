"""The training step and the evaluation step, as pure functions of state and batch.

A step averages the loss over the weights of the whole batch, even if the batch is too large to run at once: with `accumulate` it runs in
parts, one after another, whose gradients add up. Weights are divided by their sum before the batch is cut, so the parts need no further
scaling and a part that is mostly padding counts for little. An update that would do harm (a loss or a gradient that is not finite, a spike
of the loss) is computed and dropped: the step is one program whatever happens, and the host decides later whether to stop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jgt import signal

from .features import StepFeatures
from .gradients import GradientSum
from .objective import Arrays, Objective, mean_of_parts, with_weight
from .optimizer import MakeOptimizer, Settings
from .state import Exchanged, Kept, State, Trained
from .update import Update, update_all

_NO_FEATURES = StepFeatures()
StepFn = Callable[[State, Arrays, jax.Array], tuple[State, dict[str, jax.Array]]]


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

    applied is false if the loss or the gradient is not finite or the loss is a spike: parameters, variables and optimizer state
    then stay the same, while state.step counts the step.
    """

    def train_step(state: State, batch: Arrays, numbers: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        # Without the barrier XLA would slice the vector once for each parameter's update.
        settings = Settings(*jax.lax.optimization_barrier(tuple(numbers)))
        if objective.is_token_loss:
            # Not below 1, because a batch of padding alone would divide 0 by 0.
            batch = batch | {"weights": batch["weights"] / jnp.maximum(jnp.sum(batch["weights"]), 1.0)}
        old, waiting = state.trained, state.exchanged.waiting
        (total, part), gradient, waiting = gradients.differentiate(objective, old.params, old.variables, batch, waiting)
        with signal.context("optimizer"):
            value = total
            if not objective.is_token_loss:
                value = mean_of_parts(total, part.weight, gradients.parts)
                gradient = jax.tree.map(lambda g: mean_of_parts(g, part.weight, gradients.parts).astype(g.dtype), gradient)
            norm = optax.tree.norm(gradient)
            # A single element that is not finite makes the norm so. A late gradient is not this loss's.
            finite = jnp.isfinite(norm) if gradients.is_late else jnp.isfinite(value) & jnp.isfinite(norm)
            applied, losses = features.judge(state.kept, state.step, value, finite)
            if clips:
                # As optax.clip_by_global_norm, which would compute the norm again.
                factor = jnp.where(norm < settings.clip, 1.0, settings.clip / norm)
                gradient = jax.tree.map(lambda g: g * factor, gradient)
            # In the first step the late gradient is zero; applying it would fade moments and decay weights.
            moves = applied & (norm > 0) if gradients.is_late else applied
            params, opt_state = update(make_optimizer(settings), gradient, old.params, old.opt_state, moves)
            settled, more = objective.settle(part.variables)
            variables = jax.tree.map(lambda new, old: jnp.where(applied, new, old), settled, old.variables)
            average = features.averaged(state.kept, params, state.step, applied)
            metrics = more | {name: mean_of_parts(*pair, gradients.parts) for name, pair in part.metrics.items()}
        after = State(
            state.step + 1, Trained(params, opt_state, variables), Kept(losses=losses, average=average), Exchanged(waiting=waiting)
        )
        return after, {"loss": value, "grad_norm": norm, "applied": applied, **metrics}

    return train_step


def make_eval_step(objective: Objective) -> Callable[[Any, Any, Arrays], dict[str, tuple[jax.Array, jax.Array]]]:
    """step(params, variables, batch) → a sum and its weight by name: the loss and its metrics.

    The mean over several batches is the quotient of the sums of both.
    """

    def eval_step(params: Any, variables: Any, batch: Arrays) -> dict[str, tuple[jax.Array, jax.Array]]:
        total, part = objective.evaluated(objective.used(params), variables, batch)
        if objective.is_token_loss:
            return {"loss": (total, jnp.sum(batch["weights"]))}
        rows = len(next(iter(batch.values())))
        return {name: with_weight(*pair, rows) for name, pair in {"loss": (total, part.weight), **part.metrics}.items()}

    return eval_step
