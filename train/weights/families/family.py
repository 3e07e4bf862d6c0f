"""A family of published models, and the options of a config.json that several families write alike.

An option is a key of the model section. One whose value is None keeps its default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jgt.document import shown

from ...models.config import ModelConfig
from ..keys import ConfigJson, Keys

HIDDEN_ACTS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
LLAMA = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attn_norm": "input_layernorm",
    "attn/q_proj": "self_attn.q_proj",
    "attn/k_proj": "self_attn.k_proj",
    "attn/v_proj": "self_attn.v_proj",
    "attn/out": "self_attn.o_proj",
    "attn/q_norm": "self_attn.q_norm",
    "attn/k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp/gate_proj": "mlp.gate_proj",
    "mlp/up_proj": "mlp.up_proj",
    "mlp/down": "mlp.down_proj",
}
"""The tensors of Llama's modules, as in `families.py`."""
STACKED_EXPERTS = {f"moe/experts/{name}": f"mlp.experts.{'down' if name == 'down' else 'gate_up'}_proj" for name in ("gate", "up", "down")}
"""Tensors with the matrices of all experts."""
MISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""The positions of Ministral 3's class, where a file says nothing of them."""
ModelOptions = dict[str, Any]
"""Keys of the model section, with their values."""
QKV = ("attn/q_proj", "attn/k_proj", "attn/v_proj")
"""Modules that are one tensor in some families."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models.

    architecture: the class of transformers. options: reads config.json. only: keys of config.json of which jgt's models have one value.
    writes: keys of config.json that only this family has, from a model. has: keys that few classes have, and this one. lacks: keys that
    most classes have, but not this one. names: tensors that have other names than Llama's; those of layers of one kind begin with it.
    layer: the prefix of a layer's tensors. by_head: tensors of several modules that have the outputs of each head together.
    are_kernels_transposed: whether a kernel [in, out] is stored as [out, in]. are_stacks_transposed: also those of all experts in one
    tensor. is_interleaved: whether the outputs of two modules in one tensor alternate. skipped: the ends of names of tensors to ignore.
    others: the beginnings of those of parts that are left out.
    """

    architecture: str = ""
    options: Callable[[Keys], ModelOptions]
    only: ConfigJson = field(default_factory=ModelOptions)
    writes: Callable[[ModelConfig], ConfigJson] = lambda c: {}
    has: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    layer: str = "model.layers.{l}."
    by_head: frozenset[str] = frozenset()
    are_kernels_transposed: bool = True
    is_interleaved: bool = False
    are_stacks_transposed: bool = False
    skipped: tuple[str, ...] = ("rotary_emb.inv_freq",)
    others: tuple[str, ...] = ()

    def read(self, k: Keys) -> ModelOptions:
        """The options that the keys of a config.json mean. Notes problems there."""
        for name, value in self.only.items():
            k.require(name, value)
        return self.options(k)


def shared(
    k: Keys,
    *,
    tied: bool = False,
    activation: str = "silu",
    eps: float = 1e-6,
    theta: float = 10_000.0,
    window_theta: float | None = None,
    share: float | None = None,
    head_dim: int | None = None,
    rope: ConfigJson | None = None,
    grows: bool = False,
    act_key: str = "hidden_act",
    eps_key: str = "rms_norm_eps",
) -> ModelOptions:
    """The options that nearly all families write alike. The arguments are the defaults of the family's keys, as its class has them.

    act_key, eps_key: the keys of the activation and of the norms' epsilon. window_theta: the theta of layers with a window, of a family
    whose positions are written by the kind of a layer. share: None if the class rotates all of a head. rope: its `rope_parameters` where a
    file says nothing of positions. grows: whether the class has
    queries that grow with their position.
    """
    heads = k.need("num_attention_heads")
    name = k.get(act_key, activation)
    if name not in HIDDEN_ACTS:
        k.problems.append(f"{act_key}: {name!r} is not supported. Supported: {', '.join(HIDDEN_ACTS)}")
    if rope is not None and not (k.values.get("rope_parameters") or k.values.get("rope_scaling")):
        k.values = {**k.values, "rope_parameters": rope}
    positions = _rope(k, share, theta) if window_theta is None else _rope_by_kind(k, theta, window_theta)
    if not grows and (positions["rope_scaling"] or {}).get("query_growth"):
        k.problems.append("llama_4_scaling_beta: the family's class does not read it. Remove the key")
    return {
        "layers": k.need("num_hidden_layers"),
        "embed": k.need("hidden_size"),
        "heads": heads,
        "kv_heads": k.get("num_key_value_heads", heads),
        "head_dim": k.get("head_dim", head_dim),
        "ffn": k.need("intermediate_size"),
        "vocab": k.need("vocab_size"),
        "seq": k.get("max_position_embeddings"),
        "norm_eps": k.get(eps_key, eps),
        "tied": k.get("tie_word_embeddings", tied),
        "activation": HIDDEN_ACTS.get(name, "silu"),
        **positions,
    }


