"""The training loss. b batch, s seq, v vocab."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jgt import signal

Batch = dict[str, jax.Array]
Loss = Callable[[Any, Batch], jax.Array]


def make_loss(apply: Callable[[Any, jax.Array], jax.Array]) -> Loss:
    """loss(params, {inputs, targets, weights: [b, s]}) → Σ weights · nats; weights that sum to 1 make it a mean."""

    def loss(params: Any, batch: Batch) -> jax.Array:
        logits = apply(params, batch["inputs"])
        with signal.context("loss"):
            return jnp.sum(batch["weights"] * cross_entropy(logits, batch["targets"]))

    return loss


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Nats of each target [b, s] under logits [b, s, v].

    The target's logit is picked by comparison instead of a gather, so that a vocabulary that is sharded stays so.
    """
    is_target = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets[..., None]
    picked = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked
