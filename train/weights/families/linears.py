"""The families of published models with linear attention in most layers: rows as in `families.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jgt.document import shown

from ...models.config import ModelConfig
from ..keys import ConfigJson, Keys, words
from .family import Family, ModelOptions, period_of, shared
from .mixtures import expert_names, experts_of, shared_names

_KINDS = {"linear_attention": "linear", "full_attention": "attention"}
_PARTS = ("q", "k", "v")


def _pattern(k: Keys) -> list[str]:
    """The kinds of the layers, of which a period is enough."""
    is_full = period_of(k.get("full_attention_interval", 4))
    types = k.by_layer("layer_types", lambda n: "full_attention" if is_full(n) else "linear_attention")
    if unknown := [kind for kind in types if kind not in _KINDS]:
        k.problems.append(f"layer_types: {shown(unknown[0])} is not supported. Supported: {', '.join(_KINDS)}")
    kinds = [_KINDS.get(kind, "attention") for kind in types]
    return next((kinds[:n] for n in range(1, len(kinds)) if all(kinds[m] == kinds[m % n] for m in range(len(kinds)))), kinds)


def _qwen(k: Keys, heads: int = 32, **defaults: Any) -> ModelOptions:
    """The options of all Qwens with gated delta nets. heads: of values, where a file says nothing."""
    # The tensors behind the layers, which predict further tokens, are left out.
    k.ignore("mamba_ssm_dtype", "mtp_num_hidden_layers", "full_attention_interval")
    linear = {
        "heads": k.get("linear_num_value_heads", heads),
        "key_heads": k.get("linear_num_key_heads", 16),
        "key_dim": k.get("linear_key_head_dim", 128),
        "value_dim": k.get("linear_value_head_dim", 128),
        "taps": k.get("linear_conv_kernel_dim", 4),
    }
    pattern = _pattern(k)
    biases = ["qkv", "out"] if k.get("attention_bias", False) else []
    made = {**shared(k, share=0.25, head_dim=256, **defaults), "biases": biases, "qk_norm": "head", "norm": "rms_plus_one"}
    return {**made, "pattern": pattern, "linear": linear if "linear" in pattern else None, "attention_gate": True}


def _experts(k: Keys, **more: Any) -> ModelOptions:
    k.values = {"moe_intermediate_size": 512, "num_experts_per_tok": 10, "num_experts": 512, **k.values}
    ffn, width = k.need("moe_intermediate_size"), k.get("shared_expert_intermediate_size", 512)
    if width % ffn:
        k.problems.append(f"shared_expert_intermediate_size: {width} is not a multiple of moe_intermediate_size {ffn}")
    return experts_of(k, "num_experts", ffn=ffn, shared=width // ffn, shared_gate=True, **more)


def _qwen3_next(k: Keys) -> ModelOptions:
    return {**_qwen(k), **_experts(k, normalized=k.get("norm_topk_prob", True))}


def _qwen3_5_moe(k: Keys) -> ModelOptions:
    # Its class has no MLP but the experts'.
    k.values = {"num_experts_per_tok": 8, "num_experts": 256, "intermediate_size": k.values.get("moe_intermediate_size", 512), **k.values}
    return {**_qwen(k), **_experts(k)}


def _writes(c: ModelConfig) -> ConfigJson:
    linear = c.linear
    if linear is None:
        return {}
    return {
        "layer_types": [next(theirs for theirs, ours in _KINDS.items() if ours == kind) for kind in c.kinds],
        "linear_num_value_heads": linear.heads,
        "linear_num_key_heads": linear.num_key_heads,
        "linear_key_head_dim": linear.key_dim,
        "linear_value_head_dim": linear.value_dim,
        "linear_conv_kernel_dim": linear.taps,
    }


def _linear_names(q: str, gate: str, beta: str, decay: str) -> dict[str, str]:
    """The tensors of a gated delta net. The arguments: of queries, keys and values; of the gate; of beta; of the decay."""
    projections = {**{f"{part}_proj": q for part in _PARTS}, "gate_proj": gate, "beta_proj": beta, "decay_proj": decay}
    others = {**{f"{part}_conv": "conv1d.weight" for part in _PARTS}, "decay_rate": "A_log", "decay_bias": "dt_bias"}
    found = {**projections, **others, "norm": "norm", "out": "out_proj"}
    return {**{f"linear/attn/{ours}": f"linear_attn.{theirs}" for ours, theirs in found.items()}, "attn/gate_proj": "self_attn.q_proj"}


_QWEN3_5 = _linear_names("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
LINEARS: Mapping[str, Family] = {
    "qwen3_next": Family(
        architecture="Qwen3NextForCausalLM",
        others=("mtp.",),
        options=_qwen3_next,
        only={"decoder_sparse_step": 1, "mlp_only_layers": []},
        writes=_writes,
        has=words("layer_types num_experts partial_rotary_factor"),
        names={
            **_linear_names("in_proj_qkvz", "in_proj_qkvz", "in_proj_ba", "in_proj_ba"),
            **expert_names("mlp"),
            **shared_names("shared_expert"),
        },
        by_head=words("self_attn.q_proj linear_attn.in_proj_qkvz linear_attn.in_proj_ba"),
    ),
    "qwen3_5_text": Family(
        architecture="Qwen3_5ForCausalLM",
        others=("mtp.",),
        options=_qwen,
        only={"attn_output_gate": True, "output_gate_type": "swish", "mlp_only_layers": []},
        writes=_writes,
        has=words("layer_types partial_rotary_factor"),
        names=_QWEN3_5,
        by_head=words("self_attn.q_proj"),
    ),
    "qwen3_5_moe_text": Family(
        architecture="Qwen3_5MoeForCausalLM",
        others=("mtp.",),
        options=_qwen3_5_moe,
        only={"attn_output_gate": True, "output_gate_type": "swish", "mlp_only_layers": [], "norm_topk_prob": True},
        writes=_writes,
        has=words("layer_types num_experts partial_rotary_factor"),
        names={**_QWEN3_5, **expert_names("mlp"), **shared_names("shared_expert")},
        by_head=words("self_attn.q_proj"),
        # Those of models that read images, too.
        are_stacks_transposed=True,
    ),
}
"""By `model_type`."""
