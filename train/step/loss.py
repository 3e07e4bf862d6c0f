"""The training loss: cross entropy that never holds the logits of a whole sequence.

Logits [b, s, v] are the largest array of a training step: at a vocabulary of 128,000, thirty times the activations of a layer of width
4096. But each position's logits are used once, for one number and its gradient, and both are known as soon as the logits are. So the loss
takes the sequence in chunks, and computes a chunk's gradient right after its value, before the next chunk begins, as in Liger's fused
linear cross entropy (arXiv 2410.10989). No array has both the whole vocabulary and the whole sequence, and no matmul runs twice. The
backward pass only multiplies the finished gradients by the cotangent, a scalar.

b batch, s seq, d embed, v vocab, g groups: devices that split the batch, p parts: devices that split the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jgt import signal, sum_of_groups
from jgt.document import InputError

from ..models.model import PLACES
from ..models.tables import scores
from .objective import Arrays, TokenLoss

Groups = tuple[int, ...]
"""Over how many devices each of its axes splits the batch, without axes of one device."""

Features = Callable[..., tuple[jax.Array, jax.Array]]
Chunk = tuple[jax.Array, jax.Array, jax.Array]
"""x [b, s, d], targets [b, s] and weights [b, s] of some positions."""
_Gradients = tuple[jax.Array, jax.Array, jax.Array]
_Whole = TypeVar("_Whole")
_Values = TypeVar("_Values")

LOGITS_BYTES = 1 << 30


class _Options(NamedTuple):
    """The arguments of `make_loss` that are not arrays."""

    chunks: int
    groups: Groups
    parts: int
    wide: bool
    softcap: float | None


def make_loss(
    features: Features,
    *,
    chunks: int = 1,
    groups: Groups = (),
    parts: int = 1,
    wide_gradients: bool = False,
    softcap: float | None = None,
) -> TokenLoss:
    """loss(model, {inputs, targets, weights: [b, s]}) → Σ weights · nats, a mean if the weights sum to 1.

    features(model, inputs) → x [b, s, d] and a table [v, d], the factors of the logits. If the batch has some of `PLACES`, features gets
    them too, by their names. chunks: a divisor of s. groups: the devices that split the batch. parts: the number of
    devices that split the sequence. Each device adds up the table's gradient from its own tokens; the sums cross devices once, after the
    last chunk. wide_gradients: whether they do so in f32, whatever the table's type. softcap: the limit of the logits
    (`model.logits_softcap`).
    """

    def loss(model: Any, batch: Arrays) -> jax.Array:
        x, table = features(model, batch["inputs"], **token_places(batch))
        with signal.context("head"):
            return _loss(_Options(chunks, groups, parts, wide_gradients, softcap), x, table, batch["targets"], batch["weights"])

    return loss


def loss_of_logits(model: Any, batch: Arrays) -> jax.Array:
    """As the loss of `make_loss`, of a model that is a function from tokens [b, s] to logits [b, s, v]."""
    logits, tokens = model(batch["inputs"], **token_places(batch)), list(batch["inputs"].shape)
    shape = list(getattr(logits, "shape", ()))
    if shape[:-1] != tokens:
        raise InputError([f"model: returned {shape or type(logits).__name__} for tokens {tokens}. Return logits [b, s, vocab]"])
    with signal.context("loss"):
        return jnp.sum(batch["weights"] * cross_entropy(logits.astype(jnp.float32), batch["targets"]))


def token_places(batch: Mapping[str, _Values]) -> dict[str, _Values]:
    """The arrays of a batch that say where its tokens are, as arguments of a model."""
    return {name: batch[name] for name in PLACES if name in batch}


def num_chunks(rows: int, seq: int, vocab: int, num_devices: int, *, local_seq: int) -> int:
    """The fewest chunks that leave each device at most LOGITS_BYTES of f32 logits, if all devices share them evenly.

    local_seq: positions of the sequence on one device, of which the result is a divisor; all of them are chunks if no divisor suffices.
    """
    wanted = -(-rows * seq * vocab * 4 // (num_devices * LOGITS_BYTES))
    return next(n for n in range(1, local_seq + 1) if local_seq % n == 0 and (n >= wanted or n == local_seq))


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Nats [b, s] of the targets [b, s] under logits [b, s, v]."""
    return jax.nn.logsumexp(logits, axis=-1) - _logits_of(targets, logits)


def by_chunks(values_of: Callable[[_Whole], _Values], whole: _Whole, chunks: int) -> _Values:
    """The values [b, s] that a function has for arrays [b, s, ...], computed for one chunk of the sequence after another."""
    # [chunks, b, s / chunks] → [b, s]
    return values_of(whole) if chunks == 1 else jax.tree.map(_joined, jax.lax.map(values_of, _split(whole, chunks)))


