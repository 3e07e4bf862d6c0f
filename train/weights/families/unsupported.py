"""Why a published model cannot be read: an architecture that jgt's decoders have not, or tensors that are quantised.

The names of architectures are close to each other: a suggestion of the nearest one would be an invitation to compute another model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from jgt.document import nearest, shown

from ..keys import ConfigJson

QUANT_CONFIG = "hf_quant_config.json"
"""The file by which modelopt says how the tensors of a folder are quantised, also where config.json says nothing."""
UNQUANTISED = "the model that they were made from: `model.base_dtype: nf4` quantises its matrices here"
"""The remedy for files that are quantised."""
LACKING: Mapping[str, str] = {
    "chunked attention, and experts whose input is scaled": "llama4 llama4_text",
    "experts with a router of their own, with dense layers or shared experts": "bailing_moe dbrx ernie4_5_moe flex_olmo granitemoe "
    "granitemoeshared hunyuan_v1_moe phimoe solar_open step3p5 step3p7",
    "images, audio or other inputs": "llava mllama phi4mm pixtral smolvlm",
    "layers of several sizes, or embeddings in each layer": "gemma3n gemma3n_text gemma4 gemma4_text mimo_v2_flash nemotron-nas",
    "linear attention with another recurrence, or beside other norms": "kimi_linear minimax olmo_hybrid",
    "multi-head latent attention beside other parts of its own": "longcat_flash minicpm3 youtu",
    "multi-token prediction": "mimo",
    "norms without parameters": "olmo",
    "sparse or compressed attention, or hyper-connections": "deepseek_ref deepseek_v4 kimi_k3 minimax_m3",
    "state-space or convolution layers": "bamba falcon_h1 falcon_mamba granitemoehybrid jamba lfm2 lfm2_moe mamba mamba2 nemotron_h zamba2",
    "tokens that see the ones after them": "bert deberta_v2 distilbert modernbert roberta t5 xlm_roberta",
}
"""The values of `model_type` by the part of their architecture that jgt does not have."""


def why_unsupported(kind: str, families: Iterable[str]) -> str:
    """The rest of a message about a `model_type` that none of the families has."""
    known = list(families)
    allowed = f"Supported: {', '.join(known)}"
    if lacking := [what for what, kinds in LACKING.items() if kind in kinds.split()]:
        return f" is an architecture that jgt does not have: {lacking[0]}. {allowed}"
    # The digits tell one generation from another, the first letter one laboratory, and what is longer than a slip is another architecture.
    close = [name for name in known if (name[0], _digits(name)) == (kind[:1], _digits(kind)) and abs(len(name) - len(kind)) < 2]
    return f" is not known. {f'{nearest(kind, close, lists=False)} '.lstrip()}{allowed}"


def _digits(text: str) -> str:
    return re.sub(r"\D", "", text)


def quantised_by(config: ConfigJson) -> str | None:
    """The method by which the tensors of a config.json are quantised; None if they are not."""
    told = config.get("quantization_config") or config.get("compression_config")
    if not told:
        return None
    names = [told.get(key) for key in ("quant_method", "quant_algo", "quant_type", "format")] if isinstance(told, Mapping) else []
    return ", ".join(dict.fromkeys(name for name in names if isinstance(name, str))) or shown(told)


def quantised(method: str) -> str:
    """A message about files whose tensors are quantised."""
    return f"the tensors are quantised ({method}). Take {UNQUANTISED}"
