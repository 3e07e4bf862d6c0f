"""The options in which decoders of one kind differ from each other, as keys of the `model:` section. Imports no JAX.

The defaults are Llama's. Each option is what some published family does, and they combine freely, so that a config.json of that family is
a set of values (`train/weights/families`) and a model that is trained from scratch may have any of them. Layers that differ are named by
their numbers: all layers stay one scan, which reads a few flags for each layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from jgt.document import Bound

from ..settings.numbers import NotNegative, Positive

Length = Annotated[int, Bound(low=1, high=100_000_000)]
BiasName = Literal["qkv", "out", "mlp", "head", "experts", "router"]
LayerNumber = Annotated[int, Bound(low=0, high=9_999)]
Width = Annotated[int, Bound(low=1, high=1_000_000)]
Heads = Annotated[int, Bound(low=1, high=10_000)]
LayerKind = Literal["attention", "linear"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """`model.rope_scaling`: slower rotary frequencies, for sequences that are longer than those of the first training.

    kind: linear: all frequencies are divided by `factor` (arXiv 2306.15595). llama3: only the slow ones (arXiv 2407.21783). longrope: each
    one by a divisor of its own (arXiv 2402.13753). yarn: the slow ones, and in part those between (arXiv 2309.00071). dynamic: none, up to
    the original length, which no sequence may exceed.
    factor: the divisor; longrope: the length of sequences over the original length.
    low: llama3 divides frequencies that turn less often than this in the original length.
    high: llama3 keeps frequencies that turn more often than this, and divides those between in part.
    original: the length of sequences in the first training.
    short: longrope's divisors for sequences up to the original length.
    long: longrope's divisors for longer sequences.
    fast: yarn keeps frequencies that turn more often than this in the original length.
    slow: yarn divides frequencies that turn less often than this in the original length, and those between in part.
    truncate: whether yarn rounds the numbers of the first and the last frequency between to whole ones, away from each other.
    query_growth: yarn's factor of queries is 1 + this · ln(1 + position / `original`), of the quotient without its fraction; null: none.
    magnitude: a factor of rotated queries and keys; null: those of longrope and yarn follow from `factor`, others have none.
    """

    kind: Literal["linear", "llama3", "longrope", "yarn", "dynamic"] = "linear"
    factor: Positive = 1.0
    low: Positive = 1.0
    high: Positive = 4.0
    original: Length = 8192
    short: tuple[Positive, ...] = ()
    long: tuple[Positive, ...] = ()
    fast: Positive = 32.0
    slow: Positive = 1.0
    truncate: bool = True
    query_growth: Positive | None = None
    magnitude: Positive | None = None

    def problems(self) -> Iterator[tuple[str, str]]:
        """Keys that are missing, and keys that belong to another kind."""
        for field in fields(self):
            if field.name not in _KEYS[self.kind] and getattr(self, field.name) != field.default:
                yield field.name, f"is not a key of {self.kind}. Keys of it: {', '.join(_KEYS[self.kind])}"
        if self.kind == "longrope" and not (self.short and self.long):
            yield "kind", "longrope needs the divisors short and long"
        if self.kind == "llama3" and not self.low < self.high:
            yield "high", f"{self.high} is not above low {self.low}"
        if self.kind == "yarn" and not self.slow <= self.fast:
            yield "fast", f"{self.fast} is below slow {self.slow}"


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """`model.latent`: multi-head latent attention (MLA, arXiv 2405.04434). Keys and values of all heads are made of one latent of a token.

    A key is made of the latent but for its last elements, which are rotated and the same for all heads. A cache has the latent and these.

    rank: the width of the latent.
    query_rank: the rank of the queries' own latent; null: queries are projected directly from the layer's input.
    rope_dim: the number of a head's last elements that are rotated; `head_dim` counts them too.
    value_dim: the width of a head's values; null: `head_dim`.
    norm_eps: the epsilon of the latents' norms.
    longest: the length up to which a model with sparse attention, which jgt does not compute, sees all tokens; null: any.
    """

    rank: Width = 64
    query_rank: Width | None = None
    rope_dim: Width = 16
    value_dim: Width | None = None
    norm_eps: Positive = 1e-6
    longest: Length | None = None


@dataclass(frozen=True, kw_only=True)
class LinearConfig:
    """`model.linear`: linear attention by gated delta nets (arXiv 2412.06464), in the layers that `pattern` calls linear.

    A layer keeps one matrix of each head for all earlier tokens, so that its time grows with the tokens, and its memory does not.

    heads: the number of heads of values.
    key_heads: the number of heads of queries and keys, a divisor of `heads`; null: the same as `heads`.
    key_dim: the width of a head's queries and keys.
    value_dim: the width of a head's values.
    taps: the tokens that the convolution of queries, keys and values reads, its own included.
    """

    heads: Heads = 4
    key_heads: Heads | None = None
    key_dim: Width = 32
    value_dim: Width = 32
    taps: Annotated[int, Bound(low=1, high=64)] = 4

    @property
    def num_key_heads(self) -> int:
        """Heads of queries and keys; by default as many as those of values."""
        return self.key_heads or self.heads

    def problems(self) -> Iterator[tuple[str, str]]:
        """Heads that do not fit."""
        if self.heads % self.num_key_heads:
            yield "key_heads", f"heads {self.heads} is not divisible by key_heads {self.key_heads}. Use a divisor of {self.heads}"


_KEYS = {
    "linear": ("kind", "factor", "magnitude"),
    "llama3": ("kind", "factor", "low", "high", "original", "magnitude"),
    "longrope": ("kind", "factor", "original", "short", "long", "magnitude"),
    "yarn": ("kind", "factor", "original", "fast", "slow", "truncate", "query_growth", "magnitude"),
    "dynamic": ("kind", "factor", "original"),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a decoder.

    positions: where positions enter: in attention, or as a table beside the embedding.
    rope_theta: the base of the rotary frequencies.
    rope_scaling: slower rotary frequencies, for sequences longer than those of the first training.
    rope_share: the share of a head's elements that is rotated.
    rope_pairs: an element is rotated with the one half a head away, or with its neighbour.
    unrotated_layers: layers without rotary positions, counted from 0.
    window: the number of tokens that a token sees, itself included (sliding-window attention); null: all earlier ones.
    window_theta: `rope_theta` of layers with a window, where it differs; it is never scaled.
    full_layers: layers without the window, counted from 0.
    latent: keys and values of all heads are made of one latent (MLA); null: each has a matrix of its own.
    pattern: the kinds of the layers, repeated for all of them: attention, or linear attention, as `linear` says; empty: attention.
    linear: the sizes of linear attention (gated delta nets) in the layers that `pattern` calls linear.
    attention_gate: whether each number that attention gives is multiplied by a gate, the sigmoid of a projection of the token.
    norm: RMSNorm; RMSNorm whose factor is 1 + scale; LayerNorm; LayerNorm without a bias.
    norm_place: norms before attention and MLP, after them, or both.
    norm_eps: the epsilon of the norms.
    qk_norm: norms of queries and keys: of each head, or of all heads together.
    biases: the linear layers that have a bias; head: the scores of tokens; experts and router: those of a mixture.
    gated: whether the MLP is gated.
    activation: the activation of the MLP; gelu is exact, gelu_tanh its usual approximation.
    swiglu_alpha: the factor in the sigmoid of a gated MLP with silu: gate · sigmoid(alpha · gate).
    swiglu_limit: a limit of both factors of a gated MLP: the gate's from above, the other's on both sides; null: none.
    swiglu_offset: a number that is added to the factor that the gate multiplies.
    parallel: attention and MLP read the same input, with one norm for both or one for each.
    attention_scale: the factor of attention's scores; null: 1 / sqrt of a head's width.
    attention_softcap: a limit of attention's scores (tanh). cuDNN's kernel has none.
    attention_sinks: a learned score of each head that joins the sum of the softmax, as of a key whose value is 0. cuDNN's kernel has none.
    logits_softcap: a limit of the logits (tanh).
    embed_scale: a factor of embedded tokens.
    residual_scale: a factor of what attention and MLP add.
    logits_scale: a factor of the logits.
    """

    positions: Literal["rotary", "learned"] = "rotary"
    rope_theta: Positive = 10_000.0
    rope_scaling: RopeScaling | None = None
    rope_share: Annotated[float, Bound(above=0, high=1)] = 1.0
    rope_pairs: Literal["halves", "neighbours"] = "halves"
    unrotated_layers: tuple[LayerNumber, ...] = ()
    window: Length | None = None
    window_theta: Positive | None = None
    full_layers: tuple[LayerNumber, ...] = ()
    latent: LatentConfig | None = None
    pattern: tuple[LayerKind, ...] = ()
    linear: LinearConfig | None = None
    attention_gate: bool = False
    norm: Literal["rms", "rms_plus_one", "layer", "layer_unbiased"] = "rms"
    norm_place: Literal["before", "after", "both"] = "before"
    norm_eps: Positive = 1e-5
    qk_norm: Literal["head", "all"] | None = None
    biases: tuple[BiasName, ...] = ()
    gated: bool = True
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    swiglu_alpha: Positive = 1.0
    swiglu_limit: Positive | None = None
    swiglu_offset: NotNegative = 0.0
    parallel: Literal["one_norm", "two_norms"] | None = None
    attention_scale: Positive | None = None
    attention_softcap: Positive | None = None
    attention_sinks: bool = False
    logits_softcap: Positive | None = None
    embed_scale: Positive = 1.0
    residual_scale: Positive = 1.0
    logits_scale: Positive = 1.0

    def option_problems(self, layers: int, head_size: int, seq: int) -> Iterator[tuple[str, str]]:
        """Options that do not fit each other, these layers, heads of this size or sequences of this length."""
        rotated = int((head_size if self.latent is None else self.latent.rope_dim) * self.rope_share)
        yield from self._rope_problems(rotated)
        if self.rope_scaling is not None:
            yield from self._scaling_problems(self.rope_scaling, rotated, seq)
        yield from self._latent_problems(head_size, seq)
        yield from self._pattern_problems()
        for name in ("unrotated_layers", "full_layers"):
            beyond = [n for n in getattr(self, name) if n >= layers]
            if beyond:
                yield name, f"there are {layers} layers, numbered from 0, so there is no layer {', '.join(map(str, beyond))}"
        if self.window is None:
            for name in ("full_layers", "window_theta"):
                if getattr(self, name):
                    yield name, f"without a window all layers see all earlier tokens. Give window, or leave {name} out"
        for name, off in (("swiglu_alpha", 1), ("swiglu_limit", None), ("swiglu_offset", 0)):
            if getattr(self, name) != off and not (self.gated and self.activation == "silu"):
                yield name, f"only a gated MLP with silu has it. Leave {name} out, or use gated: true and activation: silu"
        if self.parallel and self.norm_place != "before":
            yield "parallel", "a parallel block has norms before its parts only. Leave norm_place out"

    def _pattern_problems(self) -> Iterator[tuple[str, str]]:
        if (self.linear is not None) != ("linear" in self.pattern):
            key, other = ("linear", "pattern") if self.linear is not None else ("pattern", "linear")
            yield key, f"layers with linear attention need pattern and linear. Give {other}, too, or leave {key} out"
        if self.pattern and "attention" not in self.pattern:
            yield "pattern", "no layer has attention. Use attention for one of them at least"
        if self.attention_gate and self.latent is not None:
            yield "attention_gate", "latent attention has no gate. Leave one of them out"

    def _latent_problems(self, head_size: int, seq: int) -> Iterator[tuple[str, str]]:
        latent = self.latent
        if latent is None:
            return
        if not latent.rope_dim < head_size:
            yield "latent", f"rope_dim {latent.rope_dim} is not below the {head_size} elements of a head. Change it, or head_dim"
        if latent.rope_dim % 2:
            yield "latent", f"RoPE rotates pairs, but rope_dim is the odd number {latent.rope_dim}. Use an even number"
        if self.positions != "rotary" or self.qk_norm is not None or self.rope_share != 1:
            yield (
                "latent",
                "it rotates rope_dim elements, and has norms of its own. Leave out positions, rope_share and qk_norm, or latent",
            )
        if latent.longest is not None and seq > latent.longest:
            why = f"beyond {latent.longest:,} tokens the model's attention is sparse, which jgt does not compute"
            yield "seq", f"{why}. Use {latent.longest} at most"

    def _rope_problems(self, rotated: int) -> Iterator[tuple[str, str]]:
        """rotated: the number of rotated elements of a head."""
        if self.positions == "rotary" and self.rope_share < 1 and rotated % 2:
            yield "rope_share", f"RoPE rotates pairs, but {self.rope_share} of a head is the odd number {rotated}. Use an even number"

    def _scaling_problems(self, scaling: RopeScaling, rotated: int, seq: int) -> Iterator[tuple[str, str]]:
        if self.positions != "rotary":
            yield "rope_scaling", "only rotary positions are scaled. Leave it out, or use positions: rotary"
        if scaling.kind == "longrope":
            counts = {len(scaling.short), len(scaling.long)}
            if counts != {rotated // 2}:
                yield "rope_scaling", f"short and long need {rotated // 2} divisors each, one for each rotary frequency"
        if scaling.kind == "yarn" and self.rope_theta <= 1:
            yield (
                "rope_theta",
                f"yarn tells frequencies by their speed, but with {self.rope_theta} none is slower than the first. Use more than 1",
            )
        if scaling.kind == "dynamic" and seq > scaling.original:
            why = f"the frequencies of dynamic change with each token beyond the original length {scaling.original}, which jgt does not do"
            yield "seq", f"{why}. Use {scaling.original} at most, or another kind of rope_scaling"
