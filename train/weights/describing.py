"""A decoder's options written as the config.json of a family: the reverse of `families`, for models that began from nothing.

No family has a function of its own for it. All keys that families have for the model's options are written, each family reads them, and
the first one that reads the very same model back is the model's. Its config.json has the keys that it has read. So a key that is written
wrongly cannot describe another model: that family would not be found.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from jgt.document import InputError, Node, bind, shown

from ..models.config import ModelConfig
from ..models.experts.config import ExpertsConfig, GroupsConfig
from ..models.options import LatentConfig, RopeScaling
from .described import Described, described_by
from .families.families import FAMILIES
from .keys import Keys, words

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
_RARE = words("layer_types partial_rotary_factor num_local_experts num_experts original_max_position_embeddings")
"""Keys that the classes of few families have, though others would read them."""
_ALWAYS_WINDOWED = words("gemma2 gemma3_text")
"""Families whose class needs the size of a window, even where no layer has one."""
_TYPES = {True: "full_attention", False: "sliding_attention"}
# Keys without effect on the function of a model with given weights.
_SILENT = words("kind hf dtype base_dtype fp8 attention mtp_rate")


def described_as_family(config: ModelConfig, where: Callable[[str], str]) -> Described:
    """The model as a published one. where: file and line of a key of the run. Raises InputError with the keys that no family can say."""
    written = _written(config)
    nearest: tuple[str, dict[str, Any]] | None = None
    for name, family in FAMILIES.items():
        if _is_refused(name, config):
            continue
        keys = {**written, **family.writes(config)}
        for key in (_RARE - family.has) | family.lacks:
            keys.pop(key, None)
        if config.window is None and name in _ALWAYS_WINDOWED:
            del keys["sliding_window"]
        read = Keys(keys)
        family.read(read)
        values = {"model_type": name, "architectures": [family.architecture]} | {k: v for k, v in keys.items() if k in read.read}
        # Without these, transformers takes ids of the published models.
        values |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        try:
            described = described_by(values, Path("config.json"))
        except InputError:
            continue
        different = differences(config, described)
        if not different:
            return described
        if nearest is None or len(different) < len(nearest[1]):
            nearest = name, different
    assert nearest is not None
    family, different = nearest
    has, only = config_values(config), f"no family of published models has this beside the model's other options. {family} would have"
    raise InputError(
        [f"{where(f'model.{key}')}: model.{key}: {shown(has.get(key))}: {only} {shown(other)}" for key, other in different.items()]
    )


def _is_refused(name: str, c: ModelConfig) -> bool:
    """Whether the class of a family in transformers refuses the keys of a model that its code would compute."""
    if name == "phi3":
        return c.rope_scaling is not None and c.rope_scaling.kind != "longrope"
    is_uneven = name in ("llama", *_ALWAYS_WINDOWED) and c.embed % c.heads != 0
    return is_uneven or (name in _ALWAYS_WINDOWED and not isinstance(_scalar(c), int))


def differences(config: ModelConfig, described: Described) -> dict[str, Any]:
    """The values of a published model that differ from a model's, by key."""
    problems: list[str] = []
    theirs: ModelConfig | None = bind(Node.of(dict(described.keys), "config.json", "model"), ModelConfig, problems)
    if theirs is None:
        raise InputError(problems)
    ours, other = config_values(config), config_values(theirs)
    return {key: other.get(key) for key in ours.keys() | other.keys() if not _equal(ours.get(key), other.get(key))}


def config_values(config: ModelConfig) -> dict[str, Any]:
    """The function of a model: its keys by full name, each with the value that it has where none is given."""
    experts = config.experts
    if experts is not None:
        # How they are trained says nothing about their function, but a bias is one.
        balance = "bias" if experts.balance == "bias" else "batch"
        experts = replace(experts, ffn=experts.ffn or config.ffn_size, normalized=experts.is_normalized)
        groups = experts.groups and replace(experts.groups, best=experts.groups.of_best(experts.choose))
        experts = replace(experts, balance=balance, balance_rate=None, z_loss=0.0, groups=groups)
    values = {name: value for name, value in vars(config).items() if name not in _SILENT}
    values |= {"kv_heads": config.num_kv_heads, "head_dim": config.head_size, "ffn": _width(config), "biases": sorted(set(config.biases))}
    values |= {"attention_scale": config.attention_scale or config.head_size**-0.5, "full_layers": sorted(set(config.full_layers))}
    values["unrotated_layers"] = sorted(set(config.unrotated_layers))
    if config.positions != "learned":
        # Only a table of positions has a length.
        del values["seq"]
    if config.rope_scaling is None and config.window_theta == config.rope_theta:
        values["window_theta"] = None
    latent = config.latent and replace(config.latent, value_dim=config.value_size)
    linear = config.linear and replace(config.linear, key_heads=config.linear.num_key_heads)
    values["pattern"] = list(config.kinds)
    for name, part in (("experts", experts), ("rope_scaling", config.rope_scaling), ("latent", latent), ("linear", linear)):
        if part is not None:
            del values[name]
            values |= {f"{name}.{field.name}": getattr(part, field.name) for field in dataclasses.fields(part)}
    return values


