"""The training step and the evaluation step, as pure functions of state and batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jgt import signal
from train.loss import Batch, Loss


class State(NamedTuple):
    """What a checkpoint holds: updates done, parameters, optimizer state; also their shapes or shardings."""

    step: Any
    params: Any
    opt_state: Any


StepFn = Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]


def make_train_step(
    loss: Loss, optimizer: optax.GradientTransformation, *, accumulate: int, pin_gradients: Callable[[Any], Any]
) -> StepFn:
    """step(state, batch [b, s]) → new state and {loss, grad_norm, finite}.

    The loss is the mean over the batch's weights. With accumulate n the batch runs in n parts, one after another; loss and
    gradient are those of the whole batch. An update whose loss or gradient is not finite leaves parameters and optimizer state as
    they were.
    """

    def train_step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        batch = batch | {"weights": batch["weights"] / jnp.maximum(jnp.sum(batch["weights"]), 1.0)}
        value, gradients = _value_and_gradients(loss, state.params, batch, accumulate, pin_gradients)
        with signal.context("optimizer"):
            updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            norm = optax.tree.norm(gradients)
            finite = jnp.isfinite(value) & jnp.isfinite(norm)
            new, old = (params, opt_state), (state.params, state.opt_state)
            params, opt_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)
        return State(state.step + 1, params, opt_state), {"loss": value, "grad_norm": norm, "finite": finite}

    return train_step


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
