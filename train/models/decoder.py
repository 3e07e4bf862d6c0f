"""The decoder that every kind of model is: tokens in, a stack of equal layers, scores of the next token out.

Kinds differ in a few parts: the block that is one layer, the norm, the MLP, biases, where positions enter, whether one table both embeds
and scores. What they share is here once, and a kind is a subclass of `Decoder` that names its parts (see `llama.py`). The layers are one
module whose parameters have a leading dim [layers, ...], run by a scan: the program, and the time to compile it, does not grow with depth.
That scan is what a pipeline cuts into stages.

Signals name the regions (`embed`, `layers`, `attn`, `mlp`, `head`) and the values in them; they do nothing until rules name them.

b batch, s seq, d embed, v vocab.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jgt import signal

from .attention import Attention
from .config import ModelConfig
from .experts import balance
from .experts.balance import Routed
from .experts.config import ExpertsConfig
from .kernels import XLA, AttentionKernel
from .linear import cheap, compute_type
from .model import Model, Table, Terms, Vector, of_nnx
from .moe import MoE

TABLE_INIT = nnx.initializers.variance_scaling(1.0, "fan_out", "normal")
"""For a table [rows, embed]: rows start with a length of about 1."""


def build(config: ModelConfig, attention: AttentionKernel = XLA) -> Model:
    """The model of a config; allocates nothing."""
    # By name, because the table of kinds is read where JAX must not be imported.
    module, _, name = config.facts.decoder.partition(":")
    kind: Callable[..., Decoder] = getattr(importlib.import_module(module, __package__), name)
    model, experts = of_nnx(lambda rngs: kind(config, attention, rngs=rngs)), config.experts
    if experts is None:
        return model
    settle = partial(balance.settled, config=experts)
    return replace(model, terms=lambda decoder: decoder.terms, settle=settle, is_trained_differently=experts.has_losses)


class Decoder(nnx.Module):
    """Tokens [b, s] → logits [b, s, v] in f32. A subclass is a kind of model: it names a block, norm and MLP, and if layers have biases."""

    make_block: Callable[..., nnx.Module]
    make_norm: Callable[..., nnx.Module]
    make_mlp: Callable[..., nnx.Module]
    use_bias: bool

    def __init__(self, config: ModelConfig, attention: AttentionKernel = XLA, *, rngs: nnx.Rngs):
        dtype = compute_type(config)
        is_learned = config.facts.positions == "learned"
        # Each line draws random keys in turn: in another order, the same seed would give other initial values.
        self.embed = Embedding(config.vocab, config.embed, dtype, name="embedding", rngs=rngs)
        self.positions = Vector(TABLE_INIT(rngs.params(), (config.seq, config.embed), jnp.float32)) if is_learned else None
        dense = 0 if config.experts is None else config.experts.first_dense
        self.dense = stacked(lambda rngs: self.make_block(replace(config, experts=None), type(self), attention, rngs=rngs), dense, rngs)
        self.layers = stacked(lambda rngs: self.make_block(config, type(self), attention, rngs=rngs), config.layers - dense, rngs)
        self.norm = self.make_norm(config.embed, epsilon=config.norm_eps, dtype=dtype, rngs=rngs)
        self.head = None if config.is_tied else Embedding(config.vocab, config.embed, dtype, name="unembedding", rngs=rngs)
        self.experts = config.experts
        self.terms: Terms = nnx.data({})
        self.counts: Any = nnx.data(())

    def __call__(self, tokens: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        x, table = self.features(tokens, segments)
        with signal.context("head"):
            return scores(x, table)

    def features(self, tokens: jax.Array, segments: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """The two factors of the logits: normed activations [b, s, d] and a table [v, d].

        segments: the position [b, s] at which the document of each token begins; None if each row is one document.
        """
        with signal.context("embed"):
            x = signal.tensor(self.embed(tokens), "rows")
            if self.positions is not None:
                x = x + _positions(self.positions[...], tokens.shape[1], segments).astype(x.dtype)
            # It has another name, so that `out` of this signal may differ from the layout of the rows.
            x = signal.tensor(x, "stream")
        with signal.context("layers"):
            if self.dense is not None:
                x, _ = scan_layers(self.dense, x, segments)
            x, sums = scan_layers(self.layers, x, segments)
        if self.experts is not None:
            self._count(sums, tokens.shape[1], self.experts)
        with signal.context("head"):
            # [b, s, d] and [v, d]
            return signal.tensor(signal.tensor(self.norm(x), "normed"), "operand"), (self.head or self.embed).table()

    def _count(self, sums: Routed, seq: int, experts: ExpertsConfig) -> None:
        """Keeps what the layers have routed: the terms of the loss, the loads for the step, and the counts [L, b, E] for metrics."""
        load = self.layers.moe.load
        load[...] = load[...] + jnp.sum(sums.counts, axis=1)
        self.terms, self.counts = nnx.data(balance.terms(sums, seq, experts)), nnx.data(sums.counts)


class Block(nnx.Module):
    """One layer: attention and MLP, each reads a normed x and adds to x (pre-norm, arXiv 2002.04745).

    [b, s, d] → [b, s, d] and, with experts in the place of the MLP, what they were given.
    """

    def __init__(self, config: ModelConfig, kind: type[Decoder], attention: AttentionKernel, *, rngs: nnx.Rngs):
        self.attn_norm = kind.make_norm(config.embed, epsilon=config.norm_eps, dtype=compute_type(config), rngs=rngs)
        self.attn = Attention(config, attend=attention.attend, use_bias=kind.use_bias, rngs=rngs)
        self.mlp_norm = kind.make_norm(config.embed, epsilon=config.norm_eps, dtype=compute_type(config), rngs=rngs)
        self.mlp = kind.make_mlp(config, rngs=rngs) if config.experts is None else None
        self.moe = None if config.experts is None else MoE(config, kind.make_mlp, rngs=rngs)

    def __call__(self, x: jax.Array, segments: jax.Array | None = None) -> tuple[jax.Array, Routed | None]:
        with signal.context("attn"):
            x = x + self.attn(signal.tensor(cheap(self.attn_norm)(x), "normed"), segments)
        if self.mlp is not None:
            with signal.context("mlp"):
                return x + self.mlp(signal.tensor(cheap(self.mlp_norm)(x), "normed")), None
        assert self.moe is not None
        with signal.context("moe"):
            y, sums = self.moe(signal.tensor(cheap(self.mlp_norm)(x), "normed"))
            return x + y, sums


def stacked(make: Callable[[nnx.Rngs], nnx.Module], num_layers: int, rngs: nnx.Rngs) -> Any:
    """`num_layers` modules as one, whose parameters have a leading dim [layers, ...]; each layer starts from another random key.

    None for no layers.
    """
    if not num_layers:
        return None
    return nnx.vmap(make, in_axes=0, out_axes=0)(rngs.split(num_layers))


def scan_layers(layers: Any, x: jax.Array, segments: jax.Array | None) -> tuple[jax.Array, Any]:
    """x [b, s, d] through stacked layers, each of which also reads the segments [b, s], and what else they return, [layers, ...]."""
    # All layers have the same graph of modules. The scan takes one layer's slice of each parameter and fills the graph with it.
    graphdef, params = nnx.split(layers)

    def layer(x: jax.Array, params: Any) -> tuple[jax.Array, Any]:
        return nnx.merge(graphdef, params)(x, segments)

    return jax.lax.scan(layer, x, params)


def _positions(table: jax.Array, seq: int, segments: jax.Array | None) -> jax.Array:
    """The learned position of each token in its document, from a table [seq, d]: [b, s, d], or [1, s, d] without segments."""
    # The first is a slice. A lookup would cost a gather, and a scatter backward.
    return table[None, :seq] if segments is None else table[jnp.arange(seq)[None, :] - segments]


class Embedding(nnx.Module):
    """A table [v, d] that embeds tokens, [b, s] → [b, s, d], or that scores them (`scores`).

    name: the name of the parameter, so that rules tell the table of the input from the table of the output.
    """

    def __init__(self, vocab: int, embed: int, dtype: jnp.dtype, *, name: str, rngs: nnx.Rngs):
        setattr(self, name, Table(TABLE_INIT(rngs.params(), (vocab, embed), jnp.float32)))
        self.name = name
        self.dtype = dtype

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.table()[tokens]

    def table(self) -> jax.Array:
        """The table [v, d] in the type of matmuls."""
        return signal.tensor(jnp.asarray(getattr(self, self.name)[...], self.dtype), "table")


def scores(x: jax.Array, table: jax.Array) -> jax.Array:
    """Logits [b, s, v] in f32 of every token at every position, from features [b, s, d] and a table [v, d]."""
    # Sums of products are f32 even of bf16 factors: the loss takes their exponential, which would magnify a rounding.
    return signal.tensor(jnp.einsum("bsd,vd->bsv", x, table, preferred_element_type=jnp.float32), "logits")
