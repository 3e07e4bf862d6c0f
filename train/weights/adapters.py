"""Adapters of Hugging Face's PEFT: a folder with adapter_config.json, and in adapter_model.safetensors two factors for each adapted module.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight    [rank, in]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight    [out, rank]

The `lora:` section has one rank and one factor for all matrices of a stack of layers. An adapter whose modules differ is still read as the
same function: a smaller rank has zeros behind it, another factor is in B, and layers without the module have zeros (`factors.py`). What
changes the function in any other way is refused by its key or tensor. Imports no numpy, so that an adapter is checked as early as a run's
file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jgt.document import InputError, Node, path_problem, shown

from ..files.cache import local_folder
from .adapt.config import LoraConfig
from .described import MOST_BYTES, published
from .families.family import LLAMA, Family
from .foreign import first, inside, problems_at, read_json, read_shapes
from .keys import ConfigJson, Keys, words

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
FACTOR = "base_model.model.{module}.lora_{factor}.weight"
BASE = "jgt_base.json"
"""A file that jgt writes beside the two: the identity of the weights that the adapter was trained on."""
_Shape = tuple[int, ...]
_NAME = re.compile(r"base_model\.model\.([\w.]+)\.lora_([AB])\.weight")
# Keys without effect on the function of an adapter with given factors. The tensors say which modules have some.
_SILENT = words(
    "auto_mapping base_model_name_or_path corda_config eva_config exclude_modules fan_in_fan_out inference_mode "
    "layers_pattern layers_to_transform loftq_config lora_ga_config megatron_core peft_type peft_version qalora_group_size revision "
    "target_modules task_type"
)
_UNCHANGED = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights with which the weights of the model stay what they are."""


@dataclass(frozen=True, kw_only=True)
class Peft:
    """An adapter of PEFT. modules: the rank and the factor of each, by its name in the model. shapes: of its tensors."""

    path: Path
    rank: int
    alpha: float
    stabilized: bool
    dropout: float
    modules: Mapping[str, tuple[int, float]]
    shapes: Mapping[str, _Shape]

    @property
    def file(self) -> Path:
        """The file of the tensors."""
        return self.path / TENSORS

    def section(self, family: Family) -> dict[str, Any]:
        """The keys of the `lora:` section that the adapter means. Raises InputError with every module that jgt does not have."""
        ours: dict[str, list[str]] = {}
        for module, tensor in {**LLAMA, **family.names}.items():
            ours.setdefault(tensor, []).append(module)
        layer = re.compile(re.escape(family.layer).replace(r"\{l\}", r"\d+"))
        inner = {module: layer.sub("", module, count=1) for module in self.modules}
        if unknown := [module for module, name in inner.items() if name not in ours]:
            why = "is not a module of the model that jgt can adapt. Known are"
            raise InputError(first(f"{self.file}: {module}: {why} {', '.join(sorted(ours))}" for module in unknown))
        modules = dict.fromkeys(one for name in inner.values() for one in ours[name])
        of_all = {"rank": self.rank, "alpha": self.alpha, "stabilized": self.stabilized, "dropout": self.dropout}
        return {**of_all, "modules": list(modules)}


def read_peft(path: Path) -> Peft:
    """The adapter in a folder, whose tensors are not read. Raises InputError with everything that is wrong with it."""
    if problem := path_problem(path, "folder"):
        raise InputError([f"{path}: cannot be read: {problem}. Name a folder with {CONFIG} and {TENSORS}"])
    problems: list[str] = []
    config: ConfigJson = {}
    shapes: Mapping[str, _Shape] = {}
    with InputError.collect(problems):
        config = read_json(inside(path, CONFIG), MOST_BYTES)
    with InputError.collect(problems), problems_at(path / TENSORS):
        shapes = read_shapes(inside(path, TENSORS))
    if problems:
        raise InputError(problems)
    keys = Keys(config)
    keys.require("peft_type", "LORA")
    rank, alpha, stabilized = keys.get("r", 8), keys.get("lora_alpha", 8), keys.get("use_rslora", False)
    ranks, alphas, dropout = keys.group("rank_pattern"), keys.group("alpha_pattern"), keys.get("lora_dropout", 0.0)
    keys.require("bias", "none")
    if config.get("init_lora_weights", True) not in _UNCHANGED:
        keys.problems.append(f"init_lora_weights: {shown(config['init_lora_weights'])} may change the weights of the model itself")
    for name, value in config.items():
        if name not in keys.read | _SILENT | {"init_lora_weights"} and value not in (None, False, {}, []):
            keys.problems.append(f"{name}: {shown(value)}: jgt's adapters do not have this, so the model would be another one")
    for group in (ranks, alphas):
        odd = [name for name in group.values if not re.fullmatch(r"[\w.]+", name)]
        keys.problems += [f"{group.prefix}{shown(name)} is a pattern. Supported are names, such as self_attn.q_proj" for name in odd]
    wrong = [f"{path / TENSORS}: {problem}" for problem in _problems(shapes)]
    modules: dict[str, tuple[int, float]] = {}
    for module in dict.fromkeys(match[1] for name in shapes if (match := _NAME.fullmatch(name))):
        r, a = _of(ranks, module, rank), _of(alphas, module, alpha)
        found = (shapes.get(FACTOR.format(module=module, factor="A")) or (r,))[0]
        if found != r:
            wrong.append(f"{path / TENSORS}: {module}: the rank of its tensors is {found}, but {CONFIG} says {r}")
        modules[module] = r, a / (r**0.5 if stabilized else r)
    if problems := [*(f"{path / CONFIG}: {problem}" for problem in dict.fromkeys(keys.problems)), *first(wrong)]:
        raise InputError(problems)
    most = max(r for r, _ in modules.values())
    return Peft(path=path, rank=int(most), alpha=alpha, stabilized=stabilized, dropout=dropout, modules=modules, shapes=shapes)


