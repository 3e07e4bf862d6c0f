"""Writing the adapter of a run as one of PEFT: adapter_config.json, and A and B of each module in adapter_model.safetensors.

Matrices that are one tensor in the model's family, such as q, k and v of Phi-3, are one module of PEFT. Their adapters are one of the sum
of their ranks: one A below the other, and each B in the columns and rows that are its own. That is the same function.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jgt.document import InputError

from ..models.config import ModelConfig, OwnModel
from ..weights.adapters import BASE, CONFIG, FACTOR, TENSORS
from ..weights.factors import Site
from ..weights.writing import Piece, write_folder
from .form import Form
from .model import SavedModel
from .write import EXPORTED

_MERGE = "jgt export RUN OUT --merge writes a model with all that the run has trained"


def write_adapter(form: Form, model: SavedModel, config: ModelConfig | OwnModel, folder: Path, *, dtype: str) -> int:
    """Writes the adapter of a checkpoint as a new folder. Returns the number of its tensors.

    config: the model section. Raises InputError for what PEFT cannot say, if there is something at the path or the checkpoint cannot be
    used, DiskError if it cannot be read, and OSError.
    """
    lora, kind = model.lora, EXPORTED[dtype]
    assert lora is not None
    modules = _modules(form, model)
    ranks = {module: lora.rank * len(parts) for module, parts in modules.items()}
    tensors: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    for module, parts in modules.items():
        site, rank = parts[0][1], ranks[module]
        for one in {name for _, name in site.modules()}:
            tensors[FACTOR.format(module=one, factor="A")] = kind, (rank, site.inputs)
            tensors[FACTOR.format(module=one, factor="B")] = kind, (site.width, rank)

    def pieces() -> Iterator[Piece]:
        for parts in modules.values():
            whole = [(site, *(model.whole(path) for path in model.factors[matrix])) for matrix, site in parts]
            for place, name in parts[0][1].modules():
                a, b = (np.zeros(tensors[FACTOR.format(module=name, factor=factor)][1], np.float32) for factor in "AB")
                for number, (site, of_a, of_b) in enumerate(whole):
                    own = slice(number * lora.rank, (number + 1) * lora.rank)
                    a[own], b[list(site.outputs), own] = of_a[place].T, of_b[place].T
                for factor, value in (("A", a), ("B", b)):
                    yield FACTOR.format(module=name, factor=factor), (), value.astype(kind)

    inner = {module: module.rpartition("}.")[2] for module in modules}
    wide = {inner[module]: (rank, rank // lora.rank) for module, rank in ranks.items() if rank != lora.rank}
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": getattr(config, "hf", None),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.stabilized,
        "target_modules": sorted(inner.values()),
        "rank_pattern": {module: rank for module, (rank, _) in wide.items()},
        # With as many times the rank, the same factor.
        "alpha_pattern": {module: lora.alpha * (count**0.5 if lora.stabilized else count) for module, (_, count) in wide.items()},
        "fan_in_fan_out": not form.family.are_kernels_transposed,
        "bias": "none",
        "inference_mode": True,
    }
    files: dict[str, bytes | Path] = {CONFIG: json.dumps(values, indent=2).encode() + b"\n"}
    if base := model.saved.manifest.base:
        files[BASE] = json.dumps({"sha256": base.sha256}).encode() + b"\n"
    write_folder(folder, tensors, pieces(), files=files, max_file_bytes=1 << 62, single=TENSORS)
    return len(tensors)


def _modules(form: Form, model: SavedModel) -> dict[str, list[tuple[str, Site]]]:
    """The adapted matrices of each module, by its name with {l}. Raises InputError for what an adapter of PEFT does not hold."""
    factors = {path for pair in model.factors.values() for path in pair}
    others = [path for path, (entry, _) in model.arrays.items() if path not in factors and not entry.path.startswith("frozen/")]
    problems = [f"{path}: is trained, too, and is not a part of an adapter" for path in others]
    sources, shapes = form.sources(model.shapes), model.shapes
    modules: dict[str, list[tuple[str, Site]]] = {}
    for path in model.factors:
        name = sources[path].name
        if name.count("{") > 1 or not name.endswith(".weight"):
            problems.append(f"{path}: its tensor {name} is not a linear module, which PEFT could adapt")
        modules.setdefault(name.removesuffix(".weight"), []).append((path, Site.of(sources[path], path, shapes[path])))
    if problems:
        raise InputError([f"{model.saved.folder}: {problem}. {_MERGE}" for problem in problems])
    return modules
