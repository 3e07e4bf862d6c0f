"""The `model:` section."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from jgt.document import Bound

Width = Annotated[int, Bound(low=1, high=1_000_000)]
Heads = Annotated[int, Bound(low=1, high=10_000)]
Large = Annotated[int, Bound(low=1, high=10_000_000)]
Positive = Annotated[float, Bound(above=0, high=1e30)]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder: `llama` (RMSNorm, RoPE, grouped-query attention, SwiGLU) or `gpt` (LayerNorm, learned positions, GELU).

    dtype is that of matmuls and activations; parameters are f32. heads of size embed / heads unless head_dim is given.
    fp8: the layers' matmuls are in eight bits. tied: the embedding is the output projection too (gpt always). attention: cuDNN's kernel or XLA's program; auto: cuDNN's where it can be.
    """

    kind: Literal["llama", "gpt"] = "llama"
    layers: Annotated[int, Bound(low=1, high=10_000)] = 4
    embed: Width = 128
    heads: Heads = 4
    kv_heads: Heads | None = None
    head_dim: Width | None = None
    ffn: Large | None = None
    vocab: Large = 256
    seq: Large = 128
    tied: bool = False
    dtype: Literal["f32", "bf16"] = "f32"
    fp8: bool = False
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    rope_theta: Positive = 10_000.0
    norm_eps: Positive = 1e-5

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads; as many as query heads unless given."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """The width of one head."""
        return self.head_dim or self.embed // self.heads

    @property
    def ffn_size(self) -> int:
        """The width of the MLP: 4 x embed, or for llama's three matrices 8/3 x embed rounded up to 64, unless given."""
        wide = 4 * self.embed if self.kind == "gpt" else -(-8 * self.embed // (3 * 64)) * 64
        return self.ffn or wide

    @property
    def is_tied(self) -> bool:
        """Whether one matrix embeds and unembeds."""
        return self.tied or self.kind == "gpt"

    def problems(self) -> Iterator[tuple[str, str]]:
        """What only several keys together can tell."""
        if self.head_dim is None and self.embed % self.heads:
            yield "heads", f"embed {self.embed} is not divisible by heads {self.heads}. Change one of them, or give head_dim"
        if self.heads % self.num_kv_heads:
            yield "kv_heads", f"heads {self.heads} is not divisible by kv_heads {self.num_kv_heads}. Use a divisor of {self.heads}"
        if self.kind == "llama" and self.head_size % 2:
            yield "head_dim", f"RoPE rotates pairs, but heads have the odd size {self.head_size}. Use an even size"
        if self.kind == "gpt" and self.kv_heads not in (None, self.heads):
            yield "kv_heads", f"gpt has as many key/value heads as heads ({self.heads}). Leave kv_heads out, or use kind: llama"
