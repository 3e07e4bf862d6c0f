"""The decoder that every kind of model is: tokens in, a stack of equal layers, scores of the next token out.

Kinds differ in a few parts: the block that is one layer, the norm, the MLP, biases, where positions enter, whether one table both embeds
and scores. What they share is here once, and a kind is a subclass of `Decoder` that names its parts (see `llama.py`). The layers are one
module whose parameters have a leading dim [layers, ...], run by a scan: the program, and the time to compile it, does not grow with depth.
That scan is what a pipeline cuts into stages.

Signals name the regions (`embed`, `layers`, `attn`, `mlp`, `head`) and the values in them; they do nothing until rules name them.

The rest of the trainer knows nothing of Flax: `build` gives it a model as functions of plain arrays. An optimizer needs one fact more of
each parameter, its role: should Muon orthogonalise it, and should it decay? A name cannot answer: a matrix that someone calls `weight`
instead of `kernel` would miss Muon without a word. So the answer comes from the parameter's type, and for a plain nnx.Param, which
Flax's own layers have, from its rank within one layer:

    role      Muon updates it   it decays   declared as
    matrix    yes               yes         nnx.Param of rank 2 or more; its last two dims are the matrix, the others stack matrices
    table     no, AdamW         yes         Table, of any rank
    vector    no, AdamW         no          Vector, of any rank, or nnx.Param of rank 0 or 1

A kernel of nnx.Linear is thus a matrix, and its bias or a norm's scale a vector. The dim that stacked layers add is not part of the rank.

b batch, s seq, d embed, v vocab.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jgt import signal

from .attention import XLA, Attend, Attention, AttentionKernel, attend_with
from .config import ModelConfig
from .linear import compute_type

Remat = str | tuple[str, ...]
"""What the backward pass computes again, as `train.remat` says it."""

TABLE_INIT = nnx.initializers.variance_scaling(1.0, "fan_out", "normal")
"""For a table [rows, embed]: rows start with a length of about 1."""

Role = Literal["matrix", "table", "vector"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model without its parameters, which are nested dicts of arrays.

    init(key) → parameters. apply(parameters, tokens [b, s]) → logits [b, s, vocab]. features(parameters, tokens) → [b, s, embed] and
    [vocab, embed], the factors of the logits. roles: the role of each parameter, in a tree like theirs.
    """

    init: Callable[[jax.Array], Any]
    apply: Callable[[Any, jax.Array], jax.Array]
    features: Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]
    roles: Any


