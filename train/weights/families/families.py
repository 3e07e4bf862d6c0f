"""The families of published models, a row for each `model_type`: the options that its config.json means, and the names of its tensors.

`names` are additions to the names of Llama (`names.py`), which most families share: from a module to its tensors, whose names end in
`weight` or `bias`. Modules with the name of one tensor are its rows, one after another.

    "mlp_norm": "post_attention_layernorm"                 a module of a layer; its tensors have the prefix of the layer
    "attn/{q,k,v}_proj": "self_attn.qkv_proj"              three modules in one tensor
    "moe/experts/up": "mlp.experts.{e}.up_proj.weight"     a parameter by its whole path; {e} is the expert
    "linear/attn/out": "linear_attn.out_proj"              a module of layers of one kind
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jgt.document import shown

from ..keys import Keys, words
from .family import (
    MISTRAL_ROPE,
    QKV,
    Family,
    ModelOptions,
    attention_biases,
    period_of,
    qwen_window,
    shared,
    unrotated,
    windowed,
    windowed_everywhere,
)
from .latents import LATENTS
from .layer_norms import LAYER_NORMS
from .linears import LINEARS
from .mixtures import MIXTURES

_FUSED_MLP = dict.fromkeys(("mlp/gate_proj", "mlp/up_proj"), "mlp.gate_up_proj")
_TWO_NORMS = {"attn_post": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm", "mlp_post": "post_feedforward_layernorm"}


def _llama(k: Keys, **defaults: Any) -> ModelOptions:
    """The options of Llama. defaults: as those of `shared`."""
    return {**shared(k, **defaults), "biases": attention_biases(k) + (["mlp"] if k.get("mlp_bias", False) else [])}


def _mistral(k: Keys, *, size: int | None = None, **defaults: Any) -> ModelOptions:
    """The options with a window in all layers. size: the window of a file that does not say it. defaults: as those of `shared`."""
    return {**shared(k, **defaults), **windowed_everywhere(k, k.unless_absent("sliding_window", size))}


def _ministral3(k: Keys) -> ModelOptions:
    return _mistral(k, eps=1e-5, theta=1e6, head_dim=128, rope=MISTRAL_ROPE, grows=True)


def _qwen(k: Keys) -> ModelOptions:
    first, size = k.get("max_window_layers", 28, may_be_zero=True), qwen_window(k)
    return {**shared(k), **windowed(k, size, lambda n: size is None or n < first)}


def _qwen3(k: Keys) -> ModelOptions:
    return {**_qwen(k), "biases": attention_biases(k), "qk_norm": "head"}


def _gemma(k: Keys, act_key: str = "hidden_act", **defaults: Any) -> ModelOptions:
    k.ignore("hidden_act", "hidden_activation")
    made = shared(k, tied=True, activation="gelu_pytorch_tanh", head_dim=256, act_key=act_key, **defaults)
    # Old files of the first version say gelu, and mean its approximation.
    activation = "gelu_tanh" if k.get("hidden_act", "") == "gelu" and act_key == "hidden_act" else made["activation"]
    return {**made, "activation": activation, "norm": "rms_plus_one", "embed_scale": float(k.need("hidden_size")) ** 0.5}


def _gemma2(k: Keys, attention_softcap: float | None = 50.0, logits_softcap: float | None = 30.0, **defaults: Any) -> ModelOptions:
    """The options of Gemma 2, and with other soft caps for a file that has none, of Gemma 3."""
    return {
        **_gemma(k, "hidden_activation", **defaults),
        **windowed(k, k.either("sliding_window", "sliding_window_size", 4096), lambda n: n % 2 == 1),
        "norm_place": "both",
        "attention_scale": k.get("query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": k.unless_absent("attn_logit_softcapping", attention_softcap),
        "logits_softcap": k.unless_absent("final_logit_softcapping", logits_softcap),
    }


def _gemma3(k: Keys) -> ModelOptions:
    # Published files leave out what its class has by default.
    k.values = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208, **k.values}
    period = k.either("sliding_window_pattern", "_sliding_window_pattern", 6)
    made = _gemma2(k, None, None, theta=1e6, window_theta=k.get("rope_local_base_freq", 1e4))
    made |= {**windowed(k, k.get("sliding_window", 4096), lambda n: (n + 1) % period == 0), "qk_norm": "head"}
    return made if "window" in made else {**made, "window_theta": None}


def _olmo2(k: Keys, **defaults: Any) -> ModelOptions:
    return {**shared(k, eps=1e-5, **defaults), "norm_place": "after", "qk_norm": "all"}


def _olmo3(k: Keys) -> ModelOptions:
    made = {**_olmo2(k, theta=5e5, window_theta=5e5), **windowed(k, k.unless_absent("sliding_window", 4096), lambda n: (n + 1) % 4 == 0)}
    if "rope_parameters" not in k.values and made["rope_theta"] != 5e5:
        # Its class takes this one for full attention, and 500,000 for the other layers, which no training did.
        k.problems.append("rope_theta: of which layers is unclear. Say it in rope_parameters, by full_attention and sliding_attention")
    return made if "window" in made else {**made, "window_theta": None}


def _exaone4(k: Keys) -> ModelOptions:
    size, period = k.unless_absent("sliding_window", 4096), k.values.get("sliding_window_pattern")
    # A text, LLLG, has the list of layers beside it. Without a window it says nothing.
    k.ignore("sliding_window_pattern")
    if not isinstance(period, int) and period is not None and size is not None and not k.values.get("layer_types"):
        k.problems.append(f"sliding_window_pattern: {shown(period)} is not supported without layer_types. Use a number")
    made = {**shared(k, eps=1e-5), **windowed(k, size, period_of(period if isinstance(period, int) else 4))}
    return {**made, "qk_norm": "head", "norm_place": "after", "unrotated_layers": unrotated(k, size, made)}


def _smollm3(k: Keys) -> ModelOptions:
    k.ignore("sliding_window", "max_window_layers", "layer_types")
    interval = k.get("no_rope_layer_interval", 4)
    # 1 for a layer with positions, 0 for one without.
    rotates = k.by_layer("no_rope_layers", lambda n: int((n + 1) % interval != 0))
    return {**_llama(k, tied=True, theta=2_000_000.0), "unrotated_layers": [n for n, one in enumerate(rotates) if not one]}


def _glm(k: Keys) -> ModelOptions:
    biases = ["qkv"] if k.get("attention_bias", True) else []
    return {**shared(k, share=0.5, head_dim=128, eps=1.5625e-7), "biases": biases, "rope_pairs": "neighbours"}


def _seed_oss(k: Keys) -> ModelOptions:
    told = {"qkv": k.get("attention_bias", True), "out": k.get("attention_out_bias", False), "mlp": k.get("mlp_bias", False)}
    return {**shared(k, head_dim=128), "biases": [name for name, is_there in told.items() if is_there]}


FAMILIES: Mapping[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", options=_llama, only={"is_llama_config": True}),
    "mistral": Family(architecture="MistralForCausalLM", options=lambda k: _mistral(k, size=4096)),
    "ministral": Family(
        architecture="MinistralForCausalLM",
        options=lambda k: {**shared(k), **windowed(k, k.unless_absent("sliding_window", 4096))},
        has=words("layer_types"),
    ),
    "ministral3": Family(architecture="Ministral3ForCausalLM", options=_ministral3),
    "qwen2": Family(architecture="Qwen2ForCausalLM", options=lambda k: {**_qwen(k), "biases": ["qkv"]}, has=words("layer_types")),
    "qwen3": Family(architecture="Qwen3ForCausalLM", options=_qwen3, only={"use_qk_norm": True}, has=words("layer_types")),
    "gemma": Family(architecture="GemmaForCausalLM", options=_gemma, only={"attention_bias": False}),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM", options=_gemma2, only={"attention_bias": False}, has=words("layer_types"), names=_TWO_NORMS
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        options=_gemma3,
        only={"attention_bias": False, "use_bidirectional_attention": False},
        writes=lambda c: {"rope_local_base_freq": c.window_theta or c.rope_theta},
        has=words("layer_types"),
        names=_TWO_NORMS,
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        options=lambda k: _mistral(k, eps=1e-5, share=1.0),
        only={"embd_layer": "default", "full_attn_mod": 1, "interpolate_factor": 1},
        has=words("partial_rotary_factor original_max_position_embeddings"),
        names={**dict.fromkeys(QKV, "self_attn.qkv_proj"), **_FUSED_MLP},
    ),
    "olmo2": Family(architecture="Olmo2ForCausalLM", options=_olmo2, only={"attention_bias": False}, names=_TWO_NORMS),
    "olmo3": Family(
        architecture="Olmo3ForCausalLM",
        options=_olmo3,
        only={"attention_bias": False},
        writes=lambda c: {
            "rope_parameters": {
                "full_attention": {"rope_theta": c.rope_theta},
                "sliding_attention": {"rope_theta": c.window_theta or c.rope_theta},
            }
        },
        has=words("layer_types"),
        lacks=words("rope_scaling"),
        names=_TWO_NORMS,
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        options=_smollm3,
        only={"use_sliding_window": False},
        writes=lambda c: {"no_rope_layers": [int(n not in c.unrotated_layers) for n in range(c.layers)]},
        has=words("layer_types"),
    ),
    "glm4": Family(
        architecture="Glm4ForCausalLM",
        options=lambda k: {**_glm(k), "norm_place": "both"},
        has=words("partial_rotary_factor"),
        names={**_FUSED_MLP, "attn_post": "post_self_attn_layernorm", "mlp_post": "post_mlp_layernorm"},
    ),
    "glm": Family(
        architecture="GlmForCausalLM",
        options=lambda k: {**_glm(k), "norm_place": "before"},
        has=words("partial_rotary_factor"),
        names={**_FUSED_MLP},
    ),
    "seed_oss": Family(
        architecture="SeedOssForCausalLM",
        options=_seed_oss,
        writes=lambda c: {"attention_out_bias": "out" in c.biases},
    ),
    "exaone4": Family(architecture="Exaone4ForCausalLM", options=_exaone4, has=words("layer_types"), names=_TWO_NORMS),
    "ernie4_5": Family(
        architecture="Ernie4_5ForCausalLM",
        options=lambda k: {
            **shared(k, tied=True, eps=1e-5, theta=5e5, head_dim=128),
            "biases": ["qkv", "out", "mlp"] if k.get("use_bias", False) else [],
            "rope_pairs": "neighbours",
        },
        writes=lambda c: {"use_bias": bool(c.biases)},
    ),
    "helium": Family(
        architecture="HeliumForCausalLM",
        options=lambda k: {
            **shared(k, eps=1e-8, theta=1e5, head_dim=128),
            "biases": [*(["qkv"] if k.get("attention_bias", False) else []), *(["mlp"] if k.get("mlp_bias", False) else [])],
            "rope_pairs": "neighbours",
        },
    ),
    "granite": Family(
        architecture="GraniteForCausalLM",
        options=lambda k: {
            **_llama(k),
            "embed_scale": float(k.get("embedding_multiplier", 1.0)),
            "residual_scale": float(k.get("residual_multiplier", 1.0)),
            "attention_scale": float(k.get("attention_multiplier", 1.0)),
            "logits_scale": 1.0 / k.get("logits_scaling", 1.0),
        },
        writes=lambda c: {
            "embedding_multiplier": c.embed_scale,
            "residual_multiplier": c.residual_scale,
            "attention_multiplier": c.attention_scale or c.head_size**-0.5,
            "logits_scaling": 1 / c.logits_scale,
        },
    ),
    **MIXTURES,
    **LATENTS,
    **LINEARS,
    **LAYER_NORMS,
}
"""By `model_type`. A new family is a row here, or one of those with layer norms."""
