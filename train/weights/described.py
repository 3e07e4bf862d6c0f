"""A published model's config.json, read as the keys of the `model:` section.

Every key is read by its family, or is known to say nothing about the model's function. Any other key is refused by its name: a model that
ignores one would compute something else, without a word.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from jgt.document import InputError, Node, path_problem, shown

from ..files.bucket import is_url
from ..files.cache import local_folder
from ..models.config import ModelConfig
from .families.families import FAMILIES
from .families.family import Family
from .families.latents import INDEXERS, SPARSE, dense
from .families.multimodal import OTHER_PARTS, TEXT_PARTS
from .families.unsupported import QUANT_CONFIG, quantised, quantised_by, why_unsupported
from .foreign import has_weights, inside, read_json
from .keys import MOST_LAYERS, ConfigJson, Keys, words

# The longest ones name each quantised tensor.
MOST_BYTES = 1 << 24
TOKENIZER = "tokenizer.json"
_QUANTISED = ("quantization_config", "compression_config")
_SILENT = words(
    "activation_scheme config_groups dequantize exclude_modules ignore ignored_layers kv_cache_quant_algo kv_cache_scheme "
    "modules_to_not_convert producer quant_algo quant_method scale_fmt"
)
MOST_TOKENS = 4096
"""The length of sequences where the run's file gives none."""


@dataclass(frozen=True)
class Described:
    """A published model: the folder or file that was named, what its config.json says, its family and the keys of the model section.

    config: its contents, or those of the text part. names: tensors that have other names in the folder than in files of the family. others:
    the beginnings of the names of tensors of other parts, which are left out, or with a point what is inside of them. block: the rows and
    columns of a block of a matrix in eight bits, which has one scale; (0, 0): the whole matrix; None: matrices are not in eight bits.
    is_mxfp4: whether experts are in four bits (mxfp4). unread: why tensors as config.json describes them could not be read.
    """

    path: Path
    config: ConfigJson
    family: Family
    keys: ConfigJson
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    others: tuple[str, ...] = ()
    block: tuple[int, int] | None = None
    is_mxfp4: bool = False
    unread: str | None = None

    @property
    def file(self) -> Path:
        """Its config.json."""
        return self.path if self.path.suffix == ".json" else self.path / "config.json"


def published(path: Path) -> Described:
    """The model of a folder with config.json, or of a config.json. Raises InputError with every problem."""
    if path.suffix != ".json" and (problem := path_problem(path, "folder")):
        raise InputError([f"{path}: cannot be read: {problem}. Name a folder with config.json, or the file itself"])
    file = path if path.suffix == ".json" else inside(path, "config.json")
    place = path if path.suffix == ".json" else path / "config.json"
    described = replace(described_by(read_json(file, MOST_BYTES), place), path=path)
    if described.block is None and not described.is_mxfp4 and os.path.lexists(place.parent / QUANT_CONFIG):
        told = read_json(inside(place.parent, QUANT_CONFIG), MOST_BYTES)
        block, unread = _block(told, "quantization", place.parent / QUANT_CONFIG)
        described = replace(described, block=block, unread=described.unread or unread)
    # A config.json alone says how large a model is, and how its tensors are stored does not matter.
    if described.unread is not None and path.suffix != ".json" and has_weights(path):
        raise InputError([described.unread])
    return described


def described_by(config: ConfigJson, file: Path) -> Described:
    """The model that the contents of a config.json describe. Raises InputError with every problem of the model."""
    kind = config.get("model_type")
    part = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if part is not None:
        whole = Keys(config, read=set(_QUANTISED))
        config = {**part.config(whole), **{name: config[name] for name in _QUANTISED if name in config}}
        whole.finish(file)
        kind = config["model_type"]
        config["architectures"] = [FAMILIES[kind].architecture]
    names, others = ({}, ()) if part is None else (part.names, OTHER_PARTS)
    if isinstance(kind, str) and kind in SPARSE:
        config, others = dense(kind, config), (*others, INDEXERS)
        kind = config["model_type"]
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise InputError([f"{file}: model_type: {shown(kind)}{why_unsupported(str(kind), [*FAMILIES, *TEXT_PARTS])}"])
    is_mxfp4 = quantised_by(config) == "mxfp4" and _has_known_keys(config, file)
    block, unread = _block(config, _QUANTISED[0], file) if quantised_by(config) and not is_mxfp4 else (None, None)
    # What is read has another type.
    config = {name: value for name, value in config.items() if name not in _QUANTISED}
    keys = Keys(config, read={"model_type"})
    options = family.read(keys)
    # The layers behind the last one, which predict further tokens.
    num_behind = min(int(keys.either("num_nextn_predict_layers", "num_mtp_layers", 0)), MOST_LAYERS)
    behind = [options["layers"] + n for n in range(num_behind)]
    keys.refuse_others()
    keys.finish(file)
    if options.get("kind") != "gpt":
        # A sequence of the greatest length that the model was made for is more than most devices hold.
        options["seq"] = min(options["seq"] or MOST_TOKENS, MOST_TOKENS)
    return Described(
        path=file,
        config=config,
        family=family,
        keys={name: value for name, value in options.items() if value is not None},
        names=names,
        others=(*others, *family.others, *(f"model.layers.{n}." for n in behind)),
        block=block,
        is_mxfp4=is_mxfp4,
        unread=unread,
    )


