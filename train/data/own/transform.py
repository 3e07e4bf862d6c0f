"""Random changes of training samples, such as flips and crops of images: `data.transform: MODULE:NAME`.

The function gets a sample and a generator of random numbers, whose key is the run's seed and the number of the sample in the endless order
of the run. The epoch and the index of the sample follow from that number, so a sample is drawn anew in each epoch. It is the same in each
process, thread and start.

Samples may also draw at random by themselves, from generators that belong to the process (`random`, `numpy.random`, torch) or to the data
set. No key leads back to such draws, so a run does not repeat them. `generators` helps to find these samples at the start.
"""

from __future__ import annotations

import inspect
import pickle
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .samples import Sample, SampleShapes, asked, checked, shapes_of

NOT_REPEATED = (
    "samples have other values each time they are read. The run does not repeat these draws: after it resumes it trains on others. "
    "For draws that are repeated, use the rng of data.transform (docs/own.md, Augmentation)"
)


@dataclass(frozen=True, kw_only=True)
class Transform:
    """A function of a sample and an `np.random.Generator`, which returns a sample. where: for messages. seed: the run's."""

    function: Callable[[Sample, np.random.Generator], object]
    where: str
    seed: int

    def element(self, first: Sample) -> SampleShapes:
        """The arrays of each sample that it returns, from the first sample. Raises SampleError and InputError."""
        return shapes_of(self._called(0, first), self.where)

    def __call__(self, number: int, sample: Sample, element: SampleShapes) -> Sample:
        """The changed sample. number: its place in the order of the run, from 0 on. Raises SampleError and InputError."""
        return checked(self._called(number, sample), element, self.where, f"sample {number}")

    def _called(self, number: int, sample: Sample) -> object:
        rng = np.random.default_rng((self.seed, number))
        return asked(self.where, f"sample {number}", lambda: self.function(dict(sample), rng))


def generators() -> bytes:
    """The state of the process's own generators of random numbers: equal before and after code that does not draw from them."""
    torch = sys.modules.get("torch")
    return pickle.dumps((random.getstate(), np.random.get_state(), torch and torch.get_rng_state().numpy().tobytes()))


def line_of(made: object, function: Callable[..., object]) -> str:
    """The file and line at which samples are read: the data set's own method, or the function that has returned it."""
    method = getattr(type(made), "__getitem__", function)
    code = getattr(method, "__code__", None) or getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}: "
