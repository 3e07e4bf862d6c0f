"""Batches of token windows, in an order that depends on the seed and on the global sample index, and on nothing else.

Training data is an endless sequence of samples: sample i is a window of the data, for every i from 0 on. Global batch k of a
run that starts at sample s consists of the samples s + k*batch to s + (k+1)*batch - 1, and each process reads only the rows
that its devices need. Nothing else is kept: there is no iterator state to save, to restore or to split over processes. The exception are
streams of the user's own (`train.data.own.streams`), whose place is stored beside the number of samples.

That one rule has three consequences. A run resumes at the right place from a single integer in its checkpoint. It may resume
with another number of processes, another mesh, or another accumulation, and still sees the same tokens in the same order. And
the samples of a bad step can be named and read again, as `--replay` does. The order is a function of the index because each
layer is: Grain's `shuffle` permutes indices with a seed per epoch, `repeat` makes the epochs endless, and `mix` assigns each
index to a part by weight.

A window is a piece of the data of fixed length, and documents are not. With `documents: mask` a token attends to its own document only, as
if each document were another row. A document ends with its end-of-text token, whichever source it comes from, so that a batch is marked
from its tokens alone (`masked`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import grain
import jax
import numpy as np

from .mapped import MappedFile
from .own.streams import Streams
from .tokenizer import Tokenizer

Batch = dict[str, np.ndarray]
"""Arrays [rows, ...] by name. Of tokens {"inputs": int32, "targets": int32, "weights": float32}, each [rows, seq]; weight 0 is padding.

