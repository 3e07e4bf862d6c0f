"""Samples of the user's own: what is a sample, and those that have an index.

A sample is a dict of arrays, and all samples have the same arrays as the first one. Batches stack them, and rules under `inputs:` lay them
out by name. A sample that cannot be had raises SampleError, and one with other arrays InputError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np

from jgt.document import InputError

from ...files.ends import EndError
from ...settings.code.names import FAILURES, described

SampleShapes = Mapping[str, jax.ShapeDtypeStruct]
"""The arrays of a sample."""
Sample = dict[str, np.ndarray]
END = object()
"""Stands for the end of a stream."""
_Answer = TypeVar("_Answer")
_EQUAL = "All samples have the same arrays"
_MOST_HELD_OUT = 1 << 30
"""The bytes that held-out samples of a stream may have."""


class SampleError(EndError):
    """The user's own code has failed to give a sample. The message says which one, and where."""


class IndexedSamples:
    """Samples of the user's with an index, as arrays of one type each. element: their arrays, once the first sample has shown them."""

    def __init__(self, made: Any, where: str):
        self.element: SampleShapes = {}
        self._made, self._where = _Columns(made) if isinstance(made, Mapping) else made, where
        self._length = asked(where, "len()", lambda: len(self._made))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        what = f"sample {index}"
        sample = asked(self._where, what, lambda: self._made[index])
        return checked(sample, self.element, self._where, what) if self.element else sample


def held_out_samples(made: Iterable[object], element: SampleShapes, where: str) -> IndexedSamples:
    """The samples of a stream that ends, in memory: each evaluation reads them."""
    samples, size, iterator = list[Sample](), 0, iter(made)
    while (sample := asked(where, f"sample {len(samples)}", lambda: next(iterator, END))) is not END:
        samples.append(checked(sample, element, where, f"sample {len(samples)}"))
        size += sum(x.nbytes for x in samples[-1].values())
        if size > _MOST_HELD_OUT:
            most = f"have more than {_MOST_HELD_OUT:,} bytes, and a stream of them is kept in memory"
            raise InputError([f"{where}: the held-out samples {most}. Hold out fewer, or return samples with an index"])
    return IndexedSamples(samples, where)


def checked(sample: object, element: SampleShapes, where: str, what: str) -> Sample:
    """A sample as arrays of the types of the first one."""
    if not isinstance(sample, Mapping) or set(sample) != set(element):
        names = sorted(sample) if isinstance(sample, Mapping) else named(sample)
        raise InputError([f"{where}: {what} has {names}, and the first one has {sorted(element)}. {_EQUAL}"])
    return {name: _array(where, f"{what}: {name}", sample[name], x) for name, x in element.items()}


def _array(where: str, what: str, value: object, wanted: jax.ShapeDtypeStruct) -> np.ndarray:
    array = asked(where, what, lambda: np.asarray(value))
    if array.shape != wanted.shape or not np.can_cast(array.dtype, wanted.dtype, "same_kind"):
        shown, first = f"{array.dtype}{list(array.shape)}", f"{wanted.dtype}{list(wanted.shape)}"
        raise InputError([f"{where}: {what} is {shown}, and {first} in the first one. {_EQUAL}"])
    with np.errstate(over="ignore"):
        cast = array.astype(wanted.dtype)
    lost = np.zeros(array.shape, bool)
    if wanted.dtype.kind in "iu":
        lost = cast != array
    elif array.dtype.kind == "f":
        lost = np.isfinite(array) & ~np.isfinite(cast)
    if lost.any():
        why = "the type of the first one; devices have at most 32 bits. Write smaller numbers, or a wider type in the first one"
        raise InputError([f"{where}: {what} has {array[lost][0]}, which does not fit in {wanted.dtype}, {why}"])
    return cast


def asked(where: str, what: str, ask: Callable[[], _Answer]) -> _Answer:
    """Returns what the user's own code answers. Raises SampleError if it fails."""
    try:
        return ask()
    except FAILURES as error:
        raise SampleError(f"{where}: {what} failed: {described(error)}") from error


@dataclass(frozen=True)
class _Columns:
    """Samples as arrays whose first dim is the sample."""

    arrays: Mapping[str, Any]

    def __len__(self) -> int:
        counts = {name: len(x) for name, x in self.arrays.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"the arrays have different numbers of samples: {counts}")
        return min(counts.values(), default=0)

    def __getitem__(self, index: int) -> dict[str, object]:
        return {name: x[index] for name, x in self.arrays.items()}


def shapes_of(first: object, where: str) -> SampleShapes:
    """The arrays of the first sample. Raises InputError."""
    if not isinstance(first, Mapping) or not first or not all(isinstance(name, str) for name in first):
        raise InputError([f"{where}: sample 0 is {named(first)}. A sample is a dict of arrays by name, such as {{'x': x, 'y': y}}"])
    # Lists of different lengths do not form an array.
    arrays = {name: asked(where, f"sample 0: {name}", functools.partial(np.asarray, x)) for name, x in first.items()}
    if others := [name for name, x in arrays.items() if x.dtype.kind not in "biufV"]:
        remedy = "Leave it out, or make numbers of it (docs/own.md)"
        raise InputError([f"{where}: sample 0: {name} is {named(first[name])}, not an array of numbers. {remedy}" for name in others])
    # Devices have 32 bits unless JAX is configured otherwise.
    return {name: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for name, x in arrays.items()}


def named(value: object) -> str:
    """A value in messages."""
    return "None" if value is None else f"a value of type {type(value).__name__}"
