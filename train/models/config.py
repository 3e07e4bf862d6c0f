"""The `model:` section, which is checked before JAX is imported: a typo is reported at once, even on a machine without JAX's libraries.

A kind is a set of defaults of the decoder's options, a class for each kind here. Nothing else in the trainer asks for the kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from jgt.document import Bound, Node

from ..files.bucket import PathOrUrl
from ..settings.code.names import OR_OWN, is_name
from ..settings.numbers import NotNegative
from ..settings.sections import OTHER_WORDS
from .experts.config import ExpertsConfig
from .options import BiasName, Heads, LayerKind, Options, Width

Large = Annotated[int, Bound(low=1, high=10_000_000)]


KindName = Literal["llama", "gpt"]
AttentionName = Literal["auto", "xla", "cudnn"]
BaseType = Literal["f32", "bf16", "int8", "nf4"]


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    """A model of the user's own: an nnx or a linen module. `vocab`, `seq` and `dtype` are passed to it if its signature has them.

    kind: MODULE:NAME of its class, or of a function that makes it.
    base_dtype: the type of frozen parameters, of which int8 and nf4 pack the matrices; f32 leaves them in the type in which the model makes
    them.
    arguments: all further keys, which are passed to it.
    """

    REST: ClassVar[str] = "arguments"
    kind: str
    vocab: Large = 256
    seq: Large = 128
    dtype: Literal["f32", "bf16"] = "f32"
    base_dtype: BaseType = "f32"
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])

    fp8: ClassVar[bool] = False
    logits_softcap: ClassVar[float | None] = None

    def exports(self, path: str) -> bool:
        """Whether an export has a parameter: all of them."""
        del path
        return True

    def flops_per_token(self, num_parameters: int, num_frozen: int = 0) -> float:
        """FLOPs of the forward and the backward pass for one token, as if every parameter were multiplied once (arXiv 2001.08361).

        4 for each frozen parameter, which has no gradient.
        """
        return 6.0 * num_parameters - 2.0 * num_frozen


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Options):
    """A decoder: `llama` (RMSNorm, RoPE, grouped-query attention, SwiGLU) or `gpt` (LayerNorm, learned positions, GELU).

    kind: llama: RMSNorm, RoPE, grouped-query attention, SwiGLU; gpt: LayerNorm, learned positions, GELU, biases. A kind is a set of
    defaults of the [options](#options-of-a-decoder).
    hf: [a published model](weights.md): a folder with config.json and safetensors or [its URL](stores.md#published-models), or a
    config.json alone. It gives the other keys. Of these only `seq` may be written here with another value.
    layers: the number of layers; `lax.scan` runs them.
    embed: the width of the residual stream.
    heads: the number of query heads.
    kv_heads: the number of key/value heads, a divisor of `heads`; null: the same as `heads`.
    head_dim: the width of a head; llama needs an even one; null: `embed / heads`.
    ffn: the width of the MLP; null: `4 embed` (gpt), or `8/3 embed` rounded up to a multiple of 64 (llama).
    experts: a [mixture of experts](experts.md) in the place of the MLP (llama); null: the MLP.
    mtp_rate: the factor of the loss of a further layer that predicts the second next token (multi-token prediction, arXiv 2412.19437,
    section 2.2). It is trained with the model and used for nothing else: an export leaves it out. null: no such layer.
    vocab: the size of the vocabulary; every token of the data must be below it.
    seq: the number of tokens in a training sequence.
    tied: use the embedding as the output projection too; gpt: `true`.
    dtype: the type of matmuls and activations (mixed precision); trained parameters, the master weights, are always stored in f32. [A model
    of your own](own.md#your-own-model) gets it as an argument.
    base_dtype: the type in which [frozen parameters](#frozen-parameters) alone are stored. It needs `optimizer.train` or `lora:`; [`int8`
    and `nf4`](finetune.md#qlora) need `lora:`.
    fp8: `model.fp8: true` computes the matmuls of the layers in 8 bits (as Transformer Engine does, with current scaling): e4m3 forward,
    e5m2 for gradients, each tensor scaled by its largest value, in a pipeline by that of a microbatch. Matmuls that read one array (q, k,
    v; gate, up) round it once. Embedding, head and attention scores keep `dtype`, which may be f32 and is usually bf16. `lora:` and `sync:`
    refuse it. Faster on GPUs of compute capability 8.9 and newer, slower elsewhere. Compare the loss before you rely on it.
    attention: the attention kernel. cudnn: cuDNN's fused kernel, which stores no scores. It needs an NVIDIA GPU and `dtype: bf16`; in a
    pipeline, the devices that share a stage (a `tensor` axis) must divide `kv_heads`. auto: cuDNN if available, otherwise XLA; the choice
    is logged with its reason.
    """

    WORDS = OTHER_WORDS
    kind: Annotated[KindName, f"A model of Hugging Face is model.hf. {OR_OWN}"] = "llama"
    hf: PathOrUrl | None = None
    layers: Annotated[int, Bound(low=1, high=10_000)] = 4
    embed: Width = 128
    heads: Heads = 4
    kv_heads: Heads | None = None
    head_dim: Width | None = None
    ffn: Large | None = None
    experts: ExpertsConfig | None = None
    mtp_rate: NotNegative | None = None
    vocab: Large = 256
    seq: Large = 128
    tied: bool = False
    dtype: Literal["f32", "bf16"] = "f32"
    base_dtype: BaseType = "f32"
    fp8: bool = False
    attention: AttentionName = "auto"

    @staticmethod
    def variant(node: Node) -> type:
        """The class of the section, by its `kind`."""
        kind = node.find("kind").value
        return OwnModel if is_name(kind) else GPTConfig if kind == "gpt" else ModelConfig

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads; by default as many as query heads."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """The width of one head."""
        return self.head_dim or self.embed // self.heads

    @property
    def value_size(self) -> int:
        """The width of the values of one head."""
        return (self.latent and self.latent.value_dim) or self.head_size

    @property
    def kept_sizes(self) -> tuple[int, int, int]:
        """The sizes of what a layer keeps of a token in a cache: a number of heads, and the widths of two arrays."""
        latent = self.latent
        return (self.num_kv_heads, self.head_size, self.head_size) if latent is None else (1, latent.rank, latent.rope_dim)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        pattern = self.pattern or ("attention",)
        return tuple(pattern[n % len(pattern)] for n in range(self.layers))

    @property
    def ffn_size(self) -> int:
        """The width of the MLP."""
        # A gated MLP has three matrices where another has two: 2/3 of 4 x embed has as many parameters, rounded up to a multiple of 64.
        return self.ffn or (-(-8 * self.embed // (3 * 64)) * 64 if self.gated else 4 * self.embed)

    @property
    def num_further(self) -> int:
        """The number of layers behind the last one, which predict further tokens."""
        return int(self.mtp_rate is not None)

    def exports(self, path: str) -> bool:
        """Whether an export has a parameter: not those of layers that predict further tokens."""
        return not (self.num_further and path.startswith("mtp/"))

    @property
    def idle_parameters(self) -> int:
        """Parameters of the experts that a token does not go through."""
        experts = self.experts
        if experts is None:
            return 0
        ffn = experts.ffn or self.ffn_size
        # An expert has three matrices: gate, up and down.
        of_one = 3 * self.embed * ffn + (2 * ffn + self.embed if "experts" in self.biases else 0)
        return (self.layers + self.num_further - experts.first_dense) * (experts.count - experts.choose) * of_one

    def flops_per_token(self, num_parameters: int, num_frozen: int = 0) -> float:
        """FLOPs of the forward and the backward pass for one token, the numerator of MFU.

        6 for each parameter that is multiplied, or 4 if it is frozen, and 6 · layers · width · seq for attention, as in PaLM (arXiv
        2204.02311, appendix B), but for the half of the scores that a causal mask leaves. Linear attention counts as its
        recurrence. Recompute does not count. Rows that are looked up
        are not multiplied: learned positions, and the embedding unless it is the output projection too. Nor are experts that a token does
        not go through. If parameters are frozen, these are taken to be among them.
        """
        # Each prediction multiplies the output projection.
        looked_up = (0 if self.tied else self.vocab * self.embed) - self.num_further * self.vocab * self.embed
        looked_up += self.seq * self.embed if self.positions == "learned" else 0
        window = min(self.window or self.seq, self.seq)
        attending = [n for n, kind in enumerate(self.kinds) if kind == "attention"]
        with_attention = len(attending) + self.num_further
        windowed = 0 if self.window is None else len(set(attending) - set(self.full_layers)) + self.num_further
        # The tokens that a token sees on average: half of the sequence, or a window that is shorter for the first tokens.
        seen = (with_attention - windowed) * self.seq / 2 + windowed * (window - window**2 / (2 * self.seq))
        # Scores and weighted values are two matmuls of 2 FLOPs each. Forward and backward make it three times as much.
        attention = 6 * self.heads * (self.head_size + self.value_size) * seen
        if self.linear is not None:
            # A token's key meets the matrix of each head, changes it, and its query meets what has become of it.
            of_layer = self.linear.heads * self.linear.key_dim * self.linear.value_dim
            attention += 18 * (self.layers - len(attending)) * of_layer
        idle = looked_up + self.idle_parameters
        return 6.0 * (num_parameters - idle) - 2.0 * max(num_frozen - idle, 0) + attention

    def problems(self) -> Iterator[tuple[str, str]]:
        """Problems that only several keys together show."""
        # If there is a head_dim, all heads together need not have the width of the residual stream.
        if self.head_dim is None and self.embed % self.heads:
            yield "heads", f"embed {self.embed} is not divisible by heads {self.heads}. Change one of them, or give head_dim"
        if self.heads % self.num_kv_heads:
            yield "kv_heads", f"heads {self.heads} is not divisible by kv_heads {self.num_kv_heads}. Use a divisor of {self.heads}"
        if self.latent is not None and self.num_kv_heads != self.heads:
            yield "kv_heads", f"{self.kv_heads}, but with latent each of the {self.heads} heads has keys of its own. Leave it out"
        if self.positions == "rotary" and self.latent is None and self.head_size % 2:
            if self.head_dim is not None:
                yield "head_dim", f"RoPE rotates pairs, but heads have the odd size {self.head_size}. Use an even size"
            elif self.embed % self.heads == 0:
                fits = [n for n in range(1, self.heads) if self.embed % n == 0 and self.embed // n % 2 == 0]
                remedy = f"Use heads {', '.join(map(str, fits[-8:]))}" if fits else "Change embed, or give head_dim"
                yield (
                    "heads",
                    f"embed {self.embed} / heads {self.heads} is {self.head_size}, but RoPE needs an even size of heads. {remedy}",
                )
        yield from self.option_problems(self.layers, self.head_size, self.seq)
        if self.experts is not None:
            yield from self._expert_problems(self.experts)
        elif of_experts := [name for name in ("experts", "router") if name in self.biases]:
            yield "biases", f"without a mixture there is no linear layer {of_experts[0]}. Give experts, or leave {of_experts[0]} out"

    def _expert_problems(self, experts: ExpertsConfig) -> Iterator[tuple[str, str]]:
        if not self.gated or self.parallel:
            yield "experts", "experts are gated MLPs behind the attention. Leave experts out, or gated: false and parallel"
        if experts.first_dense >= self.layers:
            remedy = f"Use {self.layers - 1} at most, or leave experts out"
            yield "experts", f"first_dense {experts.first_dense} leaves none of the {self.layers} layers for experts. {remedy}"


@dataclass(frozen=True, kw_only=True)
class GPTConfig(ModelConfig):
    """GPT-2: LayerNorm, learned positions, GELU, biases, one table that embeds and scores."""

    kind: Annotated[KindName, OR_OWN] = "gpt"
    positions: Literal["rotary", "learned"] = "learned"
    norm: Literal["rms", "rms_plus_one", "layer", "layer_unbiased"] = "layer"
    biases: tuple[BiasName, ...] = ("qkv", "out", "mlp")
    gated: bool = False
    activation: Literal["silu", "gelu", "gelu_tanh"] = "gelu_tanh"
    tied: bool = True