With masked documents also `segments` [rows, seq]: for each input, the position in the window at which its document begins.
"""
Stack = Callable[[Sequence[Any]], Batch]
"""The batch of some samples; None stands for a row of padding."""

# Threads, not processes: a row is a copy out of mapped memory and costs little Python.
_READ_OPTIONS = grain.ReadOptions(num_threads=4, prefetch_buffer_size=8)
_MAX_SAMPLES = 1 << 62
"""The length of endless data: Grain needs one, and a sum of indices must still fit 64 bits."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Opened data: training batches, evaluation batches, and the tokenizer.

    `fingerprint` identifies the data, so that a resumed run can check that it sees the same. It does not change if the files move.
    """

    fingerprint: dict[str, str | int]
    train_sequences: int | None
    """The number of training samples, in all parts together: one epoch. None for a stream, whose end is not known."""
    tokenizer: Tokenizer | None = None
    end: int | None = None
    """The token that ends a document; None if documents are not masked from each other."""
    element: Mapping[str, jax.ShapeDtypeStruct] | None = None
    """The arrays of one row, for data of the user's own."""
    pairs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Samples of pairs by index, {inputs, targets, weights: [2, seq], number}, under `train` and the names of `eval_parts`."""
    notes: tuple[str, ...] = ()
    """Lines about the data for the log of a run."""
    pads: bool = True
    """Whether a row of padding has no weight, so that the last batch of an evaluation may have some."""
    _stack: Stack
    _mapped: tuple[MappedFile, ...] = ()
    # Lazy: Grain computes sample i when it is asked for. Infinite for training, one pass for evaluation.
    _train: grain.MapDataset | Streams
    _held_out: Mapping[str, grain.MapDataset]
    """By the name of the part of a mixture; under one name, or none, otherwise."""

    def train_batches(self, start_sample: int, batch: int, rows: Sequence[int], num_batches: int | None = None) -> Iterator[Batch]:
        """The given rows of global batches 0, 1, ... of a run that starts at sample `start_sample`. Endless without `num_batches`.

        batch: rows of a global batch; rows: which of them to read, each from 0 to batch - 1. A stream is at that sample when this returns.
        """
        _check_rows(batch, rows)
        if isinstance(self._train, Streams):
            return itertools.islice(self._train.batches(start_sample, batch, rows, self._stack), num_batches)
        if num_batches is None:
            num_batches = (_MAX_SAMPLES - start_sample) // batch
        make = partial(_rows_of_batch, self._train, self._stack, start_sample, batch, tuple(rows))
        return _prefetched(grain.MapDataset.range(num_batches).map(make))

    def eval_batches(self, batch: int, rows: Sequence[int], max_batches: int | None = None, *, part: str | None = None) -> Iterator[Batch]:
        """The given rows of the held-out samples, once and in order, of all parts one after another or of one of `eval_parts`.

        The last batch of a part is completed by rows of padding, or left out if the data has none. max_batches: of each part.
        """
        _check_rows(batch, rows)
        parts = self.eval_parts if part is None else (part,)
        return itertools.chain.from_iterable(self._eval_batches(self._held_out[part], batch, rows, max_batches) for part in parts)

    def _eval_batches(self, held_out: grain.MapDataset, batch: int, rows: Sequence[int], max_batches: int | None) -> Iterator[Batch]:
        # Rounded up where the last batch is padded.
        num_batches = -(-len(held_out) // batch) if self.pads else len(held_out) // batch
        if max_batches is not None:
            num_batches = min(num_batches, max_batches)
        make = partial(_rows_of_batch, held_out, self._stack, 0, batch, tuple(rows))
        return _prefetched(grain.MapDataset.range(num_batches).map(make))

    def restore(self, samples: int, stored: Sequence[str]) -> None:
        """Tells a stream where its sample `samples` is. stored: as a checkpoint has it from `stored` in each process. Raises InputError."""
        if isinstance(self._train, Streams):
            self._train.restore(samples, stored)

    def stored(self, samples: int) -> str | None:
        """Returns what a checkpoint stores of a stream beside the number of samples, to which the batches have come; None otherwise."""
        return self._train.stored(samples) if isinstance(self._train, Streams) else None

    @property
    def is_repeatable(self) -> bool:
        """Whether samples have the same values each time they are read."""
        return not {"random", "eval_random"} & self.fingerprint.keys()

    @property
    def is_stream(self) -> bool:
        """Whether the training samples have no index."""
        return isinstance(self._train, Streams)

    def check(self) -> None:
        """Raises DataChangedError if a file that is read during the run has changed since it was opened.

        The batches look too, when they read from a file. This look is more thorough, and belongs before each save.
        """
        for mapped in self._mapped:
            mapped.check_contents()

    def with_column(self, name: str, values: Mapping[str, np.ndarray]) -> Data:
        """The data with one more array [b, ...] in each batch. values: a row for each sample, by the names in `pairs`."""
        column = np.concatenate([values[part] for part in self.pairs])
        return replace(self, _stack=partial(_stack_with, self._stack, name, column))

    @property
    def eval_parts(self) -> tuple[str, ...]:
        """The names of the parts that hold data out."""
        return tuple(self._held_out)

    @property
    def eval_sequences(self) -> int:
        """The number of held-out samples."""
        return sum(map(len, self._held_out.values()))

    def eval_batch(self, batch: int, multiple: int) -> int:
        """The rows of a batch of an evaluation: `batch`, or without padding a smaller multiple that leaves out the fewest samples.

        At least half of `batch` if there are as many samples: many small batches take long.
        """
        if self.pads or not self._held_out:
            return batch
        count = self.eval_sequences
        half = -(-batch // (2 * multiple)) * multiple
        fits = range(half if half <= count else multiple, min(batch, max(count, multiple)) + 1, multiple)
        # The largest of equally good ones.
        return min(reversed(fits), key=lambda size: count % size)


def _rows_of_batch(samples: grain.MapDataset, stack: Stack, start: int, batch: int, rows: Sequence[int], index: int) -> Batch:
    """The rows of global batch `index`; sample `start` is the first row of batch 0."""
    positions = [start + index * batch + row for row in rows]
    # Only held-out data ends; the last batch of an evaluation is padded, so that all batches have one shape.
    return stack([samples[position] if position < len(samples) else None for position in positions])


def _stack_with(stack: Stack, name: str, column: np.ndarray, samples: Sequence[Any]) -> Batch:
    rows = [np.zeros_like(column[0]) if sample is None else column[sample["number"]] for sample in samples]
    return {**stack(samples), name: np.stack(rows)}


def stack_tokens(seq: int, end: int | None, samples: Sequence[Any]) -> Batch:
    """The batch of some windows, int32 [seq + 1] each. end: the token that ends a document, if documents are masked from each other."""
    tokens = np.zeros((len(samples), seq + 1), np.int32)
    weights = np.zeros((len(samples), seq), np.float32)
    for row, sample in enumerate(samples):
        if sample is not None:
            tokens[row], weights[row] = np.asarray(sample), 1.0
    # Slices of [rows, seq + 1] are not contiguous, and would keep the whole array alive.
    batch = {"inputs": np.ascontiguousarray(tokens[:, :-1]), "targets": np.ascontiguousarray(tokens[:, 1:]), "weights": weights}
    return batch if end is None else masked(batch, end)


def masked(batch: dict[str, np.ndarray], end: int) -> dict[str, np.ndarray]:
    """A batch of tokens with `segments`: equal entries are one document, and a token's position in it is its position less its entry.

    A target that begins a document has weight 0: nothing before it foretells it.
    """
    is_end, position = batch["inputs"] == end, np.arange(batch["inputs"].shape[1], dtype=np.int32)
    # A document begins after the end of the one before. The window's first token begins one, as far as the window knows.
    begins = np.zeros_like(batch["inputs"])
    begins[:, 1:] = np.where(is_end[:, :-1], position[1:], 0)
    weights = np.where(is_end, np.float32(0), batch["weights"])
    return {**batch, "weights": weights, "segments": np.maximum.accumulate(begins, axis=1)}


def _prefetched(batches: grain.MapDataset) -> Iterator[Batch]:
    """The batches in order, read ahead by threads. Closing the generator ends the threads."""
    iterator = iter(batches.to_iter_dataset(_READ_OPTIONS))
    try:
        yield from iterator
    finally:
        # Reached, too, when the loop ends early and the generator is closed: otherwise the reading threads would live on.
        iterator.close()


def _check_rows(batch: int, rows: Sequence[int]) -> None:
    if any(not 0 <= row < batch for row in rows):
        raise ValueError(f"rows {list(rows)} are not all rows of a batch of {batch} (0 to {batch - 1})")
