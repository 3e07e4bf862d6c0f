"""The families of published models, a row for each `model_type`: the options that its config.json means, and the names of its tensors.

`options(keys)` returns keys of the `model:` section; a key whose value is None keeps its default. `names` are additions to the names of
Llama, which most families share: from a parameter of the model, with {l} for the layer and {e} for the expert, to a tensor.

    "mlp_norm/scale": "post_attention_layernorm.weight"        a parameter of a layer; its tensor has the prefix of the layer
    "attn/{q,k,v}_proj/kernel": "self_attn.qkv_proj.weight"    several parameters are rows of one tensor, one after another
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Read = Callable[[Any], dict[str, Any]]
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models.

    options: reads config.json. names: tensors that have other names than Llama's. layer: the prefix of a layer's tensors. by_head: whether
    the tensor of q, k and v has the outputs of each head together. are_kernels_transposed: whether a kernel [in, out] is stored as
    [out, in]. skipped: the ends of names of tensors to ignore.
    """

    options: Read
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


def _shared(k: Any, *, tied: bool = False, theta: float = 10_000.0, activation: str = "silu") -> dict[str, Any]:
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
        "norm_eps": k.get("rms_norm_eps", k.get("layer_norm_eps", k.get("layer_norm_epsilon", 1e-6))),
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
        window.refuse_others("rope_parameters: sliding_attention: ")
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
        factor = source.get("factor", (k.get("max_position_embeddings") or 0) / (original or 1))
        made |= {"factor": factor, "original": original, "short": source.need("short_factor"), "long": source.need("long_factor")}
        made["magnitude"] = source.get("attention_factor")
    else:
        k.problems.append(f"rope_scaling: {kind!r} is not supported. Supported: default, linear, llama3, longrope")
    source.refuse_others("rope_scaling: ")
    return {"rope_scaling": {name: value for name, value in made.items() if value is not None} or None}


def _windows(k: Any, size: int | None, is_full: Callable[[int], bool]) -> dict[str, Any]:
    """Layers with a window: as `layer_types` says, otherwise those that are not full by the family's rule."""
    count = k.get("num_hidden_layers", 0)
    types: Sequence[str] = k.get("layer_types", ["full_attention" if is_full(n) else "sliding_attention" for n in range(count)])
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        k.problems.append(f"layer_types: {', '.join(unknown)} is not supported. Supported: full_attention, sliding_attention")
    full = [n for n, kind in enumerate(types) if kind == "full_attention"]
    return {} if size is None or len(full) == count else {"window": size, "full_layers": full}


def _llama(k: Any) -> dict[str, Any]:
    biases = (["qkv", "out"] if k.get("attention_bias") else []) + (["mlp"] if k.get("mlp_bias") else [])
    return {**_shared(k), "biases": biases}


def _mistral(k: Any) -> dict[str, Any]:
    return {**_shared(k), **_windows(k, k.get("sliding_window"), lambda n: False)}


def _mixtral(k: Any) -> dict[str, Any]:
    experts = {"count": k.need("num_local_experts"), "choose": k.need("num_experts_per_tok"), "balance": "batch"}
    return {**_mistral(k), "experts": experts}


def _qwen_windows(k: Any) -> dict[str, Any]:
    # Published files have a window that is not used.
    first, size = k.get("max_window_layers", 0), k.get("sliding_window")
    size = size if k.get("use_sliding_window", False) else None
    return _windows(k, size, lambda n: size is None or n < first)


def _qwen2(k: Any) -> dict[str, Any]:
    return {**_shared(k), **_qwen_windows(k), "biases": ["qkv"]}


def _qwen3(k: Any) -> dict[str, Any]:
    biases = ["qkv", "out"] if k.get("attention_bias") else []
    return {**_shared(k), **_qwen_windows(k), "biases": biases, "qk_norm": "head"}


def _qwen3_moe(k: Any) -> dict[str, Any]:
    k.require("norm_topk_prob", True, default=False)
    k.require("decoder_sparse_step", 1)
    k.require("mlp_only_layers", [])
    count = k.get("num_experts", k.get("num_local_experts"))
    experts = {"count": count, "choose": k.need("num_experts_per_tok"), "ffn": k.need("moe_intermediate_size"), "balance": "batch"}
    return {**_qwen3(k), "experts": experts}


def _gemma(k: Any) -> dict[str, Any]:
    # Old files say gelu and mean its approximation, as `hidden_activation` of later ones says.
    k.get("hidden_activation")
    made = {**_shared(k, tied=True, activation="gelu_pytorch_tanh"), "activation": "gelu_tanh", "norm": "rms_plus_one"}
    k.require("attention_bias", False)
    return {**made, "head_dim": k.get("head_dim", 256), "embed_scale": float(k.need("hidden_size")) ** 0.5}


