"""A user's own data: a function that returns samples, which are dicts of arrays.

    def digits(split: str):                          # called once with "train" and once with "eval"
        images, labels = ...
        return [{"image": image, "label": label} for image, label in zip(images, labels)]

The samples are anything with a length and an index, a Grain MapDataset too, or a dict of arrays with a row for each sample. Random access
is what keeps a run's promises: sample i of the order is the same on every number of processes, and a run resumes from the number of samples
alone. A function without the argument `split`
returns the training samples, or a pair with the held-out ones.

All samples have the same arrays. Batches stack them, and rules under `inputs:` lay them out by name.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np

from jgt.document import InputError

from ..code.files import Code
from ..code.names import FAILURES, call_with, described, load_object
from ..command_line import EndError
from .config import OwnData

_MOST_HASHED = 16
_Answer = TypeVar("_Answer")
_REMEDY = "Return samples with a length and an index, such as a list of dicts, a dict of arrays or a MapDataset (docs/own.md, Streams)"
_EQUAL = "All samples have the same arrays"


class SampleError(EndError):
    """The user's own code has failed to give a sample. The message says which one, and where."""


@dataclass(frozen=True, kw_only=True)
class OwnSource:
    """Opened samples. element: the arrays of one sample. fingerprint: see `train.data.batches.Data`."""

    train: _Samples
    held_out: _Samples | None
    element: Mapping[str, jax.ShapeDtypeStruct]
    fingerprint: dict[str, str | int]

    def stack(self, samples: Sequence[Any]) -> dict[str, np.ndarray]:
        """The batch of some samples."""
        return {name: np.stack([sample[name] for sample in samples]) for name in self.element}


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
    try:
        samples, held = _Samples(train, here), None if held_out is None else _Samples(held_out, f"{here} (eval)")
        if not len(samples):
            raise InputError([f"{here}: has no samples"])
        samples.element = element = _element(samples[0], here)
        fingerprint: dict[str, str | int] = {"source": config.source, "train_samples": len(samples), "sha256": _hash(samples)}
        if held:
            held.element = element
            fingerprint |= {"eval_samples": len(held), "eval_sha256": _hash(held)}
    except SampleError as error:
        raise InputError([str(error)]) from error
    return OwnSource(train=samples, held_out=held or None, element=element, fingerprint=fingerprint)


class _Samples:
    """Samples of the user's, as arrays of one type each. element: their arrays, once the first sample has shown them.

    A sample that cannot be had raises SampleError, and one with other arrays InputError.
    """

    element: Mapping[str, jax.ShapeDtypeStruct] | None = None

    def __init__(self, made: Any, where: str):
        if isinstance(made, str) or not (hasattr(made, "__len__") and hasattr(made, "__getitem__")):
            raise InputError([f"{where}: returned {_named(made)}. {_REMEDY}"])
        self._made, self._where = _Columns(made) if isinstance(made, Mapping) else made, where
        self._length = self._asked("len()", lambda: len(self._made))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        what = f"sample {index}"
        sample = self._asked(what, lambda: self._made[index])
        if self.element is None:
            return sample
        if not isinstance(sample, Mapping) or set(sample) != set(self.element):
            names = sorted(sample) if isinstance(sample, Mapping) else _named(sample)
            raise InputError([f"{self._where}: {what} has {names}, and the first one has {sorted(self.element)}. {_EQUAL}"])
        return {name: self._array(f"{what}: {name}", sample[name], x) for name, x in self.element.items()}

    def _array(self, what: str, value: Any, wanted: jax.ShapeDtypeStruct) -> np.ndarray:
        array = self._asked(what, lambda: np.asarray(value))
        if array.shape != wanted.shape or not np.can_cast(array.dtype, wanted.dtype, "same_kind"):
            shown, first = f"{array.dtype}{list(array.shape)}", f"{wanted.dtype}{list(wanted.shape)}"
            raise InputError([f"{self._where}: {what} is {shown}, and {first} in the first one. {_EQUAL}"])
        return array.astype(wanted.dtype)

    def _asked(self, what: str, ask: Callable[[], _Answer]) -> _Answer:
        try:
            return ask()
        except FAILURES as error:
            raise SampleError(f"{self._where}: {what} failed: {described(error)}") from error


@dataclass(frozen=True)
class _Columns:
    """Samples as arrays whose first dim is the sample."""

    arrays: Mapping[str, Any]

    def __len__(self) -> int:
        counts = {name: len(x) for name, x in self.arrays.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"the arrays have different numbers of samples: {counts}")
        return min(counts.values(), default=0)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: x[index] for name, x in self.arrays.items()}


def _element(first: Any, where: str) -> Mapping[str, jax.ShapeDtypeStruct]:
    """The arrays of the first sample. Raises InputError."""
    if not isinstance(first, Mapping) or not first or not all(isinstance(name, str) for name in first):
        raise InputError([f"{where}: sample 0 is {_named(first)}. A sample is a dict of arrays by name, such as {{'x': x, 'y': y}}"])
    arrays = {name: np.asarray(x) for name, x in first.items()}
    if others := [name for name, x in arrays.items() if x.dtype.kind not in "biufV"]:
        raise InputError([f"{where}: sample 0: {name} is {_named(first[name])}, not an array of numbers" for name in others])
    # Devices have 32 bits unless JAX is configured otherwise.
    return {name: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for name, x in arrays.items()}


def _named(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _hash(samples: _Samples) -> str:
    """A checksum of some samples, evenly spread."""
    digest, count = hashlib.sha256(), len(samples)
    for index in sorted({i * (count - 1) // (_MOST_HASHED - 1) for i in range(_MOST_HASHED)}):
        for name, x in sorted(samples[index].items()):
            digest.update(f"{name}{np.shape(x)}".encode() + np.ascontiguousarray(x).tobytes())
    return digest.hexdigest()
