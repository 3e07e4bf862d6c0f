"""The families of published models with multi-head latent attention: rows as in `families.py`.

They share the keys of attention, and differ in their routers, and in the first layers. Some have sparse attention beside it: an indexer
chooses the tokens that a token sees, at most `index_topk`. Up to that length it sees all of them, and the model is a DeepSeek-V3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..keys import ConfigJson, Keys, words
from .family import MISTRAL_ROPE, STACKED_EXPERTS, Family, ModelOptions, attention_biases, shared
from .mixtures import deepseek, deepseek_keys, expert_names, experts_of, shared_names

_NAMES = {
    "attn/q_a_proj": "self_attn.q_a_proj",
    "attn/q_a_norm": "self_attn.q_a_layernorm",
    "attn/q_b_proj": "self_attn.q_b_proj",
    "attn/kv_a_proj": "self_attn.kv_a_proj_with_mqa",
    "attn/kv_a_norm": "self_attn.kv_a_layernorm",
    "attn/kv_b_proj": "self_attn.kv_b_proj",
    **expert_names("mlp"),
    **shared_names("shared_experts"),
}


def _latent(k: Keys, **defaults: Any) -> ModelOptions:
    """The options of attention, and those that nearly all families have. defaults: as those of `shared`."""
    rope, free = k.need("qk_rope_head_dim"), k.need("qk_nope_head_dim")
    made = {**shared(k, **defaults), "head_dim": rope + free, "biases": attention_biases(k)}
    k.require("num_key_value_heads", made["heads"])
    k.require("qk_head_dim", rope + free)
    longest = k.get("index_topk")
    latent = {
        "rank": k.need("kv_lora_rank"),
        "query_rank": k.get("q_lora_rank") if "q_lora_rank" in k.values else k.need("q_lora_rank"),
        "rope_dim": rope,
        "value_dim": k.need("v_head_dim"),
        **({} if longest is None else {"longest": longest}),
    }
    seq = made["seq"] if longest is None else min(made["seq"] or longest, longest)
    pairs = "neighbours" if k.get("rope_interleave", True) else "halves"
    return {**made, "seq": seq, "latent": latent, "rope_pairs": pairs, "attention_scale": _scale(k, made)}


def _scale(k: Keys, made: ConfigJson) -> float | None:
    """The factor of scores, which grows with that of yarn."""
    groups = [group for name in ("rope_parameters", "rope_scaling") if isinstance(group := k.values.get(name), Mapping)]
    told = next((group["mscale_all_dim"] for group in groups if group.get("mscale_all_dim")), None)
    scaling = made["rope_scaling"] or {}
    if scaling.get("kind") != "yarn" or not isinstance(told, int | float):
        return None
    return made["head_dim"] ** -0.5 * (0.1 * told * math.log(max(scaling["factor"], 1.0)) + 1) ** 2


def _deepseek_v2(k: Keys) -> ModelOptions:
    made, method = _latent(k), k.get("topk_method", "greedy")
    k.require("topk_method", "greedy", "group_limited_greedy")
    k.require("scoring_func", "softmax")
    experts = deepseek_keys(k, first=0, shared=2)
    groups = {"groups": {**experts["groups"], "best": 1}} if method == "group_limited_greedy" and "groups" in experts else {"groups": None}
    return {**made, "rope_pairs": "neighbours", **experts_of(k, "n_routed_experts", **{**experts, **groups, "normalized": False})}


def _deepseek_v3(k: Keys) -> ModelOptions:
    return {**_latent(k), **deepseek(k, normalized=True, first=3, shared=1, scale=2.5, groups=(8, 4))}


def _glm4_moe_lite(k: Keys) -> ModelOptions:
    types = k.by_layer("mlp_layer_types", lambda n: "sparse" if n else "dense")
    first = next((n for n, kind in enumerate(types) if kind != "dense"), len(types))
    if any(kind != "sparse" for kind in types[first:]):
        k.problems.append("mlp_layer_types: dense layers before sparse ones are supported, and no other order")
    k.require("first_k_dense_replace", first)
    return {**_latent(k, eps=1e-5), **deepseek(k, normalized=True, first=first, shared=1, scale=1.8)}


def _mistral4(k: Keys) -> ModelOptions:
    share = k.need("qk_rope_head_dim") / (k.need("qk_rope_head_dim") + k.need("qk_nope_head_dim"))
    made = _latent(
        k, share=share, grows=True, rope={**MISTRAL_ROPE, "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192}
    )
    if made["rope_share"] != share:
        k.problems.append(f"partial_rotary_factor: {made['rope_share']}, but qk_rope_head_dim is {share} of a head")
    experts = {**deepseek_keys(k, first=0, shared=1), "normalized": k.get("norm_topk_prob", True)}
    return {**made, "rope_share": None, **experts_of(k, "n_routed_experts", **experts)}


_DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    options=_deepseek_v3,
    writes=lambda c: {"num_nextn_predict_layers": 0},
    names=_NAMES,
)
LATENTS: Mapping[str, Family] = {
    "deepseek_v2": Family(
        architecture="DeepseekV2ForCausalLM",
        options=_deepseek_v2,
        only={"norm_topk_prob": False, "mlp_bias": False, "rope_interleave": True},
        writes=lambda c: {"topk_method": "greedy" if c.experts is None or c.experts.groups is None else "group_limited_greedy"},
        names=_NAMES,
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe_lite": Family(
        architecture="Glm4MoeLiteForCausalLM",
        options=_glm4_moe_lite,
        names=_NAMES,
    ),
    "mistral4": Family(
        architecture="Mistral4ForCausalLM",
        options=_mistral4,
        writes=lambda c: {"partial_rotary_factor": c.latent.rope_dim / c.head_size if c.latent else 1.0},
        has=words("partial_rotary_factor"),
        names={**_NAMES, **STACKED_EXPERTS},
        are_stacks_transposed=True,
    ),
}
"""By `model_type`."""
_INDEXER = words(
    "index_head_dim index_n_heads index_share_for_mtp_iteration index_skip_topk_offset index_topk_freq index_topk_pattern "
    "indexer_rope_interleave indexer_types layer_types mlp_layer_types moe_router_dtype"
)
INDEXERS = ".self_attn.indexer."
"""A part of the names of an indexer's tensors."""
SPARSE: Mapping[str, ConfigJson] = {
    "deepseek_v32": {"n_group": 8, "topk_group": 4, "index_topk": 2048},
    "glm_moe_dsa": {"n_group": 1, "topk_group": 1, "index_topk": 2048, "rms_norm_eps": 1e-5},
}
"""Families with an indexer, and what their classes have where a file says nothing, and that of DeepSeek-V3 something else."""


def dense(kind: str, config: ConfigJson) -> ModelOptions:
    """The config.json of a DeepSeek-V3 that is a model with an indexer up to `index_topk` tokens. kind: one of `SPARSE`."""
    kept = {name: value for name, value in config.items() if name not in _INDEXER}
    return {**SPARSE[kind], **kept, "model_type": "deepseek_v3", "architectures": [_DEEPSEEK_V3.architecture]}
