"""The families of published models with a mixture of experts: rows as in `families.py`.

Their routers differ in how scores are made of logits, and in whether those of the chosen experts are divided by their sum. Some have a bias
for the choice, some an MLP that all tokens go through, and some first layers with an ordinary MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..keys import Keys, words
from .family import Family, ModelOptions, attention_biases, period_of, qwen_window, shared, windowed, windowed_everywhere

_BIAS = "e_score_correction_bias"


def expert_names(prefix: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj", bias: str = "gate.") -> dict[str, str]:
    """The tensors of experts that are not one with those of other experts, of the router, and of the MLP of all tokens."""
    experts = {"gate": gate, "up": up, "down": down}
    matrices = {f"moe/experts/{ours}": f"{prefix}.experts.{{e}}.{theirs}.weight" for ours, theirs in experts.items()}
    return {**matrices, "moe/router": f"{prefix}.gate", "moe/bias": f"{prefix}.{bias}{_BIAS}"}


def shared_names(name: str) -> dict[str, str]:
    mlp = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down": "down_proj"}
    return {f"moe/shared/{ours}": f"mlp.{name}.{theirs}" for ours, theirs in mlp.items()} | {"moe/shared_gate": "mlp.shared_expert_gate"}


def experts_of(k: Keys, count: str, **more: Any) -> ModelOptions:
    """The experts, whose number is that of a key. Also the score of a single chosen one is divided by itself, unless `more` says not."""
    k.either(count, other := "num_experts" if count == "num_local_experts" else "num_local_experts")
    count = other if k.values.get(count) is None and other in k.values else count
    return {"experts": {"count": k.need(count), "choose": k.need("num_experts_per_tok"), "balance": "batch", "normalized": True, **more}}


def _biased(k: Keys, count: str, **more: Any) -> ModelOptions:
    """The experts of a router as DeepSeek-V3's: sigmoids, and a bias for the choice. more: of its keys, that a family has or not."""
    k.require("scoring_func", "sigmoid", "noaux_tc")
    k.require("topk_method", "noaux_tc")
    return experts_of(k, count, score="sigmoid", balance="bias", **more)


def deepseek_keys(k: Keys, *, first: int, shared: int | None, scale: float = 1.0, groups: tuple[int, int] = (1, 1)) -> ModelOptions:
    """The options of experts by the keys that all families of DeepSeek's share. The arguments are the defaults of the family's class."""
    k.require("moe_layer_freq", 1)
    count, chosen = k.get("n_group", groups[0]), k.get("topk_group", groups[1])
    return {
        "ffn": k.need("moe_intermediate_size"),
        "shared": k.get("n_shared_experts", shared, may_be_zero=True) or 0,
        "result_scale": float(k.get("routed_scaling_factor", scale)),
        "first_dense": k.get("first_k_dense_replace", first, may_be_zero=True),
        **({"groups": {"count": count, "choose": chosen, "best": 2}} if count > 1 else {}),
    }


def deepseek(k: Keys, *, normalized: bool, **defaults: Any) -> ModelOptions:
    """The experts of DeepSeek-V3. The arguments are the defaults of the family's class."""
    return _biased(k, "n_routed_experts", normalized=k.get("norm_topk_prob", normalized), **deepseek_keys(k, **defaults))


def _glm4_moe(k: Keys) -> ModelOptions:
    made = shared(k, eps=1e-5, share=0.5)
    made |= {"biases": ["qkv"] if k.get("attention_bias", False) else [], "qk_norm": "head" if k.get("use_qk_norm", False) else None}
    return {**made, **deepseek(k, first=1, shared=1, normalized=True)}


def _dots1(k: Keys) -> ModelOptions:
    first = k.get("max_window_layers", 62, may_be_zero=True)
    made = {**shared(k), **windowed(k, k.unless_absent("sliding_window", 4096), lambda n: n < first)}
    return {**made, "biases": attention_biases(k), "qk_norm": "head", **deepseek(k, first=0, shared=None, normalized=False)}


def _minimax_m2(k: Keys) -> ModelOptions:
    k.ignore("mtp_transformer_layers", "num_mtp_modules", "use_mtp")
    if any(kind != 1 for kind in k.by_layer("attn_type_list", lambda n: 1)):
        k.problems.append("attn_type_list: another kind of attention than 1 is not supported")
    size = k.get("head_dim", 128)
    made = shared(k, theta=5e6, head_dim=128, share=k.get("rotary_dim", size) / size)
    return {**made, "qk_norm": "all", **_biased(k, "num_local_experts")}


