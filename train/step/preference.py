"""The losses of preferences: of two answers to one prompt, people preferred the first.

Direct preference optimisation (DPO, arXiv 2305.18290) needs neither a model of rewards nor samples. The reward of an answer is how much
likelier the model finds it than the reference, which is the model before its first step:

    reward = beta (log p(answer | prompt) - log p_reference(answer | prompt))
    loss   = -log sigmoid(reward of the chosen answer - reward of the rejected one)

The reference does not change, so its log-probabilities are data: a run computes them once (`train.evaluate.reference`), and a step neither
holds a second model nor runs it.

Odds ratio preference optimisation (ORPO, arXiv 2403.07691) needs no reference at all. With P the geometric mean of the probabilities of an
answer's tokens, it trains on the chosen answer and away from the rejected one at once:

    odds = P / (1 - P)
    loss = -log P(chosen answer) - beta log sigmoid(log(odds of the chosen answer / odds of the rejected one))

b pairs, s seq, d embed, v vocab.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jgt import signal

from ..models.tables import scores
from .loss import by_chunks, cross_entropy, token_places
from .objective import Arrays

REFERENCE = "reference"
"""The name in a batch of the reference's log-probabilities, f32[b, 2]."""
_LARGEST_LOG = -1e-6
"""A probability has at most this logarithm where its odds are taken, which are infinite at 1."""
_Mean = tuple[jax.Array, jax.Array]
_Means = tuple[_Mean, dict[str, _Mean]]
"""The loss and the metrics of a batch, each a sum over pairs and their number."""


def dpo_loss(model: Any, batch: Arrays, *, beta: float, chunks: int = 1, softcap: float | None = None) -> _Means:
    """The loss of DPO as a sum over pairs and their number, and its metrics in the same form.

    batch: {inputs, targets: int[b, 2, s], weights: f32[b, 2, s], reference: f32[b, 2]}: the chosen answer and the rejected one. Tokens
    with weight 0 are not a part of the answer. A pair without weights is padding. chunks: parts of the sequence whose logits exist at a
    time, a divisor of s. softcap: the limit of the logits.
    """
    rewards = beta * (log_probabilities(model, batch, chunks=chunks, softcap=softcap) - batch[REFERENCE])  # [b, 2]
    margins = rewards[:, 0] - rewards[:, 1]
    return _means(batch, -jax.nn.log_sigmoid(margins), margins, chosen_reward=rewards[:, 0])


def orpo_loss(model: Any, batch: Arrays, *, beta: float, chunks: int = 1, softcap: float | None = None) -> _Means:
    """As `dpo_loss`, the loss of ORPO, of a batch without a reference. beta: the weight of the odds, which the paper calls lambda."""
    tokens = jnp.maximum(jnp.sum(batch["weights"], -1), 1)
    logs = log_probabilities(model, batch, chunks=chunks, softcap=softcap) / tokens  # [b, 2]
    bounded = jnp.minimum(logs, _LARGEST_LOG)
    odds = bounded - jnp.log(-jnp.expm1(bounded))
    margins = odds[:, 0] - odds[:, 1]
    return _means(batch, -logs[:, 0] - beta * jax.nn.log_sigmoid(margins), margins, chosen_nats=-logs[:, 0])


def _means(batch: Arrays, losses: jax.Array, margins: jax.Array, **others: jax.Array) -> _Means:
    """The loss and the metrics, as sums over pairs and their number. losses, margins, others: [b]."""
    is_pair = jnp.any(batch["weights"] > 0, (1, 2)).astype(jnp.float32)
    metrics = {"margin": margins, "accuracy": (margins > 0).astype(jnp.float32), **others}
    loss, metrics = jax.tree.map(lambda values: (jnp.sum(is_pair * values), jnp.sum(is_pair)), (losses, metrics))
    return loss, metrics


def log_probabilities(model: Any, batch: Arrays, *, chunks: int = 1, softcap: float | None = None) -> jax.Array:
    """The log-probability f32[b, 2] of the answers of each pair, in a batch as `dpo_loss` has it."""
    pairs = {name: x for name, x in batch.items() if name != REFERENCE}
    rows = {name: x.reshape(-1, *x.shape[2:]) for name, x in pairs.items()}  # [b, 2, s] → [2 b, s]
    nats = _nats(model, rows, chunks, softcap)
    return -jnp.sum(rows["weights"] * nats, -1).reshape(-1, 2)


def _nats(model: Any, rows: Arrays, chunks: int, softcap: float | None) -> jax.Array:
    """The nats [2 b, s] of the targets."""
    if not hasattr(model, "features"):
        logits = model(rows["inputs"], **token_places(rows)).astype(jnp.float32)
        with signal.context("loss"):
            return cross_entropy(logits, rows["targets"])
    x, table = model.features(rows["inputs"], **token_places(rows))

    # Differentiated, a chunk computes its logits a second time: the factor of a token's gradient is known after the last chunk alone.
    @partial(jax.checkpoint, prevent_cse=False)
    def of_chunk(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, targets = chunk
        return cross_entropy(scores(x, table, softcap), targets)

    with signal.context("head"):
        return by_chunks(of_chunk, (x, rows["targets"]), chunks)
