"""The choice of the experts of each token, and the scales of their results, from the router's logits.

    softmax   as Mixtral and Qwen3-MoE (arXiv 2401.04088, 2505.09388): probabilities, of which the chosen ones are divided by their sum
    sigmoid   as DeepSeek-V3 (arXiv 2412.19437): affinities between 0 and 1, of which the chosen ones are divided by their sum

A token with one expert keeps its score undivided unless `normalized` says otherwise, as in Switch (arXiv 2101.03961): a quotient would
be 1 whatever the router says. A bias moves the choice alone and never the scales, so it changes which experts a token gets and leaves
their gradients exact.

Everything here works on each token on its own, in sums and maxima over experts. A sort or a gather would do the same, but XLA's partitioner
brings the logits of all devices together for them.

E experts, k choices of a token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .config import ExpertsConfig, GroupsConfig


def route(logits: jax.Array, bias: jax.Array | None, config: ExpertsConfig) -> tuple[jax.Array, jax.Array]:
    """choice int32[..., k] and scale f32[..., k] of tokens with f32 logits [..., E]. bias [E]: is added to the scores for the choice."""
    scores = scores_of(logits, config)
    ranked = jax.lax.stop_gradient(scores if bias is None else scores + jnp.broadcast_to(bias, scores.shape))
    if config.groups is not None:
        ranked = _limited(ranked, config.groups, config.choose)
    choice = _best(ranked, config.choose)
    scale = jnp.sum(jnp.where(is_chosen(choice, config.count), scores[..., None, :], 0.0), axis=-1)
    if config.is_normalized:
        # Affinities may all be 0 in f32.
        scale = scale / (jnp.sum(scale, axis=-1, keepdims=True) + 1e-20)
    return choice, scale if config.result_scale == 1 else scale * config.result_scale


def scores_of(logits: jax.Array, config: ExpertsConfig) -> jax.Array:
    """The scores [..., E] of experts, between 0 and 1."""
    return jax.nn.softmax(logits, axis=-1) if config.score == "softmax" else jax.nn.sigmoid(logits)


def is_chosen(choice: jax.Array, num_experts: int) -> jax.Array:
    """Choices int32[..., k] as bool[..., k, E]."""
    return choice[..., None] == jax.lax.broadcasted_iota(jnp.int32, (*choice.shape, num_experts), choice.ndim)


def _limited(ranked: jax.Array, groups: GroupsConfig, choose: int) -> jax.Array:
    """Scores [..., E], of groups that are not chosen -inf.

    A group is as good as its best experts together, by default as many as a chosen group has (arXiv 2412.19437, section 2.1.2).
    """
    by_group = ranked.reshape(*ranked.shape[:-1], groups.count, -1)
    best = _best(by_group, min(groups.of_best(choose), by_group.shape[-1]))
    worth = jnp.sum(jnp.where(is_chosen(best, by_group.shape[-1]), by_group[..., None, :], 0.0), axis=(-2, -1))
    allowed = jnp.any(is_chosen(_best(worth, groups.choose), groups.count), axis=-2)
    return jnp.where(allowed[..., None], by_group, -jnp.inf).reshape(ranked.shape)


def _best(scores: jax.Array, num: int) -> jax.Array:
    """The places int32[..., num] of the largest of scores [..., E], the largest first, the first of equal ones."""
    found: list[jax.Array] = []
    left = scores
    for _ in range(num):
        found.append(jnp.argmax(left, axis=-1).astype(jnp.int32))
        left = jnp.where(is_chosen(found[-1][..., None], scores.shape[-1])[..., 0, :], -jnp.inf, left)
    return jnp.stack(found, axis=-1)
