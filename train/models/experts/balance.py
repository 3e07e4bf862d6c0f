"""The load of experts: how many tokens each expert gets, and the two ways to keep the loads equal.

A router that may choose freely learns to choose few experts, and the others stay idle. Two cures exist. A *bias* for each expert is added
to its score for the choice alone. After each step it rises if the expert had less than the mean load and falls if it had more (arXiv
2408.15664), so the gradient knows nothing of it. A *loss* is least where loads are equal (arXiv 2101.03961), and its gradient moves the
router. It is a product of two means, over a sequence or over the batch.

Each layer hands on sums over the tokens of a row (`Routed`) and nothing else, so that what devices add up is small and is added up once for
all layers. The counts are of the whole batch, whatever it is split over; with `train.accumulate` the counts of its parts add up.

L layers, b rows of the batch, s tokens of a row, E experts, k choices of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jgt import signal

from ..stacks import in_order
from .config import ExpertsConfig
from .routing import is_chosen, scores_of

EXPERT_LOAD = "expert_load"
"""The metric that is an array."""


class Bias(nnx.Variable[jax.Array]):
    """A bias that is added to the scores of experts for the choice, f32[E]."""


class Load(nnx.Variable[jax.Array]):
    """The choices of each expert since the last update, int32[E]."""


class Routed(NamedTuple):
    """Sums over the tokens of each row, in one layer, or in all of them with a leading dim [L, ...].

    counts: int32[b, E], how often an expert was chosen. shares: f32[b, E], of scores that sum to 1 for each token; None without a loss
    that reads them. squares: f32[b], of the logarithm of the sum of the exponentials of the logits, squared; None without a z-loss.
    """

    counts: jax.Array
    shares: jax.Array | None
    squares: jax.Array | None


def routed(logits: jax.Array, choice: jax.Array, config: ExpertsConfig) -> Routed:
    """The sums of a layer with logits [b, s, E] and choices [b, s, k]."""
    shares = squares = None
    if config.has_balance_loss:
        scores = scores_of(logits, config)
        shares = jnp.sum(scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20), axis=1)
    if config.z_loss:
        squares = jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)), axis=1)
    return Routed(jnp.sum(is_chosen(choice, config.count), axis=(1, 2), dtype=jnp.int32), shares, squares)


def terms(sums: Routed, seq: int, config: ExpertsConfig) -> dict[str, tuple[jax.Array, float]]:
    """The router's terms of the loss by name: each a mean over layers and tokens, and the factor by which the loss has it.

    sums: the sums of all layers. seq: the tokens of a row. `balance_loss` is 1 where all loads are equal.
    """
    found: dict[str, tuple[jax.Array, float]] = {}
    num_layers = sums.counts.shape[0]
    if sums.shares is not None:
        with signal.context("balance"), signal.per_microbatch():
            loads = sums.counts.astype(jnp.float32) * (config.count / (seq * config.choose))  # [L, b, E], 1 on average
            shares = sums.shares / seq
            if config.balance == "batch":
                # As a product with each row's shares it is a mean over rows, which a pipeline can add up.
                loads = jnp.broadcast_to(jnp.mean(loads, axis=1, keepdims=True), shares.shape)
            found["balance_loss"] = jnp.mean(jnp.sum(loads * shares, axis=-1)), config.rate * num_layers
    if sums.squares is not None:
        found["z_loss"] = jnp.mean(sums.squares) / seq, config.z_loss * num_layers
    return found


def settled(variables: Any, config: ExpertsConfig, stacks: Sequence[Sequence[str]] = (("layers",),)) -> tuple[Any, dict[str, jax.Array]]:
    """The model's variables with the bias adjusted by the loads and the loads back at 0, and the step's metrics.

    stacks: the paths of the layers of each stack that has experts, in the order of its period. `load_max`: the largest load of a layer in
    mean loads, the mean over layers. `load_entropy`: 1 if all experts of a layer have the same load, 0 if one has all; the mean over
    layers. `expert_load`: f32[L, E], loads in mean loads.
    """
    places = [[_at(variables, path)["load"].astype(jnp.float32) for path in paths] for paths in stacks]
    loads = in_order(places)
    share = loads / jnp.maximum(jnp.sum(loads, axis=-1, keepdims=True), 1.0)  # [L, E]
    entropy = -jnp.sum(jax.scipy.special.xlogy(share, share), axis=-1) / jnp.log(max(config.count, 2))
    metrics = {
        "load_max": jnp.mean(jnp.max(share, axis=-1)) * config.count,
        "load_entropy": jnp.mean(entropy),
        EXPERT_LOAD: share * config.count,
    }
    for paths, own in zip(stacks, places, strict=True):
        for path, of_place in zip(paths, own, strict=True):
            variables = _changed(variables, [*path.split("/"), "moe"], partial(_settled, loads=of_place, config=config))
    if "mtp" in variables:
        loads = _at(variables, "mtp/block")["load"].astype(jnp.float32)
        variables = _changed(variables, ["mtp", "block", "moe"], partial(_settled, loads=loads, config=config))
    return variables, metrics


def _settled(layer: Mapping[str, Any], loads: jax.Array, config: ExpertsConfig) -> Mapping[str, Any]:
    """The variables of the experts of a place of the period."""
    after = {**layer, "load": jnp.zeros_like(layer["load"])}
    if "bias" in layer:
        after["bias"] = layer["bias"] + config.rate * jnp.sign(jnp.mean(loads, axis=-1, keepdims=True) - loads)
    return after


def _at(variables: Any, path: str) -> Any:
    for name in path.split("/"):
        variables = variables[name]
    return variables["moe"]


def _changed(tree: Any, path: Sequence[str], change: Callable[[Any], Any]) -> Any:
    return change(tree) if not path else {**tree, path[0]: _changed(tree[path[0]], path[1:], change)}