def common_section(adapters: Mapping[str, Path], model: Path, problems: list[str]) -> dict[str, Any]:
    """The keys of a `lora:` section for several adapters of a model: the largest rank, and the modules of all.

    The scale is 1, so that the program of an adapter does not depend on its own scale, nor on the other adapters. Adds what is wrong with
    any of them to `problems`. Raises InputError if none can be read.
    """
    family, sections = published(model).family, list[dict[str, Any]]()
    for path in adapters.values():
        with InputError.collect(problems):
            sections.append(read_peft(path).section(family))
    if not sections:
        raise InputError(problems)
    modules = dict.fromkeys(module for section in sections for module in section["modules"])
    rank = max(section["rank"] for section in sections)
    return {"rank": rank, "alpha": rank, "modules": [*modules]}


def with_adapter(root: Node) -> Node:
    """A run's document whose lora section also has what the folder `lora.hf` says.

    Raises InputError, also for a key of the section that says something else; only `dropout` may.
    """
    lora, place = root.find("lora"), root.find("lora.hf")
    is_resolved = isinstance(lora.value, dict) and LoraConfig.__dataclass_fields__.keys() <= lora.children.keys()
    if place.key != "lora.hf" or not isinstance(place.value, str) or is_resolved:
        return root
    model = root.find("model.hf")
    if model.key != "model.hf" or not isinstance(model.value, str):
        raise InputError([place.problem("is an adapter of a published model. Name the model's folder: model.hf")])
    try:
        peft = read_peft(local_folder(place.value, CONFIG))
    except InputError as error:
        raise InputError([place.problem(problem) for problem in error.problems]) from None
    keys = peft.section(published(local_folder(model.value, weights=False)).family)
    both = [(child, keys[key]) for key, child in lora.children.items() if key in keys and key != "dropout"]
    different = [child.problem(f"{peft.path} says {shown(value)}. Leave the key out") for child, value in both if child.plain() != value]
    if different:
        raise InputError(different)
    theirs = Node.of(keys, f"{peft.path / CONFIG}:1", "lora")
    return replace(root, value={**root.children, "lora": replace(lora, value={**theirs.children, **lora.children})})


def _problems(shapes: Mapping[str, _Shape]) -> Iterator[str]:
    """Names and shapes that no adapter of PEFT has."""
    if not shapes:
        yield "has no tensors"
    for name, shape in shapes.items():
        match = _NAME.fullmatch(name)
        if match is None:
            example = FACTOR.format(module="model.layers.0.self_attn.q_proj", factor="A")
            yield f"{shown(name)}: is not a factor of a module, such as {example}"
            continue
        other = FACTOR.format(module=match[1], factor="BA"["AB".index(match[2])])
        if len(shape) != 2 or not all(shape):
            yield f"{name}: has the shape {list(shape)}, but a factor is a matrix"
        elif other not in shapes:
            yield f"{name}: {other} is missing"
        elif match[2] == "A" and len(shapes[other]) == 2 and shapes[other][1] != shape[0]:
            yield f"{name}: has {shape[0]} rows, but {other} {shapes[other][1]} columns. Both are the rank"


def _of(group: Keys, module: str, default: Any) -> Any:
    """The value of a module in a mapping by the ends of names."""
    name = next((name for name in group.values if f".{module}".endswith(f".{name}")), None)
    return default if name is None else group.get(name, default)
