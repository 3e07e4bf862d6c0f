"""A user's own data: a function that returns samples, which are dicts of arrays.

    def digits(split: str):                          # called once with "train" and once with "eval"
        images, labels = ...
        return [{"image": image, "label": label} for image, label in zip(images, labels)]

The samples are anything with a length and an index, a Grain MapDataset too. Random access is what keeps a run's promises: sample i of the
order is the same on every number of processes, and a run resumes from the number of samples alone. A function without the argument `split`
returns the training samples, or a pair with the held-out ones.

All samples have the same arrays. Batches stack them, and rules under `inputs:` lay them out by name.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grain
import jax
import numpy as np

from jgt.document import InputError

from ..code.files import Code
from ..code.names import call_with, load_object
from .config import OwnData

_MOST_HASHED = 16


@dataclass(frozen=True, kw_only=True)
class OwnSource:
    """Opened samples. element: the arrays of one sample. fingerprint: see `train.data.batches.Data`. where: the line of the data's key."""

    train: grain.MapDataset
    held_out: grain.MapDataset | None
    element: Mapping[str, jax.ShapeDtypeStruct]
    fingerprint: dict[str, str | int]
    where: str

    def stack(self, samples: Sequence[Any]) -> dict[str, np.ndarray]:
        """The batch of some samples. Raises InputError for a sample with other arrays than the first one."""
        for sample in samples:
            if problem := _difference(self.element, sample):
                raise InputError([f"{self.where}: {problem}"])
        return {name: np.stack([np.asarray(sample[name]) for sample in samples]).astype(x.dtype) for name, x in self.element.items()}


def open_own(config: OwnData, code: Code, where: Callable[[str], str], *, seq: int, vocab: int) -> OwnSource:
    """Calls the function and looks at some samples. where(key): file and line of a key of the config. Raises InputError."""
    function = load_object(config.source, "data.source", code, where("data.source"))

    def place(key: str) -> str:
        return f"{where(f'data.{key}')}: data.{key}"

    def call(**more: Any) -> Any:
        return call_with(function, config.arguments, {"seq": seq, "vocab": vocab, **more}, lambda key: place(key or "source"))

    if "split" in inspect.signature(function).parameters:
        train, held_out = call(split="train"), call(split="eval")
    else:
        made = call()
        train, held_out = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    here = f"{place('source')}: {config.source}"
    samples, element = _samples(train, here)
    held, _ = (None, None) if held_out is None or not len(held_out) else _samples(held_out, f"{here} (eval)")
    fingerprint: dict[str, str | int] = {"source": config.source, "train_samples": len(samples), "sha256": _hash(samples)}
    if held is not None:
        fingerprint |= {"eval_samples": len(held), "eval_sha256": _hash(held)}
    return OwnSource(train=samples, held_out=held, element=element, fingerprint=fingerprint, where=here)


def _samples(made: Any, where: str) -> tuple[grain.MapDataset, Mapping[str, jax.ShapeDtypeStruct]]:
    if isinstance(made, grain.IterDataset):
        raise InputError([f"{where}: returned an IterDataset, which has no random access. Return the MapDataset before to_iter_dataset"])
    if not (hasattr(made, "__len__") and hasattr(made, "__getitem__")) or isinstance(made, str | Mapping):
        raise InputError([f"{where}: returned a value of type {type(made).__name__}. Return samples with a length and an index"])
    if not len(made):
        raise InputError([f"{where}: has no samples"])
    first = made[0]
    if not isinstance(first, Mapping) or not first or not all(isinstance(name, str) for name in first):
        raise InputError([f"{where}: sample 0 is of type {type(first).__name__}. A sample is a dict of arrays by name"])
    arrays = {name: np.asarray(x) for name, x in first.items()}
    problems = [f"{where}: sample 0: {name} is not an array of numbers" for name, x in arrays.items() if x.dtype.kind not in "biufV"]
    if problems:
        raise InputError(problems)
    # Devices have 32 bits unless JAX is configured otherwise.
    element = {name: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for name, x in arrays.items()}
    return made if isinstance(made, grain.MapDataset) else grain.MapDataset.source(made), element


def _difference(element: Mapping[str, jax.ShapeDtypeStruct], sample: Any) -> str | None:
    if not isinstance(sample, Mapping) or set(sample) != set(element):
        names = sorted(sample) if isinstance(sample, Mapping) else type(sample).__name__
        return f"a sample has {names}, and the first one {sorted(element)}"
    for name, x in element.items():
        if (shape := np.shape(sample[name])) != x.shape:
            return f"{name} has the shape {list(shape)} in a sample, and {list(x.shape)} in the first one"
    return None


def _hash(samples: grain.MapDataset) -> str:
    """A checksum of some samples, evenly spread."""
    digest, count = hashlib.sha256(), len(samples)
    for index in sorted({i * (count - 1) // (_MOST_HASHED - 1) for i in range(_MOST_HASHED)}):
        sample: Mapping[str, Any] = samples[index] or {}
        for name, x in sorted(sample.items()):
            digest.update(f"{name}{np.shape(x)}".encode() + np.ascontiguousarray(x).tobytes())
    return digest.hexdigest()
