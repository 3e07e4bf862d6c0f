"""The options that a config.json means: for each way in which families write them, a function from its keys to keys of the model section.

A key whose value is None keeps its default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jgt.document import shown

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


def _shared(k: Any, *, tied: bool = False, theta: float = 10_000.0, activation: str = "silu", eps: float = 1e-6) -> dict[str, Any]:
    """The options that nearly all families write alike. The arguments are the defaults of the family's keys."""
    heads = k.need("num_attention_heads")
    name = k.get("hidden_act", activation)
    if name not in _ACTIVATIONS:
        k.problems.append(f"hidden_act: {name!r} is not supported. Supported: {', '.join(_ACTIVATIONS)}")
    return {
        "layers": k.need("num_hidden_layers"),
        "embed": k.need("hidden_size"),
        "heads": heads,
        "kv_heads": k.get("num_key_value_heads", heads),
        "head_dim": k.get("head_dim"),
        "ffn": k.need("intermediate_size"),
        "vocab": k.need("vocab_size"),
        "seq": k.get("max_position_embeddings"),
        "norm_eps": k.get("rms_norm_eps", k.get("layer_norm_eps", k.get("layer_norm_epsilon", eps))),
        "tied": k.get("tie_word_embeddings", tied),
        "activation": _ACTIVATIONS.get(name, "silu"),
        **_rope(k, theta),
    }


def _rope(k: Any, theta: float) -> dict[str, Any]:
    """Rotary positions, as published files write them (rope_theta, rope_scaling) or as transformers 5 does (rope_parameters)."""
    either = k.group("rope_parameters")
    if any(isinstance(either.values.get(kind), Mapping) for kind in ("full_attention", "sliding_attention")):
        full, window = either.group("full_attention"), either.group("sliding_attention")
        own, local = full.get("rope_theta", theta), window.get("rope_theta", theta)
        made = {"rope_theta": own, "rope_share": full.get("partial_rotary_factor"), **_scaling(k, full)}
        window.require("rope_type", "default")
        window.refuse_others()
        either.refuse_others()
        return {**made, "window_theta": local if local != own or made["rope_scaling"] else None}
    old = k.group("rope_scaling")
    if either.values and old.values:
        k.problems.append("rope_parameters and rope_scaling say the same. Keep one of them")
    source = either if either.values else old
    made = {
        "rope_theta": k.get("rope_theta", source.get("rope_theta", theta)),
        "rope_share": k.get("partial_rotary_factor", source.get("partial_rotary_factor")),
    }
    return {**made, **_scaling(k, source)}


def _scaling(k: Any, source: Any) -> dict[str, Any]:
    kind = source.get("rope_type", source.get("type", "default"))
    made: dict[str, Any] = {"kind": "longrope" if kind == "su" else kind}
    original = source.get("original_max_position_embeddings", k.get("original_max_position_embeddings"))
    if kind == "default":
        made = {}
    elif kind == "linear":
        made["factor"] = source.need("factor")
    elif kind == "llama3":
        made |= {
            "factor": source.need("factor"),
            "low": source.need("low_freq_factor"),
            "high": source.need("high_freq_factor"),
            "original": original,
        }
    elif made["kind"] == "longrope":
        factor = source.get("factor", (k.get("max_position_embeddings") or 1) / (original or 1))
        made |= {"factor": factor, "original": original, "short": source.need("short_factor", []), "long": source.need("long_factor", [])}
        made["magnitude"] = source.get("attention_factor")
    else:
        k.problems.append(f"rope_scaling: {kind!r} is not supported. Supported: default, linear, llama3, longrope")
    source.refuse_others()
    return {"rope_scaling": {name: value for name, value in made.items() if value is not None} or None}


