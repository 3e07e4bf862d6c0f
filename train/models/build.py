"""A model as two functions of plain arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from train.models.attention import Kernel
from train.models.config import ModelConfig
from train.models.gpt import GPT
from train.models.llama import Llama
from train.models.stack import Remat

_KINDS = {"llama": Llama, "gpt": GPT}


@dataclass(frozen=True, kw_only=True)
class Model:
    """init(key) → parameters as nested dicts; apply(parameters, tokens [b, s]) → logits [b, s, vocab].

    features(parameters, tokens) → ([b, s, embed], [vocab, embed]), of which the logits are the product.
    """

    init: Callable[[jax.Array], Any]
    apply: Callable[[Any, jax.Array], jax.Array]
    features: Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]


def build(config: ModelConfig, remat: Remat = "none", attention: Kernel = "xla") -> Model:
    """The model of a config; nothing is allocated."""
    kind = _KINDS[config.kind]
    abstract = nnx.eval_shape(lambda: kind(config, remat, attention, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)

    def init(key: jax.Array) -> Any:
        return nnx.to_pure_dict(nnx.state(kind(config, remat, attention, rngs=nnx.Rngs(key))))

    def filled(params: Any) -> Any:
        full = jax.tree.map(lambda x: x, state)
        nnx.replace_by_pure_dict(full, params)
        return nnx.merge(graphdef, full)

    return Model(init=init, apply=lambda params, tokens: filled(params)(tokens), features=lambda params, tokens: filled(params).features(tokens))