def _qwen2_moe(k: Keys) -> ModelOptions:
    k.ignore("max_window_layers", "sliding_window")
    ffn, width = k.need("moe_intermediate_size"), k.get("shared_expert_intermediate_size", 5632)
    if width % ffn:
        k.problems.append(f"shared_expert_intermediate_size: {width} is not a multiple of moe_intermediate_size {ffn}")
    made = {**shared(k), "biases": ["qkv"] if k.get("qkv_bias", True) else []}
    more = {"ffn": ffn, "shared": width // ffn, "shared_gate": True, "normalized": k.get("norm_topk_prob", False)}
    return {**made, **experts_of(k, "num_experts", **more)}


def _qwen3_moe(k: Keys) -> ModelOptions:
    k.ignore("max_window_layers")
    made = {**shared(k), **windowed_everywhere(k, qwen_window(k)), "biases": attention_biases(k), "qk_norm": "head"}
    return {**made, **experts_of(k, "num_experts", ffn=k.need("moe_intermediate_size"), normalized=k.get("norm_topk_prob", False))}


def _gpt_oss(k: Keys) -> ModelOptions:
    k.ignore("experts_per_token", "initial_context_length")
    k.values = {"num_key_value_heads": 8, **k.values}
    made = {
        **shared(k, eps=1e-5, theta=150_000.0, head_dim=64, rope=_GPT_OSS_ROPE),
        **windowed(k, k.unless_absent("sliding_window", 128), period_of(2)),
    }
    return {
        **made,
        "biases": [*(["qkv", "out"] if k.get("attention_bias", True) else []), "experts", "router"],
        "attention_sinks": True,
        "swiglu_alpha": k.get("swiglu_alpha", 1.702),
        "swiglu_limit": k.get("swiglu_limit", 7.0),
        "swiglu_offset": 1.0,
        **experts_of(k, "num_local_experts"),
    }


_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
_GPT_OSS_NAMES = {
    f"moe/{ours}/{part}": f"mlp.experts.{theirs}{end}"
    for ours, end in (("experts", ""), ("expert_biases", "_bias"))
    for part, theirs in (("gate", "gate_up_proj"), ("up", "gate_up_proj"), ("down", "down_proj"))
}
_EACH_LAYER = {"decoder_sparse_step": 1, "mlp_only_layers": []}
MIXTURES: Mapping[str, Family] = {
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        options=lambda k: {
            **shared(k, eps=1e-5, theta=1e6),
            **windowed_everywhere(k, k.get("sliding_window")),
            **experts_of(k, "num_local_experts"),
        },
        has=words("num_local_experts"),
        names=expert_names("block_sparse_moe", "w1", "w3", "w2"),
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        options=_qwen3_moe,
        only={**_EACH_LAYER, "use_qk_norm": True},
        has=words("num_experts"),
        names=expert_names("mlp"),
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        options=_qwen2_moe,
        only={**_EACH_LAYER, "use_sliding_window": False},
        writes=lambda c: {"qkv_bias": "qkv" in c.biases},
        has=words("num_experts"),
        lacks=words("head_dim"),
        names={**expert_names("mlp"), **shared_names("shared_expert")},
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        options=lambda k: {
            **shared(k, eps=1e-5),
            "qk_norm": "all",
            **experts_of(k, "num_experts", normalized=k.get("norm_topk_prob", False)),
        },
        only={"attention_bias": False, "clip_qkv": None},
        has=words("num_experts"),
        lacks=words("head_dim"),
        names=expert_names("mlp"),
    ),
    "glm4_moe": Family(
        architecture="Glm4MoeForCausalLM",
        options=_glm4_moe,
        writes=lambda c: {"use_qk_norm": c.qk_norm == "head", "num_nextn_predict_layers": 0},
        has=words("partial_rotary_factor"),
        names={**expert_names("mlp"), **shared_names("shared_experts")},
    ),
    "dots1": Family(
        architecture="Dots1ForCausalLM",
        options=_dots1,
        has=words("layer_types"),
        names={**expert_names("mlp"), **shared_names("shared_experts")},
    ),
    "minimax_m2": Family(
        architecture="MiniMaxM2ForCausalLM",
        options=_minimax_m2,
        only={"use_qk_norm": True, "qk_norm_type": "per_layer", "use_routing_bias": True},
        has=words("num_local_experts partial_rotary_factor"),
        names=expert_names("block_sparse_moe", "w1", "w3", "w2", bias=""),
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        options=_gpt_oss,
        only={"hidden_act": "silu"},
        writes=lambda c: {"swiglu_alpha": c.swiglu_alpha, "swiglu_limit": c.swiglu_limit},
        has=words("layer_types num_local_experts"),
        names={**_GPT_OSS_NAMES, "moe/router": "mlp.router", "attn/sinks": "self_attn.sinks"},
        is_interleaved=True,
    ),
}
"""By `model_type`."""