def _rope(k: Keys, share: float | None, theta: float) -> ModelOptions:
    """Rotary positions, as published files write them (rope_theta, rope_scaling) or as transformers 5 does (rope_parameters)."""
    groups = [k.group(name) for name in ("rope_scaling", "rope_parameters")]
    # What is said inside counts, as in transformers: some files have the class's default of an earlier model beside it.
    found = [_positions(k, source, share, theta) for source in [one for one in groups if one.values] or groups[:1]]
    if found[0] != found[-1]:
        k.problems.append("rope_parameters and rope_scaling say different things. Keep the one that is true, and rope_theta beside it")
    return found[0]


def _rope_by_kind(k: Keys, theta: float, window_theta: float) -> ModelOptions:
    """Rotary positions of a family with a mapping for each kind of layer. Only those of full attention are scaled."""
    both, outer = k.group("rope_parameters"), k.group("rope_scaling")
    full, window = both.group("full_attention"), both.group("sliding_attention")
    if flat := both.values.keys() - both.read:
        k.problems.append(f"rope_parameters: {', '.join(sorted(flat))}: say which layers have it, in full_attention and sliding_attention")
    found = [_positions(k, source, None, theta) for source in [one for one in (outer, full) if one.values] or [full]]
    if found[0] != found[-1]:
        k.problems.append("rope_parameters: full_attention and rope_scaling say different things. Keep the one that is true")
    for one in (outer, full):
        # The classes look for it outside of the kinds of layers.
        one.require("truncate", True)
    made, local = found[0], window.get("rope_theta", window_theta)
    window.require("rope_type", "default")
    window.require("partial_rotary_factor", 1)
    window.refuse_others()
    return {**made, "window_theta": local if local != made["rope_theta"] or made["rope_scaling"] else None}


def _positions(k: Keys, source: Keys, share: float | None, theta: float) -> ModelOptions:
    own = source.get("rope_theta", k.get("rope_theta", theta))
    part = source.get("partial_rotary_factor", k.get("partial_rotary_factor", share))
    if share is None and part not in (None, 1):
        k.problems.append(f"partial_rotary_factor: {shown(part)}, but the family's class rotates all of a head. Remove the key")
    return {"rope_theta": own, "rope_share": part, **_scaling(k, source)}


def _scaling(k: Keys, source: Keys) -> ModelOptions:
    kind = source.either("rope_type", "type", "default")
    kind = "longrope" if kind == "su" else kind
    outer = k.get("original_max_position_embeddings")
    original = source.get("original_max_position_embeddings", outer)
    made: ModelOptions = {}
    if kind in ("llama3", "longrope", "yarn"):
        source.require("original_max_position_embeddings", outer or source.need("original_max_position_embeddings"))
        made["original"] = original
    if kind in _SCALINGS:
        made |= _SCALINGS[kind](k, source, original)
    elif kind != "default":
        k.problems.append(f"{source.prefix}{shown(kind)} is not supported. Supported: default, {', '.join(_SCALINGS)}")
        source.ignore(*source.values)
    source.refuse_others()
    return {"rope_scaling": {"kind": kind, **{name: value for name, value in made.items() if value is not None}} if made else None}