def _windows(k: Any, size: int | None, is_full: Callable[[int], bool]) -> dict[str, Any]:
    """Layers with a window: as `layer_types` says, otherwise those that are not full by the family's rule."""
    types = k.by_layer("layer_types", lambda n: "full_attention" if is_full(n) else "sliding_attention")
    unknown = [kind for kind in types if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        k.problems.append(f"layer_types: {shown(unknown[0])} is not supported. Supported: full_attention, sliding_attention")
    full = [n for n, kind in enumerate(types) if kind == "full_attention"]
    return {} if size is None or len(full) == len(types) else {"window": size, "full_layers": full}


def llama(k: Any) -> dict[str, Any]:
    """The options of llama."""
    biases = (["qkv", "out"] if k.get("attention_bias", False) else []) + (["mlp"] if k.get("mlp_bias", False) else [])
    return {**_shared(k), "biases": biases}


def mistral(k: Any) -> dict[str, Any]:
    """The options of mistral."""
    return {**_shared(k), **_windows(k, k.get("sliding_window"), lambda n: False)}


def mixtral(k: Any) -> dict[str, Any]:
    """The options of mixtral."""
    experts = {"count": k.need("num_local_experts"), "choose": k.need("num_experts_per_tok"), "balance": "batch"}
    return {**mistral(k), "experts": experts}


def _qwen_windows(k: Any) -> dict[str, Any]:
    # Published files have a window that is not used.
    first, size = k.get("max_window_layers", 0), k.get("sliding_window")
    size = size if k.get("use_sliding_window", False) else None
    return _windows(k, size, lambda n: size is None or n < first)


def qwen2(k: Any) -> dict[str, Any]:
    """The options of qwen2."""
    return {**_shared(k), **_qwen_windows(k), "biases": ["qkv"]}


def qwen3(k: Any) -> dict[str, Any]:
    """The options of qwen3."""
    biases = ["qkv", "out"] if k.get("attention_bias", False) else []
    return {**_shared(k), **_qwen_windows(k), "biases": biases, "qk_norm": "head"}


def qwen3_moe(k: Any) -> dict[str, Any]:
    """The options of qwen3_moe."""
    k.require("norm_topk_prob", True, default=False)
    k.require("decoder_sparse_step", 1)
    k.require("mlp_only_layers", [])
    count = k.need("num_local_experts" if "num_local_experts" in k.values else "num_experts")
    experts = {"count": count, "choose": k.need("num_experts_per_tok"), "ffn": k.need("moe_intermediate_size"), "balance": "batch"}
    return {**qwen3(k), "experts": experts}


def gemma(k: Any) -> dict[str, Any]:
    """The options of gemma."""
    # Old files say gelu and mean its approximation, as `hidden_activation` of later ones says.
    k.ignore("hidden_activation")
    made = {**_shared(k, tied=True, activation="gelu_pytorch_tanh"), "activation": "gelu_tanh", "norm": "rms_plus_one"}
    k.require("attention_bias", False)
    return {**made, "head_dim": k.get("head_dim", 256), "embed_scale": float(k.need("hidden_size")) ** 0.5}


def gemma2(k: Any) -> dict[str, Any]:
    """The options of gemma2."""
    return {
        **gemma(k),
        **_windows(k, k.get("sliding_window", 4096), lambda n: n % 2 == 1),
        "norm_place": "both",
        "attention_scale": k.get("query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": k.get("attn_logit_softcapping"),
        "logits_softcap": k.get("final_logit_softcapping"),
    }


def gemma3(k: Any) -> dict[str, Any]:
    """The options of gemma3."""
    period = k.get("sliding_window_pattern", k.get("_sliding_window_pattern", 6))
    made = {**gemma2(k), **_windows(k, k.get("sliding_window", 4096), lambda n: (n + 1) % period == 0), "qk_norm": "head"}
    k.require("use_bidirectional_attention", False)
    if "rope_parameters" not in k.values:
        made |= {"rope_theta": k.get("rope_theta", 1_000_000.0), "window_theta": k.get("rope_local_base_freq", 10_000.0)}
    return made if "window" in made else {**made, "window_theta": None}


def phi3(k: Any) -> dict[str, Any]:
    """The options of phi3."""
    return {**_shared(k), **_windows(k, k.get("sliding_window"), lambda n: False)}


def olmo2(k: Any) -> dict[str, Any]:
    """The options of olmo2."""
    k.require("attention_bias", False)
    return {**_shared(k), "norm_place": "after", "qk_norm": "all"}


def olmo3(k: Any) -> dict[str, Any]:
    """The options of olmo3."""
    return {**olmo2(k), **_windows(k, k.get("sliding_window"), lambda n: (n + 1) % 4 == 0)}


def smollm3(k: Any) -> dict[str, Any]:
    """The options of smollm3."""
    k.require("use_sliding_window", False)
    k.ignore("sliding_window", "max_window_layers", "layer_types")
    interval = k.get("no_rope_layer_interval", 4)
    # 1 for a layer with positions, 0 for one without.
    rotates = k.by_layer("no_rope_layers", lambda n: int((n + 1) % interval != 0))
    return {**llama(k), "unrotated_layers": [n for n, one in enumerate(rotates) if not one]}


def glm4(k: Any) -> dict[str, Any]:
    """The options of glm4."""
    made = {"biases": ["qkv"] if k.get("attention_bias", False) else [], "rope_pairs": "neighbours", "norm_place": "both"}
    shared = _shared(k)
    return {**shared, **made, "head_dim": k.get("head_dim", 128), "rope_share": shared["rope_share"] or 0.5}


def granite(k: Any) -> dict[str, Any]:
    """The options of granite."""
    return {
        **llama(k),
        "embed_scale": float(k.get("embedding_multiplier", 1.0)),
        "residual_scale": float(k.get("residual_multiplier", 1.0)),
        "attention_scale": float(k.get("attention_multiplier", 1.0)),
        "logits_scale": 1.0 / k.get("logits_scaling", 1.0),
    }


def neox(k: Any) -> dict[str, Any]:
    """The options of neox."""
    k.require("attention_bias", True)
    share, theta = k.get("rotary_pct"), k.get("rotary_emb_base")
    shared = _shared(k, activation="gelu", eps=1e-5)
    return {
        **shared,
        "norm": "layer",
        "biases": ["qkv", "out", "mlp"],
        "gated": False,
        "parallel": "two_norms" if k.get("use_parallel_residual", True) else None,
        "rope_share": share or shared["rope_share"] or 0.25,
        "rope_theta": theta or shared["rope_theta"],
    }


def stablelm(k: Any) -> dict[str, Any]:
    """The options of stablelm."""
    k.require("qk_layernorm", False)
    shared = _shared(k, eps=1e-5)
    return {
        **shared,
        "norm": "layer",
        "biases": ["qkv"] if k.get("use_qkv_bias", False) else [],
        "parallel": "one_norm" if k.get("use_parallel_residual", False) else None,
        "rope_share": shared["rope_share"] or 0.25,
    }


def phi(k: Any) -> dict[str, Any]:
    """The options of phi."""
    k.require("qk_layernorm", False)
    shared = _shared(k, activation="gelu_new", eps=1e-5)
    return {
        **shared,
        "norm": "layer",
        "biases": ["qkv", "out", "mlp", "head"],
        "gated": False,
        "parallel": "one_norm",
        "rope_share": shared["rope_share"] or 0.5,
    }


def cohere(k: Any) -> dict[str, Any]:
    """The options of cohere."""
    k.require("use_qk_norm", False)
    k.ignore("model_max_length")
    return {
        **_shared(k, tied=True, eps=1e-5),
        "norm": "layer_unbiased",
        "biases": ["qkv", "out"] if k.get("attention_bias", False) else [],
        "parallel": "one_norm",
        "rope_pairs": "neighbours",
        "logits_scale": k.get("logit_scale", 0.0625),
    }


def gpt2(k: Any) -> dict[str, Any]:
    """The options of gpt2."""
    for name in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"):
        k.require(name, False)
    k.require("scale_attn_weights", True)
    embed, activation = k.need("n_embd"), k.get("activation_function", "gelu_new")
    k.require("activation_function", *_ACTIVATIONS, default="gelu_new")
    return {
        "kind": "gpt",
        "layers": k.need("n_layer"),
        "embed": embed,
        "heads": k.need("n_head"),
        "ffn": k.get("n_inner", 4 * embed),
        "vocab": k.need("vocab_size"),
        "seq": k.need("n_positions"),
        "norm_eps": k.get("layer_norm_epsilon", 1e-5),
        "tied": k.get("tie_word_embeddings", True),
        "activation": _ACTIVATIONS.get(activation, "silu"),
    }