def _block(config: ConfigJson, key: str, file: Path) -> tuple[tuple[int, int] | None, str | None]:
    """The blocks of quantised tensors, of which a key says more, or why they cannot be read. Raises InputError for keys of other blocks."""
    keys = Keys(config)
    block = _in_eight_bits(keys.group(key)) if isinstance(config.get(key), Mapping) else None
    keys.finish(file)
    return block, None if block else f"{file}: {quantised(quantised_by(config) or 'modelopt')}"


def _has_known_keys(config: ConfigJson, file: Path) -> bool:
    """Whether `quantization_config` says the method alone. Raises InputError for more."""
    keys = Keys(config)
    group = keys.group(_QUANTISED[0])
    group.ignore(*_SILENT)
    group.refuse_others()
    keys.finish(file)
    return True


def _in_eight_bits(k: Keys) -> tuple[int, int] | None:
    """The rows and columns of a block, (0, 0) for a whole matrix, by the keys of `quantization_config`; None for another method.

    Notes problems there.
    """
    method, kind = k.values.get("quant_method"), k.values.get("quant_algo")
    if method != "fp8" and (method not in (None, "modelopt") or kind != "FP8"):
        return None
    block = k.get("weight_block_size", [])
    k.require("fmt", "e4m3", "float8_e4m3fn")
    k.ignore(*_SILENT)
    k.refuse_others()
    if block and not (len(block) == 2 and all(type(n) is int and 0 < n < 1 << 20 for n in block)):
        k.problems.append(f"{k.prefix}weight_block_size: {shown(block)} is not the rows and the columns of a block")
    return tuple(block) if len(block) == 2 else (0, 0)


def with_published(root: Node) -> Node:
    """A run's document whose model section also has what the config.json of `model.hf` says.

    The tokenizer is that of the folder, unless the document names another. Raises InputError, also for a key of the section that says
    something else than config.json; only `seq` may.
    """
    model, name = root.find("model"), root.find("model.hf").value
    is_resolved = ModelConfig.__dataclass_fields__.keys() <= model.children.keys()
    if root.find("model.hf").key != "model.hf" or not isinstance(name, str) or is_resolved:
        # The config.yaml of a run has every key, wherever the folder is now.
        return root
    try:
        described = published(local_folder(name, weights=False))
    except InputError as error:
        raise InputError([root.find("model.hf").problem(problem) for problem in error.problems]) from None
    file = described.file
    both = [(child, described.keys[key]) for key, child in model.children.items() if key in described.keys and key != "seq"]
    different = [child.problem(f"{file} says {shown(value)}. Leave the key out") for child, value in both if child.plain() != value]
    if different:
        raise InputError(different)
    theirs = Node.of(dict(described.keys), f"{file}:1", "model")
    root = replace(root, value={**root.children, "model": replace(model, value={**theirs.children, **model.children})})
    data, tokenizer = root.find("data"), described.path / TOKENIZER
    data = data if data.key == "data" else Node({}, f"{file}:1", "data")
    if "tokenizer" not in data.children and os.path.lexists(tokenizer):
        inside(described.path, TOKENIZER)
        # Not the copy of one at a URL, which another machine has elsewhere.
        place = f"{name.rstrip('/')}/{TOKENIZER}" if is_url(name) else str(tokenizer)
        own = {"tokenizer": Node(place, f"{file}:1", "data.tokenizer")}
        root = replace(root, value={**root.children, "data": replace(data, value={**data.children, **own})})
    return root
