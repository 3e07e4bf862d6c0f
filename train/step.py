"""The training step and the evaluation step, as pure functions of state and batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jgt import signal
from train.loss import Batch, Loss
from train.sections import SpikesConfig
from train.update import Update, update_all


class State(NamedTuple):
    """What a checkpoint holds: updates done, parameters, optimizer state; also their shapes or shardings.

    losses: f32[window], those of the last steps, where spikes are skipped; NaN where there is none yet.
    """

    step: Any
    params: Any
    opt_state: Any
    losses: Any = ()


StepFn = Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]


def make_train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    accumulate: int,
    pin_gradients: Callable[[Any], Any],
    clip: float | None = None,
    spikes: SpikesConfig | None = None,
    update: Update = update_all,
) -> StepFn:
    """step(state, batch [b, s]) → new state and {loss, grad_norm, applied}.

    The loss is the mean over the batch's weights. With accumulate n the batch runs in n parts, one after another; loss and
    gradient are those of the whole batch. clip: the largest global norm of the gradient that the optimizer gets. An update whose loss or gradient is not finite, or whose loss is a spike, is not applied:
    it leaves parameters and optimizer state as they were.
    """

    def train_step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        batch = batch | {"weights": batch["weights"] / jnp.maximum(jnp.sum(batch["weights"]), 1.0)}
        value, gradients = _value_and_gradients(loss, state.params, batch, accumulate, pin_gradients)
        with signal.context("optimizer"):
            norm = optax.tree.norm(gradients)
            finite = jnp.isfinite(value) & jnp.isfinite(norm)
            applied, losses = finite, state.losses
            if spikes is not None:
                applied &= ~_is_spike(value, losses, spikes.deviations)
                losses = jnp.where(finite, losses.at[state.step % spikes.window].set(value), losses)
            if clip is not None:
                factor = jnp.where(norm < clip, 1.0, clip / norm)
                gradients = jax.tree.map(lambda g: g * factor, gradients)
            params, opt_state = update(optimizer, gradients, state.params, state.opt_state, applied)
        return State(state.step + 1, params, opt_state, losses), {"loss": value, "grad_norm": norm, "applied": applied}

    return train_step


def no_losses(spikes: SpikesConfig | None) -> Any:
    """The losses of a state that has trained no step."""
    return () if spikes is None else jnp.full(spikes.window, jnp.nan, jnp.float32)


def _is_spike(loss: jax.Array, before: jax.Array, deviations: float) -> jax.Array:
    """Whether a loss lies so many standard deviations above the mean of those before, of which at least half a window is known.

    As OLMo-core's SkipStepOptimizer does (olmo_core/optim/skip_step_optimizer.py).
    """
    known = jnp.sum(~jnp.isnan(before)) >= max(2, before.size // 2)
    return known & (loss > jnp.nanmean(before) + deviations * jnp.nanstd(before, ddof=1))


def make_eval_step(loss: Loss) -> Callable[[Any, Batch], tuple[jax.Array, jax.Array]]:
    """step(params, batch) → (Σ weights · nats, Σ weights), to be added up over batches."""

    def eval_step(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        return loss(params, batch), jnp.sum(batch["weights"])

    return eval_step


def _value_and_gradients(loss: Loss, params: Any, batch: Batch, parts: int, pin: Callable[[Any], Any]) -> tuple[jax.Array, Any]:
    if parts == 1:
        return jax.value_and_grad(loss)(params, batch)

    def add(total: tuple[jax.Array, Any], part: Batch) -> tuple[tuple[jax.Array, Any], None]:
        value, gradients = jax.value_and_grad(loss)(params, part)
        return (total[0] + value, jax.tree.map(jnp.add, total[1], gradients)), None

    zero = (jnp.zeros((), jnp.float32), pin(jax.tree.map(jnp.zeros_like, params)))
    total, _ = jax.lax.scan(add, zero, jax.tree.map(lambda x: _split(x, parts), batch))
    return total


def _split(x: jax.Array, parts: int) -> jax.Array:
    # Part i takes rows i, i + parts, ...: each device keeps the rows it has.
    return x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
