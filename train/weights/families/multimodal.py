"""Models that read text and images: the part that reads text, which is a model of a family on its own.

Their config.json has a mapping for each part, and their files have the tensors of all parts. The text part is read, trained and exported as
a model of its family. The others are left out: positions of text alone are those of the family, whatever sections they have for images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jgt.document import shown

from ..keys import ConfigJson, Keys, words
from .family import STACKED_EXPERTS, ModelOptions

_OTHERS = words("mm_projector multi_modal_projector vision_tower visual")
OTHER_PARTS = ("mtp.", *(f"{first}{name}." for name in _OTHERS for first in ("", "model.")))
"""The beginnings of the names of tensors of other parts."""
_SILENT = words(
    "boi_token_index eoi_token_index ignore_index image_token_id image_token_index media_placeholder_token_id mm_tokens_per_image "
    "model_type multimodal_projector_bias projector_hidden_act spatial_merge_size text_config tie_word_embeddings "
    "use_unified_vision_chunk video_placeholder video_token_id vision_config vision_end_token_id vision_feature_layer "
    "vision_start_token_id vision_token_id"
)


@dataclass(frozen=True, kw_only=True)
class TextPart:
    """The text part of one kind of model.

    families: by the `model_type` of its mapping, the first where it has none. is_flat: whether its keys may stand beside those of the other
    parts instead. defaults: what its class has where a file has no such key, and the family's class has something else. only: keys of which
    the class has one value. names: tensors that have other names than the family's, as in `families.py`.
    """

    families: Mapping[str, str]
    is_flat: bool = False
    defaults: ConfigJson = field(default_factory=ModelOptions)
    only: ConfigJson = field(default_factory=ModelOptions)
    names: Mapping[str, str] = field(default_factory=dict[str, str])

    def config(self, k: Keys) -> ModelOptions:
        """The config.json of the text part alone, from the keys of the whole. Notes problems there."""
        group = k.group("text_config")
        if self.is_flat and not group.values:
            group.values = {name: value for name, value in k.values.items() if name not in _SILENT}
        inner: ConfigJson = group.values
        kind = group.get("model_type", next(iter(self.families)))
        if kind not in self.families:
            k.problems.append(f"{group.prefix}model_type: {shown(kind)} is not supported. Supported: {', '.join(self.families)}")
        for name, value in self.only.items():
            group.require(name, value)
        # The tie is that of the whole, where it says one.
        told = {"tie_word_embeddings": k.get("tie_word_embeddings", False)} if k.values.get("tie_word_embeddings") is not None else {}
        values = {**self.defaults, **self.only, **inner, **told, "model_type": self.families.get(kind)}
        values |= {name: _of_text(values[name]) for name in ("rope_parameters", "rope_scaling") if name in values}
        k.ignore(*_SILENT, *(name for name, value in k.values.items() if inner.get(name) == value))
        k.refuse_others()
        return values


def _of_text(positions: Any) -> Any:
    """Positions without the sections in which those of images differ: a token of text has the same position in all of them."""
    if not isinstance(positions, Mapping):
        return positions
    kept = {name: value for name, value in positions.items() if name not in ("mrope_section", "mrope_interleaved")}
    return kept | {name: "default" for name in ("type", "rope_type") if kept.get(name) == "mrope"}


_QWEN2 = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80}
_QWEN3 = {"rope_theta": 5e5, "head_dim": 128}
TEXT_PARTS: Mapping[str, TextPart] = {
    "gemma3": TextPart(families={"gemma3_text": "gemma3_text"}),
    "mistral3": TextPart(families={"mistral": "mistral", "ministral3": "ministral3", "mistral4": "mistral4"}),
    "kimi_k25": TextPart(families={"deepseek_v3": "deepseek_v3", "kimi_k2": "kimi_k2"}),
    "qwen2_vl": TextPart(families={"qwen2_vl_text": "qwen2", "qwen2_vl": "qwen2"}, is_flat=True, defaults=_QWEN2),
    "qwen2_5_vl": TextPart(families={"qwen2_5_vl_text": "qwen2", "qwen2_5_vl": "qwen2"}, is_flat=True, defaults=_QWEN2),
    "qwen3_vl": TextPart(families={"qwen3_vl_text": "qwen3"}, defaults=_QWEN3),
    "qwen3_5": TextPart(families={"qwen3_5_text": "qwen3_5_text"}),
    "qwen3_5_moe": TextPart(families={"qwen3_5_moe_text": "qwen3_5_moe_text"}, names=STACKED_EXPERTS),
    "qwen3_vl_moe": TextPart(
        families={"qwen3_vl_moe_text": "qwen3_moe"},
        defaults={"rope_theta": 5e5},
        only={"norm_topk_prob": True},
        names=STACKED_EXPERTS,
    ),
}
"""By `model_type`."""