def _gemma2(k: Any) -> dict[str, Any]:
    return {
        **_gemma(k),
        **_windows(k, k.get("sliding_window", 4096), lambda n: n % 2 == 1),
        "norm_place": "both",
        "attention_scale": k.get("query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": k.get("attn_logit_softcapping"),
        "logits_softcap": k.get("final_logit_softcapping"),
    }


def _gemma3(k: Any) -> dict[str, Any]:
    period = k.get("sliding_window_pattern", k.get("_sliding_window_pattern", 6))
    made = {**_gemma2(k), **_windows(k, k.get("sliding_window", 4096), lambda n: (n + 1) % period == 0), "qk_norm": "head"}
    k.require("use_bidirectional_attention", False)
    if "rope_parameters" not in k.values:
        made |= {"rope_theta": k.get("rope_theta", 1_000_000.0), "window_theta": k.get("rope_local_base_freq", 10_000.0)}
    return made if "window" in made else {**made, "window_theta": None}


def _phi3(k: Any) -> dict[str, Any]:
    return {**_shared(k), **_windows(k, k.get("sliding_window"), lambda n: False)}


def _olmo2(k: Any) -> dict[str, Any]:
    k.require("attention_bias", False)
    return {**_shared(k), "norm_place": "after", "qk_norm": "all"}


def _olmo3(k: Any) -> dict[str, Any]:
    return {**_olmo2(k), **_windows(k, k.get("sliding_window"), lambda n: (n + 1) % 4 == 0)}


def _smollm3(k: Any) -> dict[str, Any]:
    k.require("use_sliding_window", False)
    for name in ("sliding_window", "max_window_layers", "layer_types"):
        k.get(name)
    interval, count = k.get("no_rope_layer_interval", 4), k.get("num_hidden_layers", 0)
    # 1 for a layer with positions, 0 for one without.
    rotates = k.get("no_rope_layers", [int((n + 1) % interval != 0) for n in range(count)])
    return {**_llama(k), "unrotated_layers": [n for n, one in enumerate(rotates) if not one]}


def _glm4(k: Any) -> dict[str, Any]:
    made = {"biases": ["qkv"] if k.get("attention_bias") else [], "rope_pairs": "neighbours", "norm_place": "both"}
    shared = _shared(k)
    return {**shared, **made, "head_dim": k.get("head_dim", 128), "rope_share": shared["rope_share"] or 0.5}


def _granite(k: Any) -> dict[str, Any]:
    return {
        **_llama(k),
        "embed_scale": float(k.get("embedding_multiplier", 1.0)),
        "residual_scale": float(k.get("residual_multiplier", 1.0)),
        "attention_scale": float(k.get("attention_multiplier", 1.0)),
        "logits_scale": 1.0 / k.get("logits_scaling", 1.0),
    }


def _neox(k: Any) -> dict[str, Any]:
    k.require("attention_bias", True)
    share, theta = k.get("rotary_pct"), k.get("rotary_emb_base")
    shared = _shared(k, activation="gelu")
    return {
        **shared,
        "norm": "layer",
        "norm_eps": k.get("layer_norm_eps", 1e-5),
        "biases": ["qkv", "out", "mlp"],
        "gated": False,
        "parallel": "two_norms" if k.get("use_parallel_residual", True) else None,
        "rope_share": share or shared["rope_share"] or 0.25,
        "rope_theta": theta or shared["rope_theta"],
    }


def _stablelm(k: Any) -> dict[str, Any]:
    k.require("qk_layernorm", False)
    shared = _shared(k)
    return {
        **shared,
        "norm": "layer",
        "norm_eps": k.get("layer_norm_eps", 1e-5),
        "biases": ["qkv"] if k.get("use_qkv_bias") else [],
        "parallel": "one_norm" if k.get("use_parallel_residual") else None,
        "rope_share": shared["rope_share"] or 0.25,
    }


def _gpt2(k: Any) -> dict[str, Any]:
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


def _experts(prefix: str, gate: str, up: str, down: str) -> dict[str, str]:
    names = {"router/kernel": "gate.weight"}
    names |= {f"experts/{ours}": f"experts.{{e}}.{theirs}.weight" for ours, theirs in (("gate", gate), ("up", up), ("down", down))}
    return {f"moe/{ours}": f"{prefix}.{theirs}" for ours, theirs in names.items()}


_QWEN_MOE = _experts("mlp", "gate_proj", "up_proj", "down_proj")
FAMILIES: Mapping[str, Family] = {
    "llama": Family(options=_llama),
    "mistral": Family(options=_mistral),
    "ministral": Family(options=_mistral),
    "mixtral": Family(options=_mixtral, names=_experts("block_sparse_moe", "w1", "w3", "w2")),
    "qwen2": Family(options=_qwen2),
    "qwen3": Family(options=_qwen3),
    "qwen3_moe": Family(options=_qwen3_moe, names=_QWEN_MOE),
    "gemma": Family(options=_gemma),
    "gemma2": Family(options=_gemma2, names=_TWO_NORMS),
    "gemma3_text": Family(options=_gemma3, names=_TWO_NORMS),
    "phi3": Family(options=_phi3, names={**_FUSED_QKV, **_FUSED_MLP}),
    "olmo2": Family(options=_olmo2, names=_TWO_NORMS),
    "olmo3": Family(options=_olmo3, names=_TWO_NORMS),
    "smollm3": Family(options=_smollm3),
    "glm4": Family(
        options=_glm4,
        names={**_FUSED_MLP, "attn_post/scale": "post_self_attn_layernorm.weight", "mlp_post/scale": "post_mlp_layernorm.weight"},
    ),
    "granite": Family(options=_granite),
    "gpt_neox": Family(
        options=_neox,
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
    "stablelm": Family(options=_stablelm),
    "gpt2": Family(
        options=_gpt2,
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
"""By `model_type`. A new family is a row here, and a function for its options if no other family's fits."""
