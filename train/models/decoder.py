"""The decoder that every kind of model is: tokens in, a stack of layers, scores of the next token out.

Models differ in options (`options.py`): the norm and its place, the MLP, biases, where positions enter, which tokens a layer sees. The
layers are one module whose parameters have a leading dim [layers, ...], run by a scan: the program, and the time to compile it, does not
grow with depth. That scan is what a pipeline cuts into stages. Where layers are of several kinds, its body is a period of them, or there
are several scans (`stacks.py`).

Signals name the regions (`embed`, `layers`, `attn`, `mlp`, `head`) and the values in them; they do nothing until rules name them.

b batch, s seq, d embed, v vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jgt import signal

from . import cache as caches
from .attention import Attention
from .cache import Cache
from .config import ModelConfig
from .experts import balance
from .experts.balance import Routed
from .experts.config import ExpertsConfig
from .experts.moe import MoE
from .kernels import XLA, AttentionKernel
from .linear import cheap, compute_type, make_norm
from .mla import LatentAttention
from .mlp import MLP
from .model import Model, Terms, Vector, of_nnx
from .mtp import SecondToken
from .recurrent.delta import DeltaNet
from .stacks import LayerStack, in_order, stacks_of
from .tables import TABLE_INIT, Embedding, scores, with_bias
from .tokens import LayerFlags, Rows


def build(config: ModelConfig, attention: AttentionKernel = XLA) -> Model:
    """The model of a config; allocates nothing."""
    model, experts = of_nnx(lambda rngs: Decoder(config, attention, rngs=rngs)), config.experts
    if experts is None:
        return model
    settle = partial(balance.settled, config=experts, stacks=[stack.paths for stack in stacks_of(config) if not stack.is_dense])
    return replace(model, terms=lambda decoder: decoder.terms, settle=settle, is_trained_differently=experts.has_losses)


class Decoder(nnx.Module):
    """Tokens [b, s] → logits [b, s, v] in f32."""

    def __init__(self, config: ModelConfig, attention: AttentionKernel = XLA, *, rngs: nnx.Rngs):
        dtype = compute_type(config)
        # Each line draws random keys in turn: in another order, the same seed would give other initial values.
        self.embed = Embedding(config.vocab, config.embed, dtype, name="embedding", rngs=rngs)
        is_learned = config.positions == "learned"
        self.positions = Vector(TABLE_INIT(rngs.params(), (config.seq, config.embed), jnp.float32)) if is_learned else None
        self.stacks = stacks_of(config)
        for stack in self.stacks:
            own = replace(config, experts=None) if stack.is_dense else config
            setattr(self, stack.name, stacked(partial(_period, own, stack, attention), stack.count, rngs))
        self.mtp = stacked(lambda rngs: SecondToken(config, Block(config, attention, rngs=rngs), rngs=rngs), config.num_further, rngs)
        self.norm = make_norm(config, config.embed, rngs)
        self.head = None if config.tied else Embedding(config.vocab, config.embed, dtype, name="unembedding", rngs=rngs)
        self.head_bias = Vector(jnp.zeros(config.vocab, jnp.float32)) if "head" in config.biases else None
        self.config = config
        self.terms: Terms = nnx.data({})
        self.counts: Any = nnx.data(())
        self.second: Any = nnx.data(())

    def __call__(self, tokens: jax.Array, segments: jax.Array | None = None, positions: jax.Array | None = None) -> jax.Array:
        x, table = self.features(tokens, segments, positions)
        with signal.context("head"):
            return scores(x, table, self.config.logits_softcap)

    def features(
        self, tokens: jax.Array, segments: jax.Array | None = None, positions: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """The two factors of the logits: normed activations [b, s, d] and a table [v, d]. segments, positions: see `Rows`."""
        rows = Rows(segments, positions=positions)
        x, sums, _ = self._stream(tokens, rows)
        if self.mtp is not None:
            sums = self._predict_second(x, tokens, rows, sums)
        if self.config.experts is not None:
            self._count(sums, tokens.shape[1], self.config.experts)
        return self._scored(x)

    def _predict_second(self, x: jax.Array, tokens: jax.Array, rows: Rows, sums: Any) -> Any:
        """Keeps the two factors of the logits of second next tokens, as `features` has them. What all experts were given."""
        with signal.context("embed"):
            following = signal.tensor(self.embed(jnp.roll(tokens, -1, axis=1)), "rows")
        last = self.config.layers
        with signal.context("layers"):
            stack = LayerStack(name="mtp", first=last - 1, kinds=("attention",), count=1)
            ((x, _), _), [(more, _)] = scan_layers(self.mtp, stack, (x, following), rows, [layer_flags(self.config, stack.layers(0))])
        self.second = nnx.data(self._scored(x, is_normed=True))
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), sums, more)

    def read(self, tokens: jax.Array, lengths: jax.Array, step: jax.Array, slots: int) -> tuple[jax.Array, Cache]:
        """The logits [b, v] after texts, and their cache. tokens: [b, s], of which `lengths` [b] are text. step, slots: the cache's."""
        x, _, new = self._stream(tokens, Rows(lengths=lengths), keeps=True)
        last = jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)
        return self._logits(last), caches.filled(self.config, new, lengths, step, slots)

    def write(self, tokens: jax.Array, lengths: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """The logits [b, v] after one more token of each row, [b], and the cache with it. lengths: int[b], the tokens before it."""
        rows = Rows(segments=-lengths[:, None], lengths=lengths + 1)
        x, _, cache = self._stream(tokens[:, None], rows, cache)
        return self._logits(x), cache._replace(step=cache.step + 1)

    def _logits(self, x: jax.Array) -> jax.Array:
        x, table = self._scored(x)
        with signal.context("head"):
            return scores(x, table, self.config.logits_softcap)[:, 0]

    def _stream(self, tokens: jax.Array, rows: Rows, cache: Cache | None = None, *, keeps: bool = False) -> tuple[jax.Array, Any, Any]:
        """The stream [b, s, d] behind the layers, what experts were given, and the cache or (keeps) what caches keep, by kind of layer."""
        with signal.context("embed"):
            x = signal.tensor(self.embed(tokens), "rows")
            if self.positions is not None:
                x = x + _positions(self.positions[...], tokens.shape[1], rows).astype(x.dtype)
            if self.config.embed_scale != 1:
                x = x * jnp.asarray(self.config.embed_scale, x.dtype)
            # It has another name, so that `out` of this signal may differ from the layout of the rows.
            x = signal.tensor(x, "stream")
        sums: list[list[Any]] = []
        made: dict[str, list[list[Any]]] = {}
        with signal.context("layers"):
            for stack in self.stacks:
                flags = [layer_flags(self.config, stack.layers(n), is_cached=cache is not None) for n in range(len(stack.kinds))]
                (x, cache), found = scan_layers(getattr(self, stack.name), stack, x, rows, flags, cache, keeps=keeps)
                sums += [] if stack.is_dense else [[routed for routed, _ in found]]
                for kind in dict.fromkeys(stack.kinds):
                    own = [kept for other, (_, kept) in zip(stack.kinds, found, strict=True) if other == kind]
                    made.setdefault(kind, []).append(own)
        return x, in_order(sums), {kind: in_order(parts) for kind, parts in made.items()} if keeps else cache

    def _scored(self, x: jax.Array, *, is_normed: bool = False) -> tuple[jax.Array, jax.Array]:
        with signal.context("head"):
            x = x if is_normed else self.norm(x)
            if self.config.logits_scale != 1:
                x = x * jnp.asarray(self.config.logits_scale, x.dtype)
            x, table = signal.tensor(x, "normed"), (self.head or self.embed).table()
            if self.head_bias is not None:
                x, table = with_bias(x, table, self.head_bias[...])
            # [b, s, d] and [v, d]
            return signal.tensor(x, "operand"), table

    def _count(self, sums: Routed, seq: int, experts: ExpertsConfig) -> None:
        """Keeps what the layers have routed: the terms of the loss, the loads for the step, and the counts [L, b, E] for metrics."""
        counts, first = jnp.sum(sums.counts, axis=1), experts.first_dense
        for stack in self.stacks:
            for place, block in enumerate([] if stack.is_dense else _blocks(getattr(self, stack.name), stack)):
                layers = stack.layers(place)
                # A slice of all layers is the array itself.
                own = counts if len(layers) == len(counts) else counts[layers.start - first : layers.stop - first : layers.step]
                block.moe.load[...] = block.moe.load[...] + own
        if self.mtp is not None:
            self.mtp.block.moe.load[...] = self.mtp.block.moe.load[...] + counts[-1:]
        self.terms, self.counts = nnx.data(balance.terms(sums, seq, experts)), nnx.data(sums.counts)


def _period(config: ModelConfig, stack: LayerStack, attention: AttentionKernel, rngs: nnx.Rngs) -> nnx.Module:
    """The layers of a period, which is a layer itself where it has one."""
    if len(stack.kinds) == 1:
        return Block(config, attention, stack.kinds[0], rngs=rngs)
    return Period({name: Block(config, attention, kind, rngs=rngs) for name, kind in zip(stack.names, stack.kinds, strict=True)})


class Period(nnx.Module):
    """Layers of several kinds, by name."""

    def __init__(self, blocks: Mapping[str, Block]):
        for name, block in blocks.items():
            setattr(self, name, block)


def _blocks(period: Any, stack: LayerStack) -> list[Any]:
    return [getattr(period, name) if name else period for name in stack.names]


class Block(nnx.Module):
    """One layer: attention and MLP, which add to x. Their norms are before them (arXiv 2002.04745), after them, or both.

    [b, s, d] → [b, s, d], what experts in the place of the MLP were given, and what a cache keeps, as in `Attention` and `DeltaNet`.
    kind: attention, or linear attention.
    """

    def __init__(self, config: ModelConfig, attention: AttentionKernel, kind: str = "attention", *, rngs: nnx.Rngs):
        norm = partial(make_norm, config, config.embed, rngs)
        is_before, is_after = config.norm_place != "after", config.norm_place != "before"
        self.attn_norm = norm() if is_before else None
        if kind == "linear":
            self.attn: Any = DeltaNet(config, rngs=rngs)
        else:
            self.attn = (Attention if config.latent is None else LatentAttention)(config, attend=attention.attend, rngs=rngs)
        self.mlp_norm = norm() if is_before and config.parallel != "one_norm" else None
        self.mlp: Any = MLP(config, rngs=rngs) if config.experts is None else None
        self.moe = None if config.experts is None else MoE(config, rngs=rngs)
        self.attn_post, self.mlp_post = (norm(), norm()) if is_after else (None, None)
        self.parallel, self.scale = config.parallel, config.residual_scale

    def __call__(self, x: jax.Array, rows: Rows, flags: LayerFlags, cache: Cache | None = None) -> tuple[jax.Array, Routed | None, Any]:
        before, sums = x, None
        with signal.context("attn"):
            normed = _normed(self.attn_norm, x)
            y, kept = self.attn(normed, rows, flags, cache)
            x = self._added(x, y, self.attn_post)
        with signal.context("mlp" if self.moe is None else "moe"):
            if self.parallel != "one_norm":
                normed = _normed(self.mlp_norm, before if self.parallel else x)
            if self.moe is not None:
                y, sums = self.moe(normed)
            else:
                y = self.mlp(normed)
            return self._added(x, y, self.mlp_post), sums, kept

    def _added(self, x: jax.Array, y: jax.Array, norm: Any) -> jax.Array:
        y = y if norm is None else cheap(norm)(y)
        return x + (y if self.scale == 1 else y * jnp.asarray(self.scale, y.dtype))


def _normed(norm: Any, x: jax.Array) -> jax.Array:
    return signal.tensor(x if norm is None else cheap(norm)(x), "normed")


def stacked(make: Callable[[nnx.Rngs], nnx.Module], num_layers: int, rngs: nnx.Rngs) -> Any:
    """`num_layers` modules as one, whose parameters have a leading dim [layers, ...]; each layer starts from another random key.

    None for no layers.
    """
    if not num_layers:
        return None
    return nnx.vmap(make, in_axes=0, out_axes=0)(rngs.split(num_layers))


def scan_layers(
    layers: Any,
    stack: LayerStack,
    x: Any,
    rows: Rows,
    flags: Sequence[LayerFlags],
    cache: Cache | None = None,
    *,
    keeps: bool = False,
) -> tuple[tuple[jax.Array, Cache | None], list[tuple[Any, Any]]]:
    """x [b, s, d] and a cache through a stack, and what experts were given and (keeps) what caches keep, [periods, ...], of each place.

    flags: of each place of the period, those of its layers, [periods] where they differ.
    """
    # All periods have the same graph of modules. The scan takes one period's slice of each parameter and fills the graph with it.
    graphdef, params = nnx.split(layers)
    varied = [{name: flag for name, flag in own._asdict().items() if not isinstance(flag, bool)} for own in flags]

    def period(carry: tuple[jax.Array, Cache | None], own: tuple[Any, Any]) -> tuple[Any, Any]:
        (x, cache), (params, varied) = carry, own
        made: list[tuple[Any, Any]] = []
        for block, same, differing in zip(_blocks(nnx.merge(graphdef, params), stack), flags, varied, strict=True):
            x, sums, kept = block(x, rows, same._replace(**differing), cache)
            # The cache is carried, so that each layer writes into it where it is.
            cache = None if cache is None else kept
            made.append((sums, kept if keeps else None))
        return (x, cache), made

    return jax.lax.scan(period, (x, cache), (params, varied))


def layer_flags(config: ModelConfig, layers: range, *, is_cached: bool = False) -> LayerFlags:
    """The flags of these layers: one bool if it is that of all of them, otherwise bool[layers]. is_cached: with their places."""

    def flag(is_true: Callable[[int], bool]) -> bool | jax.Array:
        values = [is_true(n) for n in layers]
        return values[0] if len(set(values)) == 1 else jnp.array(values)

    return LayerFlags(
        is_full=flag(lambda n: config.window is None or n in config.full_layers),
        rotates=flag(lambda n: n not in config.unrotated_layers),
        place=is_cached and jnp.array(caches.places_of(config)[layers.start : layers.stop : layers.step]),
    )


def _positions(table: jax.Array, seq: int, rows: Rows) -> jax.Array:
    """The learned position of each token in its document, from a table [seq, d]: [b, s, d], or [1, s, d] for equal rows."""
    placed = rows.in_documents(seq)
    # The first is a slice. A lookup would cost a gather, and a scatter backward.
    return table[None, :seq] if placed is None else table[placed]
