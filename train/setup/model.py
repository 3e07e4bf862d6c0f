"""The model of a run: the trainer's own, with the kernels that the run's devices have, or one of the user's own, by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jgt.document import InputError
from jgt.replacements.experts.experts import exchange_at
from jgt.replacements.experts.grouped import mosaic_obstacle

from ..code.files import Code
from ..code.names import call_with, load_object
from ..models.config import ModelConfig, OwnModel
from ..models.decoder import build
from ..models.experts.config import ExpertsConfig
from ..models.kernels import AttentionChoice, choose_attention
from ..models.linear import compute_type
from ..models.model import Model, Terms, of_flax
from .layout import MeshLayout

Where = Callable[[str], str]
"""The file and line of a key of the run."""
_EXPERTS, _RANK = "layers/moe", 3
"""The signal of the decoders' experts, and the dims of what they read."""


def own_model(config: OwnModel, code: Code, where: Where, call: Callable[[Any], Any]) -> Model:
    """The model. where(key): file and line of a key of the config. call: see `of_flax`. Raises InputError."""
    target = load_object(config.kind, "model.kind", code, where("model.kind"))
    offered = {"vocab": config.vocab, "seq": config.seq, "dtype": compute_type(config)}

    def place(key: str) -> str:
        return f"{where(f'model.{key}')}: model.{key}"

    def make(rngs: Any) -> Any:
        return call_with(target, config.arguments, {**offered, "rngs": rngs}, lambda key: place(key or "kind"))

    try:
        return of_flax(make, call)
    except TypeError as error:
        raise InputError([f"{place('kind')}: {config.kind}: {error}"]) from error


def built_model(config: ModelConfig, layout: MeshLayout, where: Where) -> tuple[Model, AttentionChoice, str]:
    """The trainer's own model, its attention kernel, and how the matmuls of its experts run, as in the log. Raises InputError."""
    attention = _attention(config, layout, where)
    model = build(config, attention.kernel)
    if config.experts is None:
        return model, attention, ""
    return _with_exchange_metrics(model, config.experts, config.seq, layout), attention, _grouped_matmuls(config, layout.device)


def _attention(model: ModelConfig, layout: MeshLayout, where: Where) -> AttentionChoice:
    """The attention kernel. Raises InputError where the file asks for one that is not available."""
    choice = choose_attention(model, layout.device, sharing=layout.devices_of_stage)
    if model.attention not in ("auto", choice.kernel.name):
        why = f"{model.attention} is not available here: {choice.why}. Use auto, which takes it where it is available, or xla"
        raise InputError([f"{where('model.attention')}: model.attention: {why}"])
    return choice


def _grouped_matmuls(model: ModelConfig, device: Any) -> str:
    """The way in which the matmuls of experts run, as in the log."""
    if model.fp8:
        return "blocks of rows in eight bits"
    obstacle = mosaic_obstacle(compute_type(model), device)
    return f"blocks of rows ({obstacle})" if obstacle else "Mosaic's kernels"


def _with_exchange_metrics(model: Model, experts: ExpertsConfig, seq: int, layout: MeshLayout) -> Model:
    """The model with metrics of the exchange of its experts: `exchange_rounds`, or `exchange_dropped` where rows may be dropped.

    The model itself where the counts of a row do not say which device they are on: in a pipeline, and where rules split the sequence.
    """
    exchange = exchange_at(layout.rules, _EXPERTS, _RANK, layout.mesh.shape) if layout.pipeline is None else None
    if exchange is None:
        return model

    def terms(decoder: Any) -> Terms:
        own, counts = model.terms(decoder), decoder.counts  # [L, b, E]
        if not exchange.can_count(*counts.shape[-2:]):
            return own
        rounds, dropped = exchange.served(counts, seq, experts.choose)
        name, value = ("exchange_dropped", jnp.mean(dropped)) if exchange.drops else ("exchange_rounds", jnp.max(rounds))
        # Terms without a factor are metrics alone.
        return {**own, name: (value.astype(jnp.float32), 0.0)}

    return replace(model, terms=terms, is_trained_differently=True)
