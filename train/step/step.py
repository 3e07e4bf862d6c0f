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
from .loss import Arrays, Loss
from .update import Update, update_all


class State(NamedTuple):
    """What a checkpoint stores: the number of steps so far, parameters, optimizer state. Also a tree of their shapes or shardings.

    losses: with `train.skip_spikes`, f32[window], the losses of the last steps, NaN for steps still to come; otherwise ().
    """

    step: Any
    params: Any
    opt_state: Any
    losses: Any = ()


StepFn = Callable[[State, Arrays], tuple[State, dict[str, jax.Array]]]


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
    """step(state, batch of arrays [b, s]) → new state and {loss, grad_norm, applied}.

    loss: a function that sums weights · nats; the step's loss is their mean. accumulate: the number of parts that the batch runs in; loss
    and gradient are the whole batch's. pin_gradients: gives a tree of gradients its shardings. clip: the largest global norm of the
    gradient that the optimizer gets; grad_norm is the norm before. applied is false if the loss or the gradient is not finite or the loss
    is a spike: parameters and optimizer state then stay the same, while state.step counts the step.
    """

    def train_step(state: State, batch: Arrays) -> tuple[State, dict[str, jax.Array]]:
        # At least 1, because a batch of padding alone would divide 0 by 0.
        batch = batch | {"weights": batch["weights"] / jnp.maximum(jnp.sum(batch["weights"]), 1.0)}
        value, gradients = _value_and_gradients(loss, state.params, batch, accumulate, pin_gradients)
        with signal.context("optimizer"):
            norm = optax.tree.norm(gradients)
            # A single element that is not finite makes the norm so.
            finite = jnp.isfinite(value) & jnp.isfinite(norm)
            applied, losses = finite, state.losses
            if spikes is not None:
                # A spike enters the window below. If the loss stays high, it is soon no longer a spike.
                applied &= ~_is_spike(value, losses, spikes.deviations)
                # A ring buffer. A loss that is not finite does not enter it: NaN means a step still to come.
                losses = jnp.where(finite, losses.at[state.step % spikes.window].set(value), losses)
            if clip is not None:
                # As optax.clip_by_global_norm, which would compute the norm again.
                factor = jnp.where(norm < clip, 1.0, clip / norm)
                gradients = jax.tree.map(lambda g: g * factor, gradients)
            params, opt_state = update(optimizer, gradients, state.params, state.opt_state, applied)
        return State(state.step + 1, params, opt_state, losses), {"loss": value, "grad_norm": norm, "applied": applied}

    return train_step


def no_losses(spikes: SpikesConfig | None) -> Any:
    """`State.losses` before the first step."""
    return () if spikes is None else jnp.full(spikes.window, jnp.nan, jnp.float32)


def _is_spike(loss: jax.Array, before: jax.Array, deviations: float) -> jax.Array:
    """Whether a loss lies more than `deviations` standard deviations above the mean of the losses `before`.

    Never before half a window of losses is known. As OLMo-core's SkipStepOptimizer (olmo_core/optim/skip_step_optimizer.py).
    """
    known = jnp.sum(~jnp.isnan(before)) >= max(2, before.size // 2)
    return known & (loss > jnp.nanmean(before) + deviations * jnp.nanstd(before, ddof=1))


def make_eval_step(loss: Loss) -> Callable[[Any, Arrays], tuple[jax.Array, jax.Array]]:
    """step(params, batch) → (Σ weights · nats, Σ weights). The mean over several batches is the quotient of both sums."""

    def eval_step(params: Any, batch: Arrays) -> tuple[jax.Array, jax.Array]:
        return loss(params, batch), jnp.sum(batch["weights"])

    return eval_step


def _value_and_gradients(loss: Loss, params: Any, batch: Arrays, parts: int, pin: Callable[[Any], Any]) -> tuple[jax.Array, Any]:
    if parts == 1:
        return jax.value_and_grad(loss)(params, batch)

    def add(total: tuple[jax.Array, Any], part: Arrays) -> tuple[tuple[jax.Array, Any], None]:
        value, gradients = jax.value_and_grad(loss)(params, part)
        return (total[0] + value, jax.tree.map(jnp.add, total[1], gradients)), None

    # Pinned, or the scan would carry whole gradients on every device.
    zero = (jnp.zeros((), jnp.float32), pin(jax.tree.map(jnp.zeros_like, params)))
    # [b, s] → [parts, b / parts, s]
    total, _ = jax.lax.scan(add, zero, jax.tree.map(lambda x: _split(x, parts), batch))
    return total


def _split(x: jax.Array, parts: int) -> jax.Array:
    # [b, ...] → [parts, b / parts, ...]. Part i takes rows i, i + parts, ...: each part has rows of every device, and none has to move.
    return x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1)
