"""The form of an export: config.json, the names of the tensors, and further files.

A run that began from a published model gets that model's config.json and files. The model of another run is written as one of the family
that has its options. A model of the user's own says what its config.json is, and which tensors its parameters are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from jgt.document import InputError, shown

from ..config import Run
from ..files.cache import local_folder
from ..models.config import ModelConfig
from ..settings.code.names import load_object
from ..weights.described import Described, published
from ..weights.describing import config_values, described_as_family, differences
from ..weights.families.families import Family
from ..weights.names import Shape, Source, Structure, sources_of
from ..weights.origin import DESCRIPTION, ORIGIN, check_kept, origin_files

_OWN = "hugging_face"


@dataclass(frozen=True, kw_only=True)
class Form:
    """The form in which a model is exported: its config.json, the names of its tensors, and other files to copy."""

    config: Mapping[str, object]
    family: Family
    files: Mapping[str, Path] = field(default_factory=dict[str, Path])
    structure: Structure = field(default_factory=Structure)

    def sources(self, shapes: Mapping[str, Shape]) -> dict[str, Source]:
        """The sources of parameters of these shapes, by path. Raises InputError with every parameter that has none."""
        return sources_of(self.family, shapes, self.structure)


def run_form(run: Run, folder: Path, shapes: Mapping[str, Shape]) -> Form:
    """The form of a run's model. folder: the run directory. shapes: the shapes of its parameters, by path. Raises InputError."""
    config = run.config.model
    if isinstance(config, ModelConfig):
        form = form_of(config, folder, getattr(run.config.data, "tokenizer_name", None), run.where)
    else:
        model = load_object(config.kind, "model.kind", run.code, run.where("model.kind"))
        keys = {**config.arguments, "vocab": config.vocab, "seq": config.seq, "dtype": config.dtype}
        form = own_form(model, keys, shapes, config.kind, run.where)
    form.sources(shapes)
    return form


def form_of(config: ModelConfig, run_folder: Path, tokenizer: str | None, where: Callable[[str], str]) -> Form:
    """The form of a decoder. Raises InputError with every key that no config.json can say."""
    kept = run_folder / ORIGIN
    check_kept(kept)
    if config.hf is None:
        described = described_as_family(config, where)
        files = origin_files(kept) if kept.is_dir() else origin_files(None, tokenizer)
    else:
        # Runs of earlier versions have no copy.
        place = kept if (kept / DESCRIPTION).is_file() else local_folder(config.hf, weights=False)
        described = published(place)
        _check_same(config, described, where)
        files = origin_files(place, None if place == kept else tokenizer)
    # Files of transformers 5 have the key `dtype` for what older ones call `torch_dtype`.
    values = {name: value for name, value in described.config.items() if name != "dtype"}
    files = {name: file for name, file in files.items() if name != DESCRIPTION}
    return Form(config=values, family=described.family, files=files, structure=Structure.of(config))


def own_form(model: object, keys: Mapping[str, object], shapes: Mapping[str, Shape], name: str, where: Callable[[str], str]) -> Form:
    """The form of a model of the user's own, as its `hugging_face` says it: a function of the keys of `model:`.

    It returns the contents of config.json, and the tensor of each parameter. name: the name of the model in the config. Raises InputError.
    """
    place, function = f"{where('model.kind')}: model.kind: {name}", getattr(model, _OWN, None)
    example = "with the contents of config.json and a dict from parameters to tensors (docs/weights.md)"
    if not callable(function):
        raise InputError([f"{place} cannot be exported: it does not say its tensors. Give it a static method {_OWN}(keys) {example}"])
    try:
        values, names = cast(Any, function(dict(keys)))
        text, names = json.dumps(values), {str(path): str(tensor) for path, tensor in names.items()}
    except Exception as error:
        raise InputError([f"{place}: {_OWN} must return a pair {example}: {type(error).__name__}: {error}"]) from error
    scalars = [path for path, shape in shapes.items() if path in names and len(shape) <= names[path].count("{")]
    problems = [f"{_OWN} has no tensor for the parameter {path} {list(shapes[path])}" for path in shapes.keys() - names.keys()]
    problems += [f"{_OWN} names {path}, which is not a parameter of the model" for path in names.keys() - shapes.keys()]
    problems += [f"{path} {list(shapes[path])} has no dim beside those that its tensor's name counts" for path in scalars]
    if problems:
        raise InputError([f"{place}: {problem}" for problem in sorted(problems)])
    return Form(config=json.loads(text), family=Family(options=lambda _: {}, names=names, layer=""))


def _check_same(config: ModelConfig, described: Described, where: Callable[[str], str]) -> None:
    """A run's keys may have been changed after it began."""
    has, file = config_values(replace(config, hf=None)), described.path / DESCRIPTION if described.path.is_dir() else described.path
    problems = [
        f"{where(f'model.{key}')}: model.{key}: {shown(has.get(key))}: {file} says {shown(value)}, so the model cannot be exported with it"
        for key, value in differences(config, described).items()
    ]
    if problems:
        raise InputError(problems)
