"""The training step and the evaluation step, as pure functions of state and batch.

A step averages the loss over the weights of the whole batch, even if the batch is too large to run at once: with `accumulate` it runs in
parts, one after another, whose gradients add up. Weights are divided by their sum before the batch is cut, so the parts need no further
scaling and a part that is mostly padding counts for little. An update that would do harm (a loss or a gradient that is not finite, a spike
of the loss) is computed and dropped: the step is one program whatever happens, and the host decides later whether to stop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jgt import signal

from ..sections import SpikesConfig
from .objective import Arrays, Objective, joined, weighed
from .optimizer import MakeOptimizer
from .parts import Carried, Parts
from .schedule import Settings
from .update import Update, update_all


class State(NamedTuple):
    """What a checkpoint stores: the number of steps so far, parameters, optimizer state. Also a tree of their shapes or shardings.

    losses: with `train.skip_spikes`, f32[window], the losses of the last steps, NaN for steps still to come; otherwise (). variables:
    everything else that the model keeps from step to step, such as running statistics and random keys. average: with `train.ema`, the
    moving average of the parameters in f32; otherwise (). anchor, momentum: with `sync.every`, the parameters of the last exchange and
    the momentum of the outer step. residual: with `sync.feedback`, what rounding took away from the gradients of each replica, [R, ...].
    waiting: with `sync.late`, the gradients of each replica that the next step applies, [R, ...].
    """

    step: Any
    params: Any
    opt_state: Any
    losses: Any = ()
    variables: Any = ()
    average: Any = ()
    anchor: Any = ()
    momentum: Any = ()
    residual: Any = ()
    waiting: Any = ()


StepFn = Callable[[State, Arrays, jax.Array], tuple[State, dict[str, jax.Array]]]


def make_train_step(
    objective: Objective,
    make_optimizer: MakeOptimizer,
    *,
    parts: Parts,
    clips: bool = False,
    spikes: SpikesConfig | None = None,
    update: Update = update_all,
    ema: float | None = None,
) -> StepFn:
    """step(state, batch of arrays [b, ...], settings f32[3]) → new state and {loss, grad_norm, applied, and the loss's own metrics}.

    parts: those that the batch runs in; loss and gradient are the whole batch's. clips: whether the gradient that the optimizer gets has at
    most the norm of the settings; grad_norm is the norm before. ema: the decay of the average of the parameters.

    applied is false if the loss or the gradient is not finite or the loss is a spike: parameters, variables and optimizer state
    then stay the same, while state.step counts the step.
    """

    def train_step(state: State, batch: Arrays, numbers: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        # Without the barrier XLA would slice the vector once for each parameter's update.
        settings = Settings(*jax.lax.optimization_barrier(tuple(numbers)))
        if objective.is_token_loss:
            # At least 1, because a batch of padding alone would divide 0 by 0.
            batch = batch | {"weights": batch["weights"] / jnp.maximum(jnp.sum(batch["weights"]), 1.0)}
        before = Carried(state.residual, state.waiting)
        (total, part), gradients, carried = parts.differentiate(objective, state.params, state.variables, batch, before)
        with signal.context("optimizer"):
            value = total
            if not objective.is_token_loss:
                value = joined(total, part.weight, parts.count)
                gradients = jax.tree.map(lambda g: joined(g, part.weight, parts.count).astype(g.dtype), gradients)
            norm = optax.tree.norm(gradients)
            # A single element that is not finite makes the norm so.
            finite = jnp.isfinite(norm) if parts.is_late else jnp.isfinite(value) & jnp.isfinite(norm)
            applied, losses = finite, state.losses
            if spikes is not None:
                # A spike enters the window below. If the loss stays high, it is soon no longer a spike.
                applied &= ~_is_spike(value, losses, spikes.deviations)
                # A ring buffer. A loss that is not finite does not enter it: NaN means a step still to come.
                losses = jnp.where(finite, losses.at[state.step % spikes.window].set(value), losses)
            if clips:
                # As optax.clip_by_global_norm, which would compute the norm again.
                factor = jnp.where(norm < settings.clip, 1.0, settings.clip / norm)
                gradients = jax.tree.map(lambda g: g * factor, gradients)
            # Before the first step nothing waits: zeros, by which moments would fade and weights decay.
            moves = applied & (norm > 0) if parts.is_late else applied
            params, opt_state = update(make_optimizer(settings), gradients, state.params, state.opt_state, moves)
            settled, told = objective.settle(part.variables)
            variables = jax.tree.map(lambda new, old: jnp.where(applied, new, old), settled, state.variables)
            average = () if ema is None else _averaged(state.average, params, state.step, applied, ema)
            residual = jax.tree.map(lambda new, old: jnp.where(applied, new, old), carried.residual, state.residual)
            metrics = told | {name: joined(*pair, parts.count) for name, pair in part.metrics.items()}
        after = State(state.step + 1, params, opt_state, losses, variables, average, residual=residual, waiting=carried.waiting)
        return after, {"loss": value, "grad_norm": norm, "applied": applied, **metrics}

    return train_step


def first_average(params: Any, ema: float | None) -> Any:
    """`State.average` before the first step."""
    return () if ema is None else jax.tree.map(lambda p: p.astype(jnp.float32), params)


def _averaged(average: Any, params: Any, step: jax.Array, applied: jax.Array, decay: float) -> Any:
    # As TensorFlow's ExponentialMovingAverage with num_updates: a short run's average would otherwise be its first parameters.
    weight = jnp.where(applied, 1 - jnp.minimum(decay, (1 + step) / (10 + step)), 0.0)
    return jax.tree.map(lambda a, p: a + weight * (p.astype(jnp.float32) - a), average, params)


def no_losses(spikes: SpikesConfig | None) -> Any:
    """`State.losses` before the first step."""
    return () if spikes is None else jnp.full(spikes.window, jnp.nan, jnp.float32)


def _is_spike(loss: jax.Array, before: jax.Array, deviations: float) -> jax.Array:
    """Whether a loss lies more than `deviations` standard deviations above the mean of the losses `before`.

    Never before half a window of losses is known. As OLMo-core's SkipStepOptimizer (olmo_core/optim/skip_step_optimizer.py).
    """
    known = jnp.sum(~jnp.isnan(before)) >= max(2, before.size // 2)
    return known & (loss > jnp.nanmean(before) + deviations * jnp.nanstd(before, ddof=1))


def make_eval_step(objective: Objective) -> Callable[[Any, Any, Arrays], dict[str, tuple[jax.Array, jax.Array]]]:
    """step(params, variables, batch) → by name, a sum and its weight: the loss and its metrics.

    The mean over several batches is the quotient of the sums of both.
    """

    def eval_step(params: Any, variables: Any, batch: Arrays) -> dict[str, tuple[jax.Array, jax.Array]]:
        total, part = objective.evaluated(objective.used(params), variables, batch)
        if objective.is_token_loss:
            return {"loss": (total, jnp.sum(batch["weights"]))}
        rows = len(next(iter(batch.values())))
        return {name: weighed(*pair, rows) for name, pair in {"loss": (total, part.weight), **part.metrics}.items()}

    return eval_step
