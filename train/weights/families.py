"""The families of published models, a row for each `model_type`: the options that its config.json means, and the names of its tensors.

The options are read by functions in `readings.py`. `names` are additions to the names of
Llama, which most families share: from a parameter of the model, with {l} for the layer and {e} for the expert, to a tensor.

    "mlp_norm/scale": "post_attention_layernorm.weight"        a parameter of a layer; its tensor has the prefix of the layer
    "attn/{q,k,v}_proj/kernel": "self_attn.qkv_proj.weight"    several parameters are rows of one tensor, one after another
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import readings

Read = Callable[[Any], dict[str, Any]]


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models.

    options: reads config.json. architecture: the class of transformers. names: tensors that have other names than Llama's. layer: the
    prefix of a layer's tensors. by_head: whether the tensor of q, k and v has the outputs of each head together. are_kernels_transposed:
    whether a kernel [in, out] is stored as [out, in]. skipped: the ends of names of tensors to ignore.
    """

    options: Read
    architecture: str = ""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    layer: str = "model.layers.{l}."
    by_head: bool = False
    are_kernels_transposed: bool = True
    skipped: tuple[str, ...] = ("rotary_emb.inv_freq",)


LLAMA_NAMES = {
    "embed/embedding": "model.embed_tokens.weight",
    "norm/scale": "model.norm.weight",
    "norm/bias": "model.norm.bias",
    "head/unembedding": "lm_head.weight",
    "attn_norm/scale": "input_layernorm.weight",
    "attn_norm/bias": "input_layernorm.bias",
    "attn/q_proj/kernel": "self_attn.q_proj.weight",
    "attn/k_proj/kernel": "self_attn.k_proj.weight",
    "attn/v_proj/kernel": "self_attn.v_proj.weight",
    "attn/out/kernel": "self_attn.o_proj.weight",
    "attn/q_proj/bias": "self_attn.q_proj.bias",
    "attn/k_proj/bias": "self_attn.k_proj.bias",
    "attn/v_proj/bias": "self_attn.v_proj.bias",
    "attn/out/bias": "self_attn.o_proj.bias",
    "attn/q_norm/scale": "self_attn.q_norm.weight",
    "attn/k_norm/scale": "self_attn.k_norm.weight",
    "mlp_norm/scale": "post_attention_layernorm.weight",
    "mlp_norm/bias": "post_attention_layernorm.bias",
    "mlp/gate_proj/kernel": "mlp.gate_proj.weight",
    "mlp/up_proj/kernel": "mlp.up_proj.weight",
    "mlp/down/kernel": "mlp.down_proj.weight",
    "mlp/gate_proj/bias": "mlp.gate_proj.bias",
    "mlp/up_proj/bias": "mlp.up_proj.bias",
    "mlp/down/bias": "mlp.down_proj.bias",
}
_QKV = ("attn/q_proj/{}", "attn/k_proj/{}", "attn/v_proj/{}")
_FUSED_MLP = {"mlp/gate_proj/kernel": "mlp.gate_up_proj.weight", "mlp/up_proj/kernel": "mlp.gate_up_proj.weight"}
_FUSED_QKV = dict.fromkeys((name.format("kernel") for name in _QKV), "self_attn.qkv_proj.weight")
_TWO_NORMS = {
    "attn_post/scale": "post_attention_layernorm.weight",
    "mlp_norm/scale": "pre_feedforward_layernorm.weight",
    "mlp_post/scale": "post_feedforward_layernorm.weight",
}


def _experts(prefix: str, gate: str, up: str, down: str) -> dict[str, str]:
    names = {"router/kernel": "gate.weight"}
    names |= {f"experts/{ours}": f"experts.{{e}}.{theirs}.weight" for ours, theirs in (("gate", gate), ("up", up), ("down", down))}
    return {f"moe/{ours}": f"{prefix}.{theirs}" for ours, theirs in names.items()}


