"""The training loss, a part of the sequence at a time. b batch, s seq, d embed, v vocab."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jgt import scopes, signal
from train.models.embedding import scores

Batch = dict[str, jax.Array]
Loss = Callable[[Any, Batch], jax.Array]
Features = Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]
Parts = tuple[jax.Array, jax.Array, jax.Array]

LOGITS_BYTES = 1 << 30


def make_loss(features: Features, *, chunks: int = 1, groups: int = 1) -> Loss:
    """loss(params, {inputs, targets, weights: [b, s]}) → Σ weights · nats; weights that sum to 1 make it a mean.

    features(params, inputs) → x [b, s, d] and table [v, d], whose product are the logits. They are made for one of `chunks` parts of the
    sequence at a time, and forward and backward pass of a part are done before the next part begins, as in Liger's fused linear
    cross entropy (arXiv 2410.10989): no array has vocabulary and sequence for its dims, and no matmul runs twice.

    groups: over how many devices the batch is split. Each adds up the table's gradient from its own rows; their sum is taken once.
    """

    def loss(params: Any, batch: Batch) -> jax.Array:
        x, table = features(params, batch["inputs"])
        with signal.context("head"):
            return _loss(chunks, groups, x, table, batch["targets"], batch["weights"])

    return loss


def num_chunks(rows: int, seq: int, vocab: int, num_devices: int, *, divides: int) -> int:
    """The smallest divisor of a length that leaves each device at most LOGITS_BYTES of f32 logits a chunk, if all devices share them."""
    wanted = -(-rows * seq * vocab * 4 // (num_devices * LOGITS_BYTES))
    return next(n for n in range(1, divides + 1) if divides % n == 0 and (n >= wanted or n == divides))


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Nats of each target [b, s] under logits [b, s, v]."""
    return jax.nn.logsumexp(logits, axis=-1) - _picked(logits, targets)


def _picked(logits: jax.Array, targets: jax.Array) -> jax.Array:
    # By comparison instead of a gather, so that a vocabulary that is sharded stays so.
    return jnp.sum(jnp.where(_is_target(logits, targets), logits, 0), axis=-1)


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets[..., None]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss(chunks: int, groups: int, x: jax.Array, table: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    del groups

    def nats(part: Parts) -> jax.Array:
        x, targets, _ = part
        return cross_entropy(scores(x, table), targets)

    parts = x, targets, weights
    found = nats(parts) if chunks == 1 else _joined(jax.lax.map(nats, _split(parts, chunks)))
    return jnp.sum(weights * found)


def _forward(chunks: int, groups: int, x: jax.Array, table: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
    """The loss, and its gradient by x, table and weights."""

    def part(part: Parts) -> tuple[jax.Array, jax.Array, jax.Array]:
        x, targets, weights = part
        logits = scores(x, table)
        total = jax.nn.logsumexp(logits, axis=-1)
        nats = total - _picked(logits, targets)
        with scopes.backward():
            errors = jnp.exp(logits - total[..., None]) - _is_target(logits, targets)
            # As the matmuls of every other gradient: both sides in the type of the activations.
            by_logits = (weights[..., None] * errors).astype(x.dtype)
            return nats, jnp.einsum("bsv,vd->bsd", by_logits, table), by_logits

    def add(by_table: jax.Array, one: Parts) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        nats, by_x, by_logits = part(one)
        with scopes.backward():
            errors, features = (a.reshape(groups, -1, *a.shape[1:]) for a in (by_logits, one[0]))
            by_group = jnp.einsum("gbsv,gbsd->gvd", errors, features, preferred_element_type=jnp.float32)
        return by_table + by_group, (nats, by_x)

    if chunks == 1:
        nats, by_x, by_logits = part((x, targets, weights))
        with scopes.backward():
            # Not bsv,bsd->vd, which would lay the larger side out anew on CPUs.
            by_table = jnp.einsum("bsd,bsv->dv", x, by_logits).T
    else:
        zero = jnp.zeros((groups, *table.shape), jnp.float32)
        by_group, (nats, by_x) = jax.lax.scan(add, zero, _split((x, targets, weights), chunks))
        # What goes from device to device has the table's type, as other gradients have; jnp.sum would widen it.
        by_table = jax.lax.reduce(by_group.astype(table.dtype), table.dtype.type(0), jax.lax.add, (0,))
        nats, by_x = _joined(nats), _joined(by_x)
    return jnp.sum(weights * nats), (by_x, by_table, nats)


def _backward(chunks: int, groups: int, gradients: Any, cotangent: jax.Array) -> Any:
    by_x, by_table, by_weights = ((cotangent * gradient).astype(gradient.dtype) for gradient in gradients)
    return by_x, by_table, None, by_weights


_loss.defvjp(_forward, _backward)


def _split(parts: Parts, chunks: int) -> Parts:
    # Part i takes positions i, i + chunks, ...: where the sequence is sharded, each device keeps the positions it has.
    x, targets, weights = (jnp.moveaxis(a.reshape(a.shape[0], -1, chunks, *a.shape[2:]), 2, 0) for a in parts)
    return x, targets, weights


def _joined(parts: jax.Array) -> jax.Array:
    """Parts [chunks, b, s / chunks, ...] as one array [b, s, ...]."""
    moved = jnp.moveaxis(parts, 0, 2)
    return moved.reshape(moved.shape[0], -1, *moved.shape[3:])