def _equal(one: Any, other: Any) -> bool:
    # Some keys are written as another number: the inverse of a scale, for example.
    return math.isclose(one, other, rel_tol=1e-12) if isinstance(one, float) and isinstance(other, float) else one == other


def _width(config: ModelConfig) -> int:
    experts = config.experts
    return config.ffn_size if experts is None or experts.first_dense else experts.ffn or config.ffn_size


def _written(c: ModelConfig) -> dict[str, Any]:
    """The keys of a model's options that several families have. A value of None is written as null."""
    activation, has_window = _ACTIVATIONS[c.activation], c.window is not None
    scaling = c.rope_scaling
    eps = ("layer_norm_eps", "layer_norm_epsilon") if c.norm.startswith("layer") else ("rms_norm_eps",)
    values: dict[str, Any] = {
        "num_hidden_layers": c.layers,
        "hidden_size": c.embed,
        "num_attention_heads": c.heads,
        "max_position_embeddings": c.seq,
        "intermediate_size": _width(c),
        **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), activation),
        "partial_rotary_factor": c.rope_share,
        "rope_theta": c.rope_theta,
        **dict.fromkeys(eps, c.norm_eps),
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_size,
        "vocab_size": c.vocab,
        "tie_word_embeddings": c.tied,
        "attention_bias": "qkv" in c.biases,
        "mlp_bias": "mlp" in c.biases,
        "use_parallel_residual": c.parallel is not None,
        "sliding_window": c.window,
        "use_sliding_window": has_window,
        "layer_types": [_TYPES[not has_window or n in c.full_layers] for n in range(c.layers)],
        "attn_logit_softcapping": c.attention_softcap,
        "final_logit_softcapping": c.logits_softcap,
        "query_pre_attn_scalar": _scalar(c),
    }
    if c.experts is not None:
        values |= _experts(c.experts, c.experts.ffn or c.ffn_size)
    if c.latent is not None:
        values |= _latent(c, c.latent)
    if scaling is not None:
        values["rope_scaling"] = {**_scaling(scaling), **_growth(c, scaling)}
        values["original_max_position_embeddings"] = scaling.original if scaling.kind == "longrope" else None
    return values


def _experts(experts: ExpertsConfig, ffn: int) -> dict[str, Any]:
    groups = experts.groups or GroupsConfig(count=1, choose=1)
    return {
        **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), experts.count),
        "num_experts_per_tok": experts.choose,
        "moe_intermediate_size": ffn,
        "norm_topk_prob": experts.is_normalized,
        "shared_expert_intermediate_size": experts.shared * ffn,
        "n_shared_experts": experts.shared,
        "routed_scaling_factor": experts.result_scale,
        "first_k_dense_replace": experts.first_dense,
        "n_group": groups.count,
        "topk_group": groups.choose,
    }


def _latent(c: ModelConfig, latent: LatentConfig) -> dict[str, Any]:
    return {
        "kv_lora_rank": latent.rank,
        "q_lora_rank": latent.query_rank,
        "qk_rope_head_dim": latent.rope_dim,
        "qk_nope_head_dim": c.head_size - latent.rope_dim,
        "v_head_dim": c.value_size,
        "rope_interleave": c.rope_pairs == "neighbours",
        **({} if latent.longest is None else {"index_topk": latent.longest}),
    }


def _growth(c: ModelConfig, scaling: RopeScaling) -> dict[str, Any]:
    """The keys of yarn for the factor of scores that latent attention has with it."""
    if c.latent is None or c.attention_scale is None or scaling.factor <= 1:
        return {}
    return {"mscale_all_dim": ((c.attention_scale * c.head_size**0.5) ** 0.5 - 1) / (0.1 * math.log(scaling.factor))}


def _scaling(scaling: RopeScaling) -> dict[str, Any]:
    names = {"factor": "factor", "low": "low_freq_factor", "high": "high_freq_factor", "original": "original_max_position_embeddings"}
    names |= {"short": "short_factor", "long": "long_factor", "magnitude": "attention_factor"}
    names |= {"fast": "beta_fast", "slow": "beta_slow", "truncate": "truncate", "query_growth": "llama_4_scaling_beta"}
    default = RopeScaling()
    told = {"llama3": ("low", "high", "original"), "longrope": ("original",), "yarn": ("original",)}.get(scaling.kind, ())
    given = {name: getattr(scaling, name) for name in names}
    kept = {name: value for name, value in given.items() if name in ("factor", *told) or value != getattr(default, name)}
    values = {names[name]: list(value) if isinstance(value, tuple) else value for name, value in kept.items()}
    return {"rope_type": scaling.kind, **values}


def _scalar(c: ModelConfig) -> float:
    """The number whose root divides the scores, as a whole number if it is one but for rounding."""
    value = (c.attention_scale or c.head_size**-0.5) ** -2
    return round(value) if math.isclose(value, round(value), rel_tol=1e-12) else value
