"""config.json as people have it: whole files of published models (tests/goldens/configs), and keys that say nothing, the same, or more."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from golden_models import GOLDENS, config_of, expected
from test_families import LEAST

import jgt
from jgt.document import Node, bind
from train.models.config import ModelConfig
from train.models.decoder import build
from train.models.experts.config import ExpertsConfig
from train.models.experts.routing import route
from train.models.rope import rotate
from train.models.tokens import LayerFlags, Rows
from train.run.__main__ import inspect
from train.weights.described import described_by, published
from train.weights.describing import described_as_family
from train.weights.families.families import FAMILIES
from train.weights.families.multimodal import TEXT_PARTS
from train.weights.keys import Keys
from train.weights.load import open_files
from train.weights.safetensors import open_folder
from train.weights.writing import write_folder

CONFIGS = {file.stem: file for file in sorted((Path(__file__).parents[2] / "goldens" / "configs").iterdir())}
PARAMETERS = {
    "HuggingFaceTB--SmolLM2-135M": 134_515_008,
    # transformers counts the indexers of DeepSeek-V3.2 and GLM-5 too, which are not read.
    "deepseek-ai--DeepSeek-R1": 671_026_404_352,
    "deepseek-ai--DeepSeek-V3.2": 671_026_404_352,
    "moonshotai--Kimi-K2-Instruct": 1_026_408_209_408,
    "nvidia--GLM-5.1-NVFP4": 743_180_190_720,
    "nvidia--GLM-5.2-NVFP4": 743_180_190_720,
    "nvidia--Kimi-K2.5-NVFP4": 1_026_408_209_408,
    "nvidia--Kimi-K2.7-Code-NVFP4": 1_026_408_209_408,
    "nvidia--MiniMax-M2.5-NVFP4": 228_689_748_992,
    "nvidia--MiniMax-M2.7-NVFP4": 228_689_748_992,
    "nvidia--DeepSeek-V3.1-NVFP4": 671_026_404_352,
    "zai-org--GLM-5": 743_180_190_720,
    "zai-org--GLM-5.1": 743_180_190_720,
    "zai-org--GLM-5.2": 743_180_190_720,
    "Qwen--Qwen2.5-0.5B": 494_032_768,
    "MiniMaxAI--MiniMax-M2.5": 228_689_748_992,
    "MiniMaxAI--MiniMax-M2.7": 228_689_748_992,
    "Qwen--Qwen3-0.6B": 596_049_920,
    "Qwen--Qwen3-1.7B": 1_720_574_976,
    "Qwen--Qwen3-235B-A22B": 235_093_634_560,
    "Qwen--Qwen3-30B-A3B-FP8": 30_532_122_624,
    "Qwen--Qwen3-32B-FP8": 32_762_123_264,
    "Qwen--Qwen3-32B-FP8-Static-PerTensor": 32_762_123_264,
    "Qwen--Qwen3-8B": 8_190_735_360,
    "Qwen--Qwen3-Coder-480B-A35B-Instruct": 480_154_875_392,
    "Qwen--Qwen3-VL-2B-Instruct": 1_720_574_976,
    "Qwen--Qwen3-VL-30B-A3B-Instruct": 30_532_122_624,
    "Qwen--Qwen3-VL-32B-Thinking": 32_762_123_264,
    "Qwen--Qwen3-VL-4B-Instruct": 4_022_468_096,
    "Qwen--Qwen3.5-122B-A10B": 122_111_526_912,
    "Qwen--Qwen3.5-27B": 26_895_998_464,
    "Qwen--Qwen3.5-397B-A17B": 396_346_350_336,
    "nvidia--Qwen3.6-27B-NVFP4": 26_895_998_464,
    "nvidia--Qwen3.6-35B-A3B-NVFP4": 34_660_610_688,
    "deepseek-ai--DeepSeek-R1-Distill-Qwen-7B": 7_615_616_512,
    "google--gemma-2-9b": 9_241_705_984,
    "meta-llama--Meta-Llama-3.1-70B": 70_553_706_496,
    "meta-llama--Meta-Llama-3.1-8B": 8_030_261_248,
    "microsoft--Phi-4-mini-instruct": 3_836_021_760,
    "mistralai--Mixtral-8x7B-v0.1": 46_702_792_704,
    "nvidia--Llama-3.1-70B-Instruct-FP8": 70_553_706_496,
    "openai--gpt-oss-20b": 20_914_757_184,
    "nvidia--Qwen3-235B-A22B-NVFP4": 235_093_634_560,
    "tiiuae--Falcon3-7B-Instruct": 7_455_550_464,
}
REASONS = {
    "deepseek_ref": "sparse or compressed attention",
    "deepseek_v4": "sparse or compressed attention",
    "gemma4": "layers of several sizes",
    "kimi_k3": "sparse or compressed attention",
    "llama4": "chunked attention",
    "mimo": "multi-token prediction",
    "nemotron_h": "state-space or convolution layers",
    "step3p7": "experts with a router of their own",
}
PLACE = Path("config.json")
EXPERTS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    **{key: {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} for key in ("qwen2_moe", "qwen3_moe")},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    **{key: {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} for key in ("dots1", "glm4_moe")},
    **{
        key: {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
        for key in ("qwen3_next", "qwen3_5_moe_text")
    },
    **{key: {"num_local_experts": 4, "num_experts_per_tok": 2} for key in ("gpt_oss", "minimax_m2")},
    **{
        key: {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        }
        for key in ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "mistral4")
    },
}


def least(family, **changes):
    """A whole config.json of a family."""
    gpt = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 64}
    sizes = gpt if family == "gpt2" else LEAST | EXPERTS.get(family, {})
    return {"model_type": family, **sizes, **changes}


def keys_of(family, **changes):
    return described_by(least(family, **changes), PLACE).keys


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_file_is_taken_or_answered_with_the_reason(name):
    values = json.loads(CONFIGS[name].read_text())
    if name in PARAMETERS:
        config = bind(Node.of(dict(described_by(values, PLACE).keys), "config.json", "model"), ModelConfig, [])
        assert sum(x.size for x in jax.tree.leaves(jax.eval_shape(build(config).init, jax.random.key(0))[0])) == PARAMETERS[name]
        return
    assert values["model_type"] not in (*FAMILIES, *TEXT_PARTS)
    with pytest.raises(jgt.InputError) as caught:
        described_by(values, PLACE)
    assert len(caught.value.problems) == 1
    assert REASONS[values["model_type"]] in str(caught.value)
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize(("kind", "nearest"), [("lama", "llama"), ("qwen3_mo", "qwen3_moe"), ("gpt-neox", "gpt_neox")])
def test_a_slip_gets_a_suggestion(kind, nearest):
    with pytest.raises(jgt.InputError, match=rf"model_type: '{kind}' is not known. Did you mean '{nearest}'\? Supported: llama, mistral"):
        described_by({"model_type": kind}, PLACE)


@pytest.mark.parametrize("kind", ["llama5", "gemma4", "qwen4_moe", "olmo", "phimoe", "cohere3", "mistral5", "granitemoe", "jamba", "opt"])
def test_another_architecture_gets_none(kind):
    with pytest.raises(jgt.InputError, match="Supported: llama, mistral") as caught:
        described_by({"model_type": kind}, PLACE)
    assert "Did you mean" not in str(caught.value)


# -- keys that say nothing -----------------------------------------------------------------------------------------

CLUTTER = {
    "_attn_implementation_autoset": True,
    "_model_name_or_path": "a model",
    "_name_or_path": "a model",
    "diversity_penalty": 0.0,
    "dtype": "bfloat16",
    "early_stopping": False,
    "is_causal": True,
    "layer_types": ["full_attention"] * 4,
    "length_penalty": 1.0,
    "lm_head_bias": False,
    "max_sequence_length": 2048,
    "moe_layers": [],
    "num_beams": 1,
    "output_scores": False,
    "pruned_heads": {},
    "quantization_config": {},
    "repetition_penalty": 1.0,
    "residual_dropout": 0.1,
    "return_dict_in_generate": False,
    "rope_interleaved": False,
    "tf_legacy_loss": False,
    "torch_dtype": "float32",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "typical_p": 1.0,
    "unsloth_fixed": True,
    "unsloth_version": "2025.3.1",
    "use_mrope": False,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_say_nothing_change_nothing(family):
    types = {"layer_types": ["full_attention"] * 4} if "layer_types" in FAMILIES[family].has else {}
    assert keys_of(family, **CLUTTER) == keys_of(family, **types)


SAME = [
    ("llama", {"is_llama_config": True}),
    ("gemma2", {"sliding_window": 4096, "sliding_window_size": 4096}),
    ("gemma3_text", {"sliding_window_pattern": 6, "_sliding_window_pattern": 6}),
    ("phi3", {"embd_layer": "default", "full_attn_mod": 1, "interpolate_factor": 1}),
    ("qwen3", {"use_qk_norm": True}),
    ("qwen3_moe", {"num_local_experts": 4, "use_qk_norm": True, "shared_expert_intermediate_size": 0, "qkv_bias": False}),
    ("starcoder2", {"mlp_type": "default", "norm_type": "layer_norm"}),
    ("gpt_neox", {"rope_theta": 10000, "partial_rotary_factor": 0.25}),
    ("glm4", {"attention_bias": True}),
    ("glm4_moe", {"num_local_experts": 4, "num_mtp_layers": 0, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 1}),
    ("minimax_m2", {"attn_type_list": [1] * 4, "use_mtp": True, "num_mtp_modules": 3, "shared_intermediate_size": 0, "rotary_dim": 128}),
    ("cohere2", {"sliding_window_pattern": 4, "layer_switch": 4, "use_parallel_block": True, "use_qk_norm": False}),
    ("exaone4", {"sliding_window_pattern": 4, "layer_types": [*["sliding_attention"] * 3, "full_attention"]}),
    ("exaone4", {"sliding_window_pattern": "LLLG", "layer_types": [*["sliding_attention"] * 3, "full_attention"]}),
    ("olmoe", {"clip_qkv": None}),
    ("gpt_oss", {"experts_per_token": 2, "initial_context_length": 4096, "swiglu_limit": 7.0, "attention_bias": True}),
    ("gpt_oss", {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_experts": 4, "sliding_window": 128}),
    ("llama", {"rope_scaling": {}}),
    ("llama", {"rope_parameters": {"rope_type": "default", "type": "default", "rope_theta": 10000.0}}),
    ("olmo3", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
    ("gemma3_text", {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64}),
]


@pytest.mark.parametrize(("family", "changes"), SAME, ids=str)
def test_keys_that_say_what_the_family_is_are_taken(family, changes):
    assert keys_of(family, **changes) == keys_of(family)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"max_position_embeddings": 256}
MORE = [
    ("llama", {"is_llama_config": False}, "is_llama_config: false is not supported"),
    ("llama", {"is_causal": False}, "is_causal: false"),
    ("llama", {"use_rope": False}, "use_rope: false"),
    ("llama", {"rope_interleaved": True}, "rope_interleaved: true: jgt does not know this key"),
    ("llama", {"layer_types": ["sliding_attention"] * 4}, "layer_types:"),
    ("llama", {"layer_norm_eps": 1e-3}, "layer_norm_eps: 0.001: jgt does not know this key, .*. Remove it if it changes nothing"),
    ("phi", {"rms_norm_eps": 1e-3}, "rms_norm_eps: 0.001: jgt does not know"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5, but the family's class rotates all of a head"),
    ("olmo2", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: 0.5, but the family"),
    ("gpt_neox", {"rope_theta": 77_777.0}, "rope_theta: 77777.0 is not supported. Supported: 10000"),
    ("gemma2", {"sliding_window": 8, "sliding_window_size": 16}, "sliding_window: 8, but sliding_window_size: 16 says the same"),
    (
        "gemma3_text",
        {"sliding_window_pattern": 6, "_sliding_window_pattern": 3},
        "but _sliding_window_pattern: 3 says the same",
    ),
    ("qwen3_moe", {"num_local_experts": 8}, "num_experts: 4, but num_local_experts: 8 says the same"),
    ("qwen3", {"use_qk_norm": False}, "use_qk_norm: false is not supported"),
    ("phi3", {"full_attn_mod": 2}, "full_attn_mod: 2 is not supported"),
    ("starcoder2", {"norm_type": "rms_norm"}, "norm_type: 'rms_norm' is not supported"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv: 8.0 is not supported. Supported: null"),
    ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported. Supported: 'silu'"),
    ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit must be a number above 0, not 0"),
    ("gpt_oss", {"num_experts_per_tok": None}, "the key 'num_experts_per_tok' is missing"),
    ("minimax_m2", {"attn_type_list": [1, 0, 1, 1]}, "attn_type_list: another kind of attention than 1"),
    ("minimax_m2", {"num_hidden_layers": 10**9, "attn_type_list": [1]}, "num_hidden_layers: 1000000000 is not a number of layers"),
    ("minimax_m2", {"shared_intermediate_size": 16}, "shared_intermediate_size: 16: jgt does not know this key"),
    ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias: false is not supported"),
    ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func: 'softmax' is not supported. Supported: 'sigmoid'"),
    ("glm4_moe", {"n_routed_experts": 4, "num_local_experts": 8}, "n_routed_experts: 4, but num_local_experts: 8 says the same"),
    ("glm4_moe", {"topk_method": "greedy"}, "topk_method: 'greedy' is not supported"),
    ("glm4_moe", {"moe_layer_freq": 2}, "moe_layer_freq: 2 is not supported"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads: 2 is not supported. Supported: 4"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func: 'softmax' is not supported"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob: true is not supported"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method: 'noaux_tc' is not supported"),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "mlp_layer_types: dense layers before sparse ones"),
    ("glm4_moe_lite", {"first_k_dense_replace": 2}, "first_k_dense_replace: 2 is not supported. Supported: 1"),
    (
        "mistral4",
        {"rope_parameters": {"partial_rotary_factor": 0.25}},
        "partial_rotary_factor: 0.25, but qk_rope_head_dim is 0.5 of a head",
    ),
    ("glm4_moe", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers must be a number above 0, not -1"),
    ("dots1", {"routed_scaling_factor": "big"}, "routed_scaling_factor must be a number above 0, not 'big'"),
    (
        "qwen2_moe",
        {"shared_expert_intermediate_size": 24},
        "shared_expert_intermediate_size: 24 is not a multiple of moe_intermediate_size 16",
    ),
    ("qwen2_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step: 2 is not supported"),
    ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern: 'LLLG' is not supported without layer_types"),
    ("cohere2", {"sliding_window_pattern": 4, "layer_switch": 2}, "sliding_window_pattern: 4, but layer_switch: 2 says the same"),
    ("cohere", {"use_qk_norm": True}, "use_qk_norm: true is not supported"),
    ("stablelm", {"qk_layernorm": True}, "qk_layernorm: true is not supported"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights: false is not supported"),
    ("mixtral", {"shared_expert_intermediate_size": 16}, "shared_expert_intermediate_size: 16"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "type": "default", "factor": 2.0}}, "rope_type: 'linear', but type: 'default'"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "'original_max_position_embeddings' is missing"),
    ("llama", {"rope_scaling": {**YARN, "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta: the family's class does not read it"),
    ("llama", {"rope_scaling": {**YARN, "twist": 0.1}}, "rope_scaling: twist: 0.1: jgt does not know this key"),
    ("llama", {"rope_scaling": {**YARN, "truncate": 1}}, "rope_scaling: truncate must be true or false, not 1"),
    ("llama", {"rope_scaling": {**YARN, "max_position_embeddings": 7}, **LONG}, "rope_scaling: max_position_embeddings: 7 is not supp"),
    ("llama", {"rope_scaling": YARN, "original_max_position_embeddings": 32}, "original_max_position_embeddings: 64 is not supported"),
    ("olmo3", {"rope_parameters": {"full_attention": {**YARN, "truncate": False}}}, "full_attention: truncate: false is not supported"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'max_position_embeddings' is missing"),
    (
        "llama",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}, **LONG},
        "original_max_position_embeddings: 64, but dynamic has max_position_embeddings 256",
    ),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}, "is missing"),
    (
        "phi3",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        "'original_max_position_embeddings' is missing",
    ),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "rope_parameters: full_attention"),
    (
        "qwen2",
        {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "say different things",
    ),
    ("gemma3_text", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta, rope_type: say which layers have it"),
    ("olmo3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "factor, rope_type: say which layers have it"),
    ("olmo3", {"rope_theta": 1e6}, "rope_theta: of which layers is unclear"),
    ("olmo3", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "sliding_attention: rope_type: 'linear'"),
    (
        "gemma3_text",
        {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}, "rope_scaling": {"type": "linear", "factor": 8.0}},
        "say different",
    ),
]


@pytest.mark.parametrize(("family", "changes", "problem"), MORE, ids=str)
def test_keys_that_say_more_are_refused_by_name(family, changes, problem):
    with pytest.raises(jgt.InputError, match=problem):
        keys_of(family, **changes)


@pytest.mark.parametrize("kind", ["ntk", "mrope"])
def test_one_unknown_kind_of_positions_is_one_line(kind):
    with pytest.raises(jgt.InputError) as caught:
        keys_of("llama", rope_scaling={"rope_type": kind, "factor": 4.0, "beta_fast": 32, "mrope_section": [1, 2]})
    (problem,) = caught.value.problems
    assert problem == f"config.json: rope_scaling: '{kind}' is not supported. Supported: default, linear, llama3, longrope, yarn, dynamic"


# Of training, of generation, layers of which no logits come, and a length that only scaled positions read.
SILENT = {
    *("num_mtp_layers", "attention_dropout", "residual_dropout"),
    *("architectures", "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "pretraining_tp", "return_dict", "use_cache"),
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "classifier_dropout", "router_aux_loss_coef", "original_max_position_embeddings"),
    *("summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
}


def test_no_key_of_a_class_is_off_without_a_word_if_its_absence_means_on():
    # What the classes of transformers 5.24 have where a config.json has no key.
    defaults = json.loads((Path(__file__).parents[2] / "goldens" / "class_defaults.json").read_text())
    for family, values in defaults.items():
        keys = Keys(least(family))
        FAMILIES[family].read(keys)
        unread = Keys({name: type(value)() for name, value in values.items() if value and name not in keys.read})
        assert unread.values.keys() - SILENT == set(), family


# -- two places that say the same ----------------------------------------------------------------------------------

INNER = {"rope_type": "default", "rope_theta": 500_000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"gpt2", "gpt_neox", "gemma3_text", "ministral3", "mistral4", "olmo3"}))
def test_the_theta_inside_counts_as_in_transformers(family):
    assert keys_of(family, rope_theta=10_000.0, rope_parameters=INNER)["rope_theta"] == 500_000.0
    assert keys_of(family, rope_theta=500_000.0)["rope_theta"] == 500_000.0


@pytest.mark.parametrize("family", ["glm4", "phi", "stablelm", "phi3"])
def test_the_share_inside_counts(family):
    assert keys_of(family, partial_rotary_factor=1.0, rope_parameters={**INNER, "partial_rotary_factor": 0.5})["rope_share"] == 0.5


def test_the_names_of_gpt_neox_count_outside_alone():
    inner = {**INNER, "partial_rotary_factor": 0.5}
    assert (found := keys_of("gpt_neox", rotary_pct=1.0, rotary_emb_base=10_000, rope_parameters=inner))["rope_theta"] == 500_000.0
    assert found["rope_share"] == 0.5
    assert (found := keys_of("gpt_neox", rotary_pct=0.5, rotary_emb_base=77_777, rope_theta=77_777))["rope_theta"] == 77_777
    assert found["rope_share"] == 0.5


def test_both_forms_of_positions_may_say_the_same():
    both = keys_of("llama", rope_theta=5e5, rope_scaling=LLAMA3, rope_parameters={**LLAMA3, "rope_theta": 5e5})
    assert both == keys_of("llama", rope_theta=5e5, rope_scaling=LLAMA3)


FULL = {"full_attention": INNER}


@pytest.mark.parametrize(
    ("family", "changes", "thetas"),
    [
        ("gemma3_text", {}, (1e6, 1e4)),
        ("gemma3_text", {"rope_theta": 77.0}, (77.0, 1e4)),
        ("gemma3_text", {"rope_parameters": FULL}, (5e5, 1e4)),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_theta": 20.0}}}, (1e6, 20.0)),
        ("gemma3_text", {"rope_theta": 77.0, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, (77.0, 1e4)),
        ("gemma3_text", {"rope_theta": 77.0, "rope_local_base_freq": 99.0, "rope_parameters": FULL}, (5e5, 99.0)),
        ("olmo3", {}, (5e5, None)),
        ("olmo3", {"rope_theta": 77.0, "rope_parameters": {**FULL, "sliding_attention": {"rope_theta": 20.0}}}, (5e5, 20.0)),
        ("olmo3", {"rope_parameters": {"full_attention": {"rope_theta": 77.0}}}, (77.0, 5e5)),
    ],
    ids=str,
)
def test_each_kind_of_layer_has_its_theta(family, changes, thetas):
    found = keys_of(family, num_hidden_layers=6, **changes)
    assert (found["rope_theta"], found.get("window_theta")) == thetas


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_all_layers_may_have_the_window(family):
    found = keys_of(family, use_sliding_window=True, sliding_window=8, max_window_layers=0)
    assert (found["window"], found["full_layers"]) == (8, [])


@pytest.mark.parametrize(
    ("changes", "magnitude"),
    [
        ({}, None),
        ({"attention_factor": 1.5, "mscale": 2.0, "mscale_all_dim": 1.0}, 1.5),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 2.0, "mscale_all_dim": 0.5}, (0.2 * np.log(4) + 1) / (0.05 * np.log(4) + 1)),
        # Both, or neither.
        ({"mscale": 2.0, "mscale_all_dim": 0}, None),
        ({"mscale_all_dim": 2.0}, None),
    ],
    ids=str,
)
def test_the_magnitude_of_yarn(changes, magnitude):
    found = keys_of("llama", rope_scaling={**YARN, **changes})["rope_scaling"]
    assert (found.get("magnitude"), found["factor"]) == (magnitude if magnitude is None else pytest.approx(magnitude), 4.0)


def test_the_factor_of_yarn_may_be_that_of_the_lengths():
    told = {name: value for name, value in YARN.items() if name != "factor"}
    assert keys_of("llama", **LONG, rope_scaling=told)["rope_scaling"]["factor"] == 4.0


def test_only_full_layers_of_olmo_3_have_yarn():
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
    by_kind = {"full_attention": {**YARN, "rope_theta": 5e5}, "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}
    found = keys_of("olmo3", **kinds, rope_parameters=by_kind)
    assert found == keys_of("olmo3", **kinds, rope_theta=5e5, rope_scaling=YARN)
    assert (found["window_theta"], found["rope_scaling"]["kind"]) == (5e5, "yarn")


def test_a_ministral_3_without_positions_has_those_of_its_class():
    scaling = keys_of("ministral3")["rope_scaling"]
    assert (scaling["original"], scaling["factor"], scaling["query_growth"], scaling["magnitude"]) == (16384, 16.0, 0.1, 1.0)


def test_dynamic_is_plain_up_to_the_original_length_and_refused_above():
    keys = keys_of("llama", **LONG, rope_scaling={"type": "dynamic", "factor": 2.0})
    plain, problems = {**keys, "rope_scaling": None}, []
    config, other = (bind(Node.of(dict(one), "config.json", "model"), ModelConfig, []) for one in (keys, plain))
    x, rows = jax.random.normal(jax.random.key(0), (1, 256, 4, 16)), Rows()
    np.testing.assert_array_equal(rotate(x, config, LayerFlags(), rows), rotate(x, other, LayerFlags(), rows))
    bind(Node.of({**keys, "seq": 257}, "run.yaml", "model"), ModelConfig, problems)
    assert "the original length 256, which jgt does not do. Use 256 at most" in problems[0]


@pytest.mark.parametrize(
    ("family", "changes", "options"),
    [
        ("exaone4", {"sliding_window": None}, {"window": None, "unrotated_layers": []}),
        ("exaone4", {"sliding_window": None, "sliding_window_pattern": 0}, {"window": None, "unrotated_layers": []}),
        ("exaone4", {"sliding_window": 8}, {"window": 8, "full_layers": [3], "unrotated_layers": [3]}),
        ("exaone4", {"layer_types": ["full_attention"] * 4}, {"window": None, "unrotated_layers": [0, 1, 2, 3]}),
        ("cohere2", {}, {"window": 4096, "full_layers": [3], "unrotated_layers": [3], "tied": True, "logits_scale": 0.0625}),
        ("cohere2", {"sliding_window": None}, {"window": None, "unrotated_layers": [0, 1, 2, 3]}),
        ("dots1", {"max_window_layers": 1}, {"window": 4096, "full_layers": [0]}),
        ("dots1", {}, {"window": None}),
        ("glm4_moe", {}, {"rope_share": 0.5, "norm_eps": 1e-5, "qk_norm": None}),
        ("gpt_oss", {}, {"window": 128, "full_layers": [1, 3], "rope_theta": 150_000.0, "head_dim": 64, "swiglu_limit": 7.0}),
        ("gpt_oss", {"attention_bias": False}, {"biases": ["experts", "router"], "swiglu_alpha": 1.702, "attention_sinks": True}),
        ("minimax_m2", {}, {"rope_theta": 5e6, "head_dim": 128, "rope_share": 1.0}),
        ("minimax_m2", {"rotary_dim": 64}, {"rope_share": 0.5}),
        ("qwen2_moe", {"shared_expert_intermediate_size": 32}, {"biases": ["qkv"]}),
        ("seed_oss", {}, {"biases": ["qkv"], "head_dim": 128}),
        ("ernie4_5", {}, {"biases": [], "tied": True, "rope_theta": 5e5, "head_dim": 128}),
        ("helium", {}, {"norm_eps": 1e-8, "rope_theta": 1e5, "head_dim": 128}),
    ],
    ids=str,
)
def test_a_family_has_the_defaults_of_its_class(family, changes, options):
    found = keys_of(family, **changes)
    assert {name: found.get(name) for name in options} == options


def test_the_experts_of_a_family_have_the_defaults_of_its_class():
    chosen = ("score", "balance", "normalized", "shared", "shared_gate", "first_dense", "result_scale")
    told = {family: keys_of(family)["experts"] for family in ("qwen2_moe", "olmoe", "glm4_moe", "dots1", "minimax_m2")}
    found = {family: tuple(experts.get(name) for name in chosen) for family, experts in told.items()}
    assert found == {
        "qwen2_moe": (None, "batch", False, 352, True, None, None),
        "olmoe": (None, "batch", False, None, None, None, None),
        "glm4_moe": ("sigmoid", "bias", True, 1, None, 1, 1.0),
        "dots1": ("sigmoid", "bias", False, 0, None, 0, 1.0),
        "minimax_m2": ("sigmoid", "bias", True, None, None, None, None),
    }


def test_layers_behind_the_last_one_are_left_out():
    found = described_by(least("glm4_moe", num_nextn_predict_layers=2), PLACE)
    assert found.others == ("model.layers.4.", "model.layers.5.")


def test_one_chosen_expert_is_that_of_the_class():
    assert keys_of("mixtral", num_experts_per_tok=1)["experts"]["normalized"] is True
    assert keys_of("qwen3_moe", num_experts_per_tok=1, norm_topk_prob=True)["experts"]["normalized"] is True
    assert keys_of("qwen3_moe", num_experts_per_tok=1)["experts"]["normalized"] is False


@pytest.mark.parametrize("choose", [1, 2])
@pytest.mark.parametrize("normalized", [None, True, False])
def test_scales_are_divided_by_their_sum_if_asked(choose, normalized):
    logits = jax.random.normal(jax.random.key(0), (5, 4))
    scale = route(logits, None, ExpertsConfig(count=4, choose=choose, normalized=normalized))[1]
    wanted = np.sort(np.exp(logits) / np.exp(logits).sum(-1, keepdims=True))[:, ::-1][:, :choose]
    is_divided = choose > 1 if normalized is None else normalized
    np.testing.assert_allclose(scale, wanted / wanted.sum(-1, keepdims=True) if is_divided else wanted, rtol=1e-6)


def test_a_switch_is_not_exported_as_a_mixture_that_divides():
    config = config_of("mixtral")
    switch = dataclasses.replace(config, hf=None, experts=dataclasses.replace(config.experts, choose=1, normalized=None))
    with pytest.raises(jgt.InputError, match=r"model\.experts\.normalized: false"):
        described_as_family(switch, str)


def test_layers_of_olmo_3_are_exported_with_their_thetas():
    config = dataclasses.replace(config_of("olmo3"), hf=None, rope_theta=77.0, window_theta=20.0)
    found = described_as_family(config, str)
    assert found.config["rope_parameters"]["sliding_attention"] == {"rope_theta": 20.0}
    assert (found.keys["rope_theta"], found.keys["window_theta"]) == (77.0, 20.0)


# -- tied heads, and quantised folders -----------------------------------------------------------------------------


def folder_of(path, tensors, **changes):
    """The golden folder of llama3, which is tied, with these tensors."""
    values = {**json.loads((GOLDENS / "llama3" / "config.json").read_text()), **changes}
    shapes = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    pieces = ((name, (), array) for name, array in tensors.items())
    write_folder(path, shapes, pieces, files={"config.json": json.dumps(values).encode()}, max_file_bytes=1 << 30)
    return path


def logits_of(path):
    """The logits of a folder for the golden tokens."""
    described, problems = published(path), []
    config = bind(Node.of({**described.keys, "seq": 96}, "config.json", "model"), ModelConfig, problems)
    model = build(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0))[0]
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = open_files(described, config, shapes).load(shapes, jax.tree.map(lambda _: here, shapes))
    return jax.jit(lambda p, t: model.apply(p, {}, t))(params, expected("llama3")[0])


def tensors_of_llama3():
    folder = open_folder(GOLDENS / "llama3")
    return {name: folder.read(name) for name in folder.tensors}


TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_a_head_that_is_the_embedding_once_more_is_taken_from_either_tensor(tmp_path):
    tensors, (_, wanted, std) = tensors_of_llama3(), expected("llama3")
    for name, given in {"both": {**tensors, HEAD: tensors[TABLE]}, "head": {**tensors, HEAD: tensors[TABLE]}}.items():
        if name == "head":
            del given[TABLE]
        assert np.abs(logits_of(folder_of(tmp_path / name, given))[:, ::5] - wanted).max() < 5e-5 * std


def test_a_head_of_its_own_is_not_dropped(tmp_path):
    tensors = tensors_of_llama3()
    other = tensors[TABLE].copy()
    other[-1, -1] += 1
    path = folder_of(tmp_path / "tied", {**tensors, HEAD: other})
    with pytest.raises(jgt.InputError, match=r"lm_head.weight differs from model.embed_tokens.weight, .*set it to false there"):
        logits_of(path)
    untied = logits_of(folder_of(tmp_path / "untied", {**tensors, HEAD: other}, tie_word_embeddings=False))
    assert np.abs(untied[:, ::5, :-1] - expected("llama3")[1][..., :-1]).max() < 5e-5 * expected("llama3")[2]
    assert np.abs(untied[:, ::5, -1] - expected("llama3")[1][..., -1]).max() > 0.1


def test_a_quantised_folder_is_one_line(tmp_path):
    tensors = tensors_of_llama3()
    packed = {name: array.astype(np.uint8) if array.ndim == 2 else array for name, array in tensors.items()}
    path = folder_of(tmp_path / "packed", packed)
    with pytest.raises(jgt.InputError) as caught:
        logits_of(path)
    (problem,) = caught.value.problems
    assert re.search("has tensors of the type uint8, .* If they are quantised, take the model that they were made from", problem)
    (path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(jgt.InputError, match=r"hf_quant_config.json: the tensors are quantised \(modelopt\). Take the model"):
        published(path)


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, "NVFP4"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}}, "modelopt, FP8_PB_WO"),
        ({"quantization_config": {"quant_method": "fbgemm_fp8"}}, "fbgemm_fp8"),
        ({"quantization_config": {"load_in_4bit": True, "quant_method": "bitsandbytes"}}, "bitsandbytes"),
        ({"compression_config": {"format": "pack-quantized"}}, "pack-quantized"),
    ],
    ids=str,
)
def test_quantised_tensors_are_refused_and_their_config_can_be_planned(told, name, tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(least("llama", **told)))
    for place in (config, tmp_path):
        assert published(place).keys == keys_of("llama")
    assert inspect([str(config)]) == 0
    assert f"It can be planned, but not read: {config}: the tensors are quantised ({name}). Take the model" in capsys.readouterr().out
    (tmp_path / "model.safetensors").touch()
    assert inspect([str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{config}: the tensors are quantised ({name}). Take the model that they were made from" in line


def test_a_config_that_names_each_quantised_tensor_is_read(tmp_path):
    names = {f"model.layers.{n}.mlp.experts.{n}.up_proj": {"group_size": 16} for n in range(50_000)}
    text = json.dumps({**least("llama"), "quantization_config": {"quant_method": "modelopt", "quantized_layers": names}})
    assert 1 << 20 < len(text) < 1 << 24
    (tmp_path / "config.json").write_text(text)
    assert "quantised (modelopt)" in published(tmp_path).unread
