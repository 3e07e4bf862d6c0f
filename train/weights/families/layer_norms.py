"""The families of published models whose norms are layer norms: rows as in `families.py`."""

from __future__ import annotations

from collections.abc import Mapping

from ..keys import Keys, words
from .family import HIDDEN_ACTS, QKV, Family, ModelOptions, attention_biases, period_of, shared, unrotated, windowed, windowed_everywhere


def _neox(k: Keys) -> ModelOptions:
    share, theta = k.get("rotary_pct", 0.25), k.get("rotary_emb_base", 1e4)
    # Its class does not read these names, which some versions of transformers wrote beside its own.
    k.require("partial_rotary_factor", share)
    k.require("rope_theta", theta)
    made = shared(k, activation="gelu", eps=1e-5, eps_key="layer_norm_eps", share=share, theta=theta)
    made |= {"norm": "layer", "biases": ["qkv", "out", "mlp"], "gated": False}
    made["parallel"] = "two_norms" if k.get("use_parallel_residual", True) else None
    return made


def _gpt2(k: Keys) -> ModelOptions:
    embed, activation = k.need("n_embd"), k.get("activation_function", "gelu_new")
    k.require("activation_function", *HIDDEN_ACTS, default="gelu_new")
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
        "activation": HIDDEN_ACTS.get(activation, "silu"),
    }


def _starcoder2(k: Keys) -> ModelOptions:
    made = shared(k, tied=True, activation="gelu_pytorch_tanh", eps=1e-5, eps_key="norm_epsilon")
    made |= {**windowed_everywhere(k, k.get("sliding_window")), "norm": "layer", "gated": False}
    return {**made, "biases": ["qkv", "out", "mlp"] if k.get("use_bias", True) else []}


def _cohere(k: Keys, theta: float) -> ModelOptions:
    return {
        **shared(k, tied=True, eps=1e-5, eps_key="layer_norm_eps", theta=theta),
        "norm": "layer_unbiased",
        "biases": attention_biases(k),
        "parallel": "one_norm",
        "rope_pairs": "neighbours",
        "logits_scale": k.get("logit_scale", 0.0625),
    }


def _cohere2(k: Keys) -> ModelOptions:
    size, period = k.unless_absent("sliding_window", 4096), k.either("sliding_window_pattern", "layer_switch", 4)
    made = windowed(k, size, period_of(period))
    # Also without the size of a window, full layers are those that have no positions.
    return {**_cohere(k, 10_000.0), **made, "unrotated_layers": unrotated(k, size or 1, made)}


LAYER_NORMS: Mapping[str, Family] = {
    "gpt_neox": Family(
        architecture="GPTNeoXForCausalLM",
        options=_neox,
        only={"attention_bias": True},
        writes=lambda c: {"rotary_pct": c.rope_share, "rotary_emb_base": c.rope_theta},
        lacks=words("head_dim num_key_value_heads"),
        names={
            **dict.fromkeys(QKV, "attention.query_key_value"),
            "attn/out": "attention.dense",
            "mlp/up_proj": "mlp.dense_h_to_4h",
            "mlp/down": "mlp.dense_4h_to_h",
            "embed": "gpt_neox.embed_in",
            "norm": "gpt_neox.final_layer_norm",
            "head": "embed_out",
        },
        layer="gpt_neox.layers.{l}.",
        by_head=words("attention.query_key_value"),
        skipped=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
    ),
    "phi": Family(
        architecture="PhiForCausalLM",
        options=lambda k: {
            **shared(k, activation="gelu_new", eps=1e-5, eps_key="layer_norm_eps", share=0.5),
            "norm": "layer",
            "biases": ["qkv", "out", "mlp", "head"],
            "gated": False,
            "parallel": "one_norm",
        },
        only={"qk_layernorm": False},
        has=words("partial_rotary_factor"),
        lacks=words("head_dim"),
        names={
            "attn/out": "self_attn.dense",
            "mlp/up_proj": "mlp.fc1",
            "mlp/down": "mlp.fc2",
            "norm": "model.final_layernorm",
            "head_bias": "lm_head.bias",
        },
    ),
    "cohere": Family(
        architecture="CohereForCausalLM",
        options=lambda k: _cohere(k, 500_000.0),
        only={"use_qk_norm": False},
        writes=lambda c: {"logit_scale": c.logits_scale},
        lacks=words("head_dim"),
    ),
    "cohere2": Family(
        architecture="Cohere2ForCausalLM",
        options=_cohere2,
        only={
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "rotary_pct": 1.0,
            "use_embedding_sharing": True,
            "use_gated_activation": True,
            "use_parallel_block": True,
        },
        writes=lambda c: {"logit_scale": c.logits_scale},
        has=words("layer_types"),
        lacks=words("head_dim"),
    ),
    "stablelm": Family(
        architecture="StableLmForCausalLM",
        options=lambda k: {
            **shared(k, eps=1e-5, eps_key="layer_norm_eps", share=0.25),
            "norm": "layer",
            "biases": ["qkv"] if k.get("use_qkv_bias", False) else [],
            "parallel": "one_norm" if k.get("use_parallel_residual", False) else None,
        },
        only={"qk_layernorm": False},
        writes=lambda c: {"use_qkv_bias": "qkv" in c.biases},
        has=words("partial_rotary_factor"),
        lacks=words("head_dim"),
    ),
    "starcoder2": Family(
        architecture="Starcoder2ForCausalLM",
        options=_starcoder2,
        only={"mlp_type": "default", "norm_type": "layer_norm"},
        writes=lambda c: {"norm_epsilon": c.norm_eps, "use_bias": bool(c.biases)},
        lacks=words("head_dim"),
        names={"mlp/up_proj": "mlp.c_fc", "mlp/down": "mlp.c_proj"},
    ),
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        options=_gpt2,
        only={"scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False, "scale_attn_weights": True},
        writes=lambda c: {"n_layer": c.layers, "n_embd": c.embed, "n_head": c.heads, "n_positions": c.seq, "n_inner": c.ffn_size},
        names={
            **dict.fromkeys(QKV, "attn.c_attn"),
            "attn/out": "attn.c_proj",
            "attn_norm": "ln_1",
            "mlp_norm": "ln_2",
            "mlp/up_proj": "mlp.c_fc",
            "mlp/down": "mlp.c_proj",
            "embed": "transformer.wte",
            "positions": "transformer.wpe.weight",
            "norm": "transformer.ln_f",
        },
        layer="transformer.h.{l}.",
        are_kernels_transposed=False,
        skipped=("attn.bias", "attn.masked_bias"),
    ),
}
