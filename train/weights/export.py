"""A run's model as a folder of Hugging Face, which transformers loads: config.json, tensors and the tokenizer's files.

A run that began from a published model gets that model's config.json and files. The model of another run is written as a Llama: its
config.json is read again, as for a published model, and the model that it describes has to be the run's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jgt import path_text
from jgt.document import InputError, Node, bind

from ..models.config import ModelConfig
from .described import Described, described_by, published
from .families import words
from .names import Shape, Source, each_name, sources_of
from .writing import write_folder

EXPORTED: Mapping[str, np.dtype[Any]] = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}
_OTHER_FILES = words(
    "generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json tokenizer.model vocab.json merges.txt "
    "added_tokens.json chat_template.jinja"
)


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    """A tensor of the folder, and the parts of it that are parameters: path, place in the stack, source."""

    shape: Shape
    parts: list[tuple[str, tuple[int, ...], Source]]


def export_params(params: Any, config: ModelConfig, folder: Path, *, dtype: str, max_file_bytes: int) -> int:
    """Writes the parameters, nested dicts of arrays, as a new folder. Returns the number of its tensors.

    Raises InputError if the model is no model of a known family, or if there is something at the path; and OSError.
    """
    described = _as_llama(config) if config.hf is None else published(Path(config.hf))
    flat = {path_text(path): x for path, x in jax.tree.leaves_with_path(params)}
    shapes: dict[str, Shape] = {path: tuple(x.shape) for path, x in flat.items()}
    sources = sources_of(described.family, shapes, (config.heads, config.num_kv_heads))
    tensors: dict[str, _Tensor] = {}
    for path, source in sources.items():
        for place, name in zip(np.ndindex(*shapes[path][: source.num_stacked]), each_name(source, shapes[path]), strict=True):
            tensors.setdefault(name, _Tensor(shape=source.tensor_shape(shapes[path]), parts=[])).parts.append((path, place, source))
    kind = EXPORTED[dtype]

    def arrays() -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        for name, tensor in tensors.items():
            yield name, _filled(tensor, flat, kind)

    # Files of transformers 5 have the key `dtype` for it.
    values = {name: value for name, value in described.config.items() if name != "dtype"}
    text = json.dumps({**values, "torch_dtype": {"f32": "float32", "bf16": "bfloat16"}[dtype]}, indent=2)
    files: dict[str, bytes | Path] = {"config.json": text.encode() + b"\n"}
    if config.hf is not None and described.path.is_dir():
        files |= {name: file for name in _OTHER_FILES if (file := described.path / name).is_file()}
    write_folder(folder, {name: (kind, t.shape) for name, t in tensors.items()}, arrays(), files=files, max_file_bytes=max_file_bytes)
    return len(tensors)


def _filled(tensor: _Tensor, params: Mapping[str, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    made = np.empty(tensor.shape, dtype)
    for path, place, source in tensor.parts:
        value = np.asarray(params[path][place] if place else params[path])
        # Outputs are the last dim of the parameter.
        (made.T if source.is_transposed else made)[..., np.asarray(source.outputs)] = value
    return made


def _as_llama(config: ModelConfig) -> Described:
    """A model that began from nothing, described as a Llama."""
    values = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": config.layers,
        "hidden_size": config.embed,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.ffn_size,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.seq,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied,
        "hidden_act": config.activation,
    }
    described = described_by(values, Path("config.json"))
    again: ModelConfig | None = bind(Node.of(dict(described.keys), "config.json"), ModelConfig, [])
    assert again is not None
    # Defaults that config.json states explicitly.
    ours = replace(config, kv_heads=config.num_kv_heads, head_dim=config.head_size, ffn=config.ffn_size)
    silent = ("dtype", "fp8", "attention", "hf", "kind")
    different = [name for name in vars(ours) if name not in silent and getattr(ours, name) != getattr(again, name)]
    if different:
        raise InputError([f"model.{name}: a config.json of Llama cannot say this, so the model cannot be exported" for name in different])
    return described
