"""The `model:` section, and what a config has to know of each kind of model before the model's code is imported.

A config is checked before JAX is imported, so that a typo is reported at once, even on a machine without JAX's libraries. But whether a
config is right depends on the kind of model: rotary positions need heads of an even size, and the default width of the MLP differs. The
few facts of this sort are a row of `KINDS` for each kind, which also names the model's class. The class reads the same row for what it
shares with other kinds (positions, a tied embedding), so that no fact is written twice, and nothing else in the trainer asks for the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from jgt.document import Bound, Node

from ..code.names import OR_OWN, is_name
from ..sections import OTHER_WORDS, Positive
from .experts.config import ExpertsConfig

Width = Annotated[int, Bound(low=1, high=1_000_000)]
Heads = Annotated[int, Bound(low=1, high=10_000)]
Large = Annotated[int, Bound(low=1, high=10_000_000)]


@dataclass(frozen=True, kw_only=True)
class ModelKind:
    """Facts about a kind of model.

    decoder: its class, as module:class, relative to this package. positions: rotary, in attention, or a learned table. default_ffn: the
    MLP's width for a width of the residual stream. is_always_tied: the embedding is the output projection too, whatever `model.tied` says.
    has_kv_heads: several query heads may share a key/value head. has_experts: its MLP may be a mixture of experts, which are gated.
    """

    decoder: str
    positions: Literal["rotary", "learned"]
    default_ffn: Callable[[int], int]
    is_always_tied: bool = False
    has_kv_heads: bool = True
    has_experts: bool = True


KINDS = {
    "llama": ModelKind(
        decoder=".llama:Llama",
        positions="rotary",
        # SwiGLU has three matrices where GELU has two: 2/3 of 4 x embed has as many parameters, rounded up to a multiple of 64.
        default_ffn=lambda embed: -(-8 * embed // (3 * 64)) * 64,
    ),
    "gpt": ModelKind(
        decoder=".gpt:GPT",
        positions="learned",
        default_ffn=lambda embed: 4 * embed,
        is_always_tied=True,
        has_kv_heads=False,
        has_experts=False,
    ),
}

if TYPE_CHECKING:
    KindName = str
else:
    # The values that `bind` accepts follow from the table, where a type checker wants them spelled out.
    KindName = Literal[tuple(KINDS)]
AttentionName = Literal["auto", "xla", "cudnn"]


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    """A model of the user's own: an nnx or a linen module. `vocab`, `seq` and `dtype` are passed to it if its signature has them.

    kind: MODULE:NAME of its class, or of a function that makes it. arguments: all further keys, which are passed to it.
    """

    REST: ClassVar[str] = "arguments"
    kind: str
    vocab: Large = 256
    seq: Large = 128
    dtype: Literal["f32", "bf16"] = "f32"
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])

    fp8: ClassVar[bool] = False

    def flops_per_token(self, num_parameters: int) -> float:
        """FLOPs of the forward and the backward pass for one token, as if every parameter were multiplied once (arXiv 2001.08361)."""
        return 6.0 * num_parameters


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder: `llama` (RMSNorm, RoPE, grouped-query attention, SwiGLU) or `gpt` (LayerNorm, learned positions, GELU).

    dtype: the type of matmuls and activations; parameters are f32. head_dim: the size of a head, embed / heads if null. fp8: the layers'
    matmuls run in eight bits. tied: the embedding is the output projection too (gpt always). attention: cuDNN's kernel or XLA's program;
    auto: cuDNN if available, otherwise XLA; the choice is logged. experts: a mixture of
    experts in the place of the MLP; null: the MLP.
    """

    WORDS = OTHER_WORDS
    kind: Annotated[KindName, OR_OWN] = "llama"
    layers: Annotated[int, Bound(low=1, high=10_000)] = 4
    embed: Width = 128
    heads: Heads = 4
    kv_heads: Heads | None = None
    head_dim: Width | None = None
    ffn: Large | None = None
    experts: ExpertsConfig | None = None
    vocab: Large = 256
    seq: Large = 128
    tied: bool = False
    dtype: Literal["f32", "bf16"] = "f32"
    fp8: bool = False
    attention: AttentionName = "auto"
    rope_theta: Positive = 10_000.0
    norm_eps: Positive = 1e-5

    @staticmethod
    def variant(node: Node) -> type:
        """The class of the section, by its `kind`."""
        return OwnModel if is_name(node.find("kind").value) else ModelConfig

    @property
    def facts(self) -> ModelKind:
        """The facts that are true of every model of this kind."""
        return KINDS[self.kind]

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads; by default as many as query heads."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """The width of one head."""
        return self.head_dim or self.embed // self.heads

    @property
    def ffn_size(self) -> int:
        """The width of the MLP."""
        return self.ffn or self.facts.default_ffn(self.embed)

    @property
    def idle_parameters(self) -> int:
        """Parameters of the experts that a token does not go through."""
        experts = self.experts
        if experts is None:
            return 0
        # An expert has three matrices: gate, up and down.
        return (self.layers - experts.first_dense) * (experts.count - experts.choose) * 3 * self.embed * (experts.ffn or self.ffn_size)

    @property
    def is_tied(self) -> bool:
        """Whether one table embeds tokens and scores them."""
        return self.tied or self.facts.is_always_tied

    def flops_per_token(self, num_parameters: int) -> float:
        """FLOPs of the forward and the backward pass for one token, the numerator of MFU.

        6 for each parameter that is multiplied, and 6 · layers · width · seq for attention, as in PaLM (arXiv 2204.02311, appendix B), but
        for the half of the scores that a causal mask leaves. Recompute does not count. Rows that are looked up are not multiplied:
        learned positions, and the embedding unless it is the output projection too. Nor are experts that a token does not go through.
        """
        looked_up = 0 if self.is_tied else self.vocab * self.embed
        looked_up += self.seq * self.embed if self.facts.positions == "learned" else 0
        # Scores and weighted values are two matmuls of 2 FLOPs each. Forward and backward make it three times as much, the causal
        # mask half: 2 · 2 · 3 / 2 = 6.
        attention = 6 * self.layers * self.heads * self.head_size * self.seq
        return 6.0 * (num_parameters - looked_up - self.idle_parameters) + attention

    def problems(self) -> Iterator[tuple[str, str]]:
        """Problems that only several keys together show."""
        # If there is a head_dim, all heads together need not have the width of the residual stream.
        if self.head_dim is None and self.embed % self.heads:
            yield "heads", f"embed {self.embed} is not divisible by heads {self.heads}. Change one of them, or give head_dim"
        if self.heads % self.num_kv_heads:
            yield "kv_heads", f"heads {self.heads} is not divisible by kv_heads {self.num_kv_heads}. Use a divisor of {self.heads}"
        if self.facts.positions == "rotary" and self.head_size % 2:
            if self.head_dim is not None:
                yield "head_dim", f"RoPE rotates pairs, but heads have the odd size {self.head_size}. Use an even size"
            elif self.embed % self.heads == 0:
                fits = [n for n in range(1, self.heads) if self.embed % n == 0 and self.embed // n % 2 == 0]
                remedy = f"Use heads {', '.join(map(str, fits[-8:]))}" if fits else "Change embed, or give head_dim"
                yield (
                    "heads",
                    f"embed {self.embed} / heads {self.heads} is {self.head_size}, but RoPE needs an even size of heads. {remedy}",
                )
        if not self.facts.has_kv_heads and self.kv_heads not in (None, self.heads):
            others = " or ".join(name for name, kind in KINDS.items() if kind.has_kv_heads)
            yield "kv_heads", f"{self.kind} has as many key/value heads as heads ({self.heads}). Leave kv_heads out, or use kind: {others}"
        if self.experts is not None:
            yield from self._expert_problems(self.experts)

    def _expert_problems(self, experts: ExpertsConfig) -> Iterator[tuple[str, str]]:
        if not self.facts.has_experts:
            others = " or ".join(name for name, kind in KINDS.items() if kind.has_experts)
            yield "experts", f"{self.kind} has no experts. Leave experts out, or use kind: {others}"
        if experts.first_dense >= self.layers:
            remedy = f"Use {self.layers - 1} at most, or leave experts out"
            yield "experts", f"first_dense {experts.first_dense} leaves none of the {self.layers} layers for experts. {remedy}"