def build(config: ModelConfig, remat: Remat = "none", attention: AttentionKernel = XLA) -> Model:
    """The model of a config; allocates nothing."""
    # By name, because the table of kinds is read where JAX must not be imported.
    module, _, name = config.facts.decoder.partition(":")
    kind: Callable[..., Decoder] = getattr(importlib.import_module(module, __package__), name)
    abstract = nnx.eval_shape(lambda: kind(config, remat, attention, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)

    def init(key: jax.Array) -> Any:
        return nnx.to_pure_dict(nnx.state(kind(config, remat, attention, rngs=nnx.Rngs(key))))

    def with_params(params: Any) -> Decoder:
        # A copy of the tree, because replace_by_pure_dict writes into it.
        filled = jax.tree.map(lambda x: x, state)
        nnx.replace_by_pure_dict(filled, params)
        return nnx.merge(graphdef, filled)

    return Model(
        init=init,
        apply=lambda params, tokens: with_params(params)(tokens),
        features=lambda params, tokens: with_params(params).features(tokens),
        roles=roles(state),
    )


class Decoder(nnx.Module):
    """Tokens [b, s] → logits [b, s, v] in f32. A subclass is a kind of model: it names a block, norm and MLP, and if layers have biases."""

    make_block: Callable[..., nnx.Module]
    make_norm: Callable[..., nnx.Module]
    make_mlp: Callable[..., nnx.Module]
    use_bias: bool

    def __init__(self, config: ModelConfig, remat: Remat = "none", attention: AttentionKernel = XLA, *, rngs: nnx.Rngs):
        dtype = compute_type(config)
        is_learned = config.facts.positions == "learned"
        # Each line draws random keys in turn: in another order, the same seed would give other initial values.
        self.embed = Embedding(config.vocab, config.embed, dtype, name="embedding", rngs=rngs)
        self.positions = Vector(TABLE_INIT(rngs.params(), (config.seq, config.embed), jnp.float32)) if is_learned else None
        attend = attend_with(attention, recompute=remat == "attention")
        self.layers = stacked(lambda rngs: self.make_block(config, type(self), attend, rngs=rngs), config.layers, rngs)
        self.norm = self.make_norm(config.embed, epsilon=config.norm_eps, dtype=dtype, rngs=rngs)
        self.head = None if config.is_tied else Embedding(config.vocab, config.embed, dtype, name="unembedding", rngs=rngs)
        self.remat = remat

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x, table = self.features(tokens)
        with signal.context("head"):
            return scores(x, table)

    def features(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The two factors of the logits: normed activations [b, s, d] and a table [v, d]."""
        with signal.context("embed"):
            x = self.embed(tokens)
            if self.positions is not None:
                # [seq, d] → [1, s, d]
                x = x + self.positions[...][None, : tokens.shape[1]].astype(x.dtype)
        with signal.context("layers"):
            x = scan_layers(self.layers, x, self.remat)
        with signal.context("head"):
            # [b, s, d] and [v, d]
            return self.norm(x), (self.head or self.embed).table()


class Block(nnx.Module):
    """One layer [b, s, d] → [b, s, d]: attention and MLP, each reads a normed x and adds to x (pre-norm, arXiv 2002.04745)."""

    def __init__(self, config: ModelConfig, kind: type[Decoder], attend: Attend, *, rngs: nnx.Rngs):
        self.attn_norm = kind.make_norm(config.embed, epsilon=config.norm_eps, dtype=compute_type(config), rngs=rngs)
        self.attn = Attention(config, attend=attend, use_bias=kind.use_bias, rngs=rngs)
        self.mlp_norm = kind.make_norm(config.embed, epsilon=config.norm_eps, dtype=compute_type(config), rngs=rngs)
        self.mlp = kind.make_mlp(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        with signal.context("attn"):
            x = x + self.attn(signal.tensor(self.attn_norm(x), "normed"))
        with signal.context("mlp"):
            return x + self.mlp(signal.tensor(self.mlp_norm(x), "normed"))


def stacked(make: Callable[[nnx.Rngs], nnx.Module], num_layers: int, rngs: nnx.Rngs) -> Any:
    """`num_layers` modules as one, whose parameters have a leading dim [layers, ...]; each layer starts from a random key of its own."""
    layers = nnx.vmap(make, in_axes=0, out_axes=0)(rngs.split(num_layers))
    for _, variable in nnx.iter_graph(layers):
        if isinstance(variable, nnx.Param):
            # The leading dim counts layers. It is not part of a parameter's rank within a layer, which decides its role.
            variable.set_metadata("is_stacked", True)
    return layers


def scan_layers(layers: Any, x: jax.Array, remat: Remat) -> jax.Array:
    """x [b, s, d] through stacked layers.

    remat: `block` computes each layer again from its input; a tuple of tensor names keeps those tensors and computes the rest again;
    `none` keeps whatever the backward pass reads. So does `attention`, which is done inside attention (`attend_with`).
    """
    # All layers have the same graph of modules. The scan takes one layer's slice of each parameter and fills the graph with it.
    graphdef, params = nnx.split(layers)

    def layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
        return nnx.merge(graphdef, params)(x), None

    if remat not in ("none", "attention"):
        names = () if isinstance(remat, str) else remat
        # Without names the policy saves nothing, which is what `block` means.
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        # A scan is a barrier to common subexpression elimination already; JAX's own would only cost speed.
        layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    x, _ = jax.lax.scan(layer, x, params)
    return x


class Embedding(nnx.Module):
    """A table [v, d] that embeds tokens, [b, s] → [b, s, d], or that scores them (`scores`).

    name: of the parameter, so that rules tell the table of the input from the table of the output.
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


class Table(nnx.Param):
    """Rows that are looked up or scored, such as an embedding [vocab, embed]."""


class Vector(nnx.Param):
    """What is added or multiplied element by element, whatever its rank: learned positions [seq, embed] are one vector a position."""


def roles(state: nnx.State) -> Any:
    """The role of each parameter of a model, as nested dicts like the parameters."""
    return nnx.to_pure_dict(state, extract_fn=_role)


def _role(variable: Any) -> Role:
    if isinstance(variable, Table):
        return "table"
    # A norm's scale in stacked layers is [layers, embed]; in a layer it is a vector.
    rank = len(variable.get_value().shape) - bool(variable.get_metadata().get("is_stacked"))
    return "vector" if isinstance(variable, Vector) or rank < 2 else "matrix"