def _longrope(k: Keys, source: Keys, original: int | None) -> ModelOptions:
    divisors = {"short": source.need("short_factor", []), "long": source.need("long_factor", [])}
    return {"factor": _ratio(k, source, original), **divisors, "magnitude": source.get("attention_factor")}


def _yarn(k: Keys, source: Keys, original: int | None) -> ModelOptions:
    factor, one, other = _ratio(k, source, original), source.get("mscale", 0.0), source.get("mscale_all_dim", 0.0)
    grows = math.log(max(factor, 1.0)) / 10
    magnitude = source.get("attention_factor", (one * grows + 1) / (other * grows + 1) if one and other else None)
    made = {"factor": factor, "fast": source.get("beta_fast"), "slow": source.get("beta_slow"), "truncate": source.get("truncate", True)}
    source.require("max_position_embeddings", k.get("max_position_embeddings"))
    return {**made, "magnitude": magnitude, "query_growth": source.get("llama_4_scaling_beta", 0.0) or None}


def _ratio(k: Keys, source: Keys, original: int | None) -> float:
    return source.get("factor", (k.get("max_position_embeddings") or 1) / (original or 1))


def _dynamic(k: Keys, source: Keys, original: int | None) -> ModelOptions:
    longest = k.need("max_position_embeddings")
    if original not in (None, longest):
        k.problems.append(f"{source.prefix}original_max_position_embeddings: {original}, but dynamic has max_position_embeddings {longest}")
    return {"factor": source.need("factor"), "original": longest}


_SCALINGS: Mapping[str, Callable[[Keys, Keys, int | None], ModelOptions]] = {
    "linear": lambda k, source, original: {"factor": source.need("factor")},
    "llama3": lambda k, source, original: {
        "factor": source.need("factor"),
        "low": source.need("low_freq_factor"),
        "high": source.need("high_freq_factor"),
    },
    "longrope": _longrope,
    "yarn": _yarn,
    "dynamic": _dynamic,
}
"""The values of each kind of `rope_scaling`, from config.json, the mapping in it and the original length."""


def windowed(k: Keys, size: int | None, is_full: Callable[[int], bool] = lambda n: False) -> ModelOptions:
    """Layers with a window: as `layer_types` says, otherwise those that are not full by the family's rule."""
    types = k.by_layer("layer_types", lambda n: "full_attention" if is_full(n) else "sliding_attention")
    unknown = [kind for kind in types if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        k.problems.append(f"layer_types: {shown(unknown[0])} is not supported. Supported: full_attention, sliding_attention")
    full = [n for n, kind in enumerate(types) if kind == "full_attention"]
    return {} if size is None or len(full) == len(types) else {"window": size, "full_layers": full}


def period_of(number: int) -> Callable[[int], bool]:
    """Whether a layer is the last one of a period of so many."""
    return lambda n: (n + 1) % max(number, 1) == 0


def unrotated(k: Keys, size: int | None, made: ModelOptions) -> list[int]:
    """The layers without positions, of a family whose layers with a window alone have them. made: the result of `windowed`."""
    return [] if size is None else made.get("full_layers", [n for n, _ in enumerate(k.by_layer("layer_types", lambda n: ""))])


def windowed_everywhere(k: Keys, size: int | None) -> ModelOptions:
    """A window in all layers: the classes of these families do not read `layer_types`, which some files have."""
    k.ignore("layer_types")
    return {} if size is None else {"window": size, "full_layers": []}


def qwen_window(k: Keys) -> int | None:
    """The window of a Qwen: published files have one that is not used."""
    size = k.unless_absent("sliding_window", 4096)
    return size if k.get("use_sliding_window", False) else None


def attention_biases(k: Keys) -> list[str]:
    """The biases of attention's four matmuls, which a family has together or not at all."""
    return ["qkv", "out"] if k.get("attention_bias", False) else []