_QWEN_MOE = _experts("mlp", "gate_proj", "up_proj", "down_proj")
FAMILIES: Mapping[str, Family] = {
    "llama": Family(options=readings.llama, architecture="LlamaForCausalLM"),
    "mistral": Family(options=readings.mistral, architecture="MistralForCausalLM"),
    "ministral": Family(options=readings.mistral, architecture="MinistralForCausalLM"),
    "mixtral": Family(options=readings.mixtral, architecture="MixtralForCausalLM", names=_experts("block_sparse_moe", "w1", "w3", "w2")),
    "qwen2": Family(options=readings.qwen2, architecture="Qwen2ForCausalLM"),
    "qwen3": Family(options=readings.qwen3, architecture="Qwen3ForCausalLM"),
    "qwen3_moe": Family(options=readings.qwen3_moe, architecture="Qwen3MoeForCausalLM", names=_QWEN_MOE),
    "gemma": Family(options=readings.gemma, architecture="GemmaForCausalLM"),
    "gemma2": Family(options=readings.gemma2, architecture="Gemma2ForCausalLM", names=_TWO_NORMS),
    "gemma3_text": Family(options=readings.gemma3, architecture="Gemma3ForCausalLM", names=_TWO_NORMS),
    "phi3": Family(options=readings.phi3, architecture="Phi3ForCausalLM", names={**_FUSED_QKV, **_FUSED_MLP}),
    "olmo2": Family(options=readings.olmo2, architecture="Olmo2ForCausalLM", names=_TWO_NORMS),
    "olmo3": Family(options=readings.olmo3, architecture="Olmo3ForCausalLM", names=_TWO_NORMS),
    "smollm3": Family(options=readings.smollm3, architecture="SmolLM3ForCausalLM"),
    "glm4": Family(
        options=readings.glm4,
        architecture="Glm4ForCausalLM",
        names={**_FUSED_MLP, "attn_post/scale": "post_self_attn_layernorm.weight", "mlp_post/scale": "post_mlp_layernorm.weight"},
    ),
    "granite": Family(options=readings.granite, architecture="GraniteForCausalLM"),
    "gpt_neox": Family(
        options=readings.neox,
        architecture="GPTNeoXForCausalLM",
        layer="gpt_neox.layers.{l}.",
        by_head=True,
        skipped=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
        names={
            **{
                name.format(part): f"attention.query_key_value.{theirs}"
                for name in _QKV
                for part, theirs in (("kernel", "weight"), ("bias", "bias"))
            },
            "attn/out/kernel": "attention.dense.weight",
            "attn/out/bias": "attention.dense.bias",
            "mlp/up_proj/kernel": "mlp.dense_h_to_4h.weight",
            "mlp/up_proj/bias": "mlp.dense_h_to_4h.bias",
            "mlp/down/kernel": "mlp.dense_4h_to_h.weight",
            "mlp/down/bias": "mlp.dense_4h_to_h.bias",
            "embed/embedding": "gpt_neox.embed_in.weight",
            "norm/scale": "gpt_neox.final_layer_norm.weight",
            "norm/bias": "gpt_neox.final_layer_norm.bias",
            "head/unembedding": "embed_out.weight",
        },
    ),
    "phi": Family(
        options=readings.phi,
        architecture="PhiForCausalLM",
        names={
            "attn/out/kernel": "self_attn.dense.weight",
            "attn/out/bias": "self_attn.dense.bias",
            "mlp/up_proj/kernel": "mlp.fc1.weight",
            "mlp/up_proj/bias": "mlp.fc1.bias",
            "mlp/down/kernel": "mlp.fc2.weight",
            "mlp/down/bias": "mlp.fc2.bias",
            "norm/scale": "model.final_layernorm.weight",
            "norm/bias": "model.final_layernorm.bias",
            "head_bias": "lm_head.bias",
        },
    ),
    "cohere": Family(options=readings.cohere, architecture="CohereForCausalLM"),
    "stablelm": Family(options=readings.stablelm, architecture="StableLmForCausalLM"),
    "gpt2": Family(
        options=readings.gpt2,
        architecture="GPT2LMHeadModel",
        layer="transformer.h.{l}.",
        are_kernels_transposed=False,
        skipped=("attn.bias", "attn.masked_bias"),
        names={
            **{name.format(part): f"attn.c_attn.{theirs}" for name in _QKV for part, theirs in (("kernel", "weight"), ("bias", "bias"))},
            "attn/out/kernel": "attn.c_proj.weight",
            "attn/out/bias": "attn.c_proj.bias",
            "attn_norm/scale": "ln_1.weight",
            "attn_norm/bias": "ln_1.bias",
            "mlp_norm/scale": "ln_2.weight",
            "mlp_norm/bias": "ln_2.bias",
            "mlp/up_proj/kernel": "mlp.c_fc.weight",
            "mlp/up_proj/bias": "mlp.c_fc.bias",
            "mlp/down/kernel": "mlp.c_proj.weight",
            "mlp/down/bias": "mlp.c_proj.bias",
            "embed/embedding": "transformer.wte.weight",
            "positions": "transformer.wpe.weight",
            "norm/scale": "transformer.ln_f.weight",
            "norm/bias": "transformer.ln_f.bias",
        },
    ),
}
"""By `model_type`. A new family is a row here, and a function in `readings.py` if no other family's fits."""