def _logits_of(targets: jax.Array, logits: jax.Array) -> jax.Array:
    # By comparison, not by a gather: a vocabulary that is split over devices stays split, and each device sums its own part.
    return jnp.sum(jnp.where(_is_target(logits, targets), logits, 0), axis=-1)  # [b, s, v] → [b, s]


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets[..., None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(options: _Options, x: jax.Array, table: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """The loss alone, for an evaluation."""
    chunks, softcap = options.chunks, options.softcap

    def nats_of(chunk: Chunk) -> jax.Array:
        x, targets, _ = chunk
        return cross_entropy(scores(x, table, softcap), targets)

    return jnp.sum(weights * by_chunks(nats_of, (x, targets, weights), chunks))


def _forward(options: _Options, x: jax.Array, table: jax.Array, targets: jax.Array, weights: jax.Array) -> tuple[jax.Array, _Gradients]:
    """The loss, and as residuals its gradients by x, table and weights."""
    chunks, groups, parts, wide, softcap = options
    added_up = jnp.dtype(jnp.float32) if wide else table.dtype
    # An evaluation may have a single row.
    groups = groups if len(x) % math.prod(groups) == 0 else ()
    parts = parts if x.shape[1] // chunks % parts == 0 else 1
    every = (*groups, *([parts] if parts > 1 else []))

    def differentiated(chunk: Chunk) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Nats [b, s], and the loss's gradients by x [b, s, d] and by the logits [b, s, v]."""
        x, targets, weights = chunk
        logits = scores(x, table, softcap)
        total = jax.nn.logsumexp(logits, axis=-1)
        nats = total - _logits_of(targets, logits)
        # A plan shall count what follows as the backward pass, although it runs inside the forward pass.
        with signal.backward():
            errors = jnp.exp(logits - total[..., None]) - _is_target(logits, targets)  # softmax minus one-hot
            if softcap is not None:
                errors = errors * (1 - (logits / softcap) ** 2)
            # As for every other gradient, both sides of the matmuls have the type of the activations.
            by_logits = (weights[..., None] * errors).astype(x.dtype)
            return nats, jnp.einsum("bsv,vd->bsd", by_logits, table), by_logits

    def add(by_table: jax.Array, chunk: Chunk) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        nats, by_x, by_logits = differentiated(chunk)
        with signal.backward():
            errors, features = _by_group(by_logits, groups, parts), _by_group(chunk[0], groups, parts)
            # [g, p, v, d]: one sum for each device.
            more = jnp.einsum("gbpsv,gbpsd->gpvd", errors, features, preferred_element_type=jnp.float32)
        return by_table + more, (nats, by_x)

    if chunks == 1:
        nats, by_x, by_logits = differentiated((x, targets, weights))
        with signal.backward():
            by_table = _by_table(x, by_logits, groups, parts, added_up)
    else:
        # Sums of many chunks are f32. The dims of groups and parts let each device add to its own sum, without a collective in the loop.
        zero = jnp.zeros((math.prod(groups), parts, *table.shape), jnp.float32)
        # sums [g, p, v, d], nats [chunks, b, s / chunks], by_x [chunks, b, s / chunks, d]
        sums, (nats, by_x) = jax.lax.scan(add, zero, _split((x, targets, weights), chunks))
        # They cross devices in the table's type, as other gradients.
        by_table = sum_of_groups(sums.astype(added_up).reshape(-1, *table.shape), every)
        nats, by_x = _joined(nats), _joined(by_x)
    # The loss is linear in the weights, so its gradient by them is the nats.
    return jnp.sum(weights * nats), (by_x, by_table.astype(table.dtype), nats)


def _backward(options: _Options, gradients: _Gradients, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, None, jax.Array]:
    by_x, by_table, by_weights = ((cotangent * gradient).astype(gradient.dtype) for gradient in gradients)
    return by_x, by_table, None, by_weights


_loss.defvjp(_forward, _backward)


def _by_table(x: jax.Array, by_logits: jax.Array, groups: Groups, parts: int, dtype: jnp.dtype) -> jax.Array:
    """The loss's gradient by the table [v, d], from the features [b, s, d] and the gradient by the logits [b, s, v]."""
    # bsv,bsd->vd would be the same, but XLA's CPU backend transposes the left side, and v is much larger than d.
    every = (*groups, *([parts] if parts > 1 else []))
    if len(every) < 2:
        return jnp.einsum("bsd,bsv->dv", x, by_logits, preferred_element_type=dtype).T
    factors = _by_group(x, groups, parts), _by_group(by_logits, groups, parts)
    sums = jnp.einsum("gbpsd,gbpsv->gpdv", *factors, preferred_element_type=dtype)
    return sum_of_groups(sums.reshape(-1, *sums.shape[2:]), every).T


def _by_group(x: jax.Array, groups: Groups, parts: int) -> jax.Array:
    """[b, s, ...] → [g, b / g, p, s / p, ...]."""
    b, s, *rest = x.shape
    g = math.prod(groups)
    return x.reshape(g, b // g, parts, s // parts, *rest)


def _split(whole: _Whole, chunks: int) -> _Whole:
    # Chunk i takes positions i, i + chunks, ...: each chunk has positions of every device, so a split sequence does not move.
    return jax.tree.map(lambda a: jnp.moveaxis(a.reshape(a.shape[0], -1, chunks, *a.shape[2:]), 2, 0), whole)


def _joined(parts: jax.Array) -> jax.Array:
    """[chunks, b, s / chunks, ...] → [b, s, ...], the inverse of `_split`."""
    by_row = jnp.moveaxis(parts, 0, 2)  # [b, s / chunks, chunks, ...]
    return by_row.reshape(by_row.shape[0], -1, *by_row.shape[3:])
