"""The global batches of a run, read from its data and laid out as its program takes them.

The invariant: the same rows reach the model on every mesh and with any number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jgt.document import InputError

from ..data.batches import Data
from .setup import Setup

DeviceBatch = dict[str, jax.Array]
"""The arrays of a global batch by name, [batch, ...]."""


def eval_batch_of(data: Data, setup: Setup) -> int:
    """The rows of a batch of an evaluation, whose program is traced. Raises InputError if there are too few samples, or if it fails."""
    batch, is_whole, count = setup.run.config.train.batch, setup.objective.is_of_whole_batches, data.eval_sequences
    # Held-out data without padding is read in batches that leave out few of its samples, and that mesh and pipeline still divide.
    multiple = setup.eval_multiple
    rows = batch if is_whole else data.eval_batch(batch, multiple)
    few = f"{setup.run.where('data')}: data.source: {count} held-out samples are fewer than"
    if is_whole and 0 < count < batch:
        why = f"a batch of {batch}, which the loss compares with each other"
        raise InputError([f"{few} {why}. Hold out more, or none, or lower train.batch"])
    if not data.pads and 0 < count < multiple:
        parts = " times the microbatches of the pipeline" if setup.run.pipeline is not None else ""
        source = getattr(setup.run.config.data, "source", "")
        raise InputError([f"{few} {multiple}, the devices that split a batch{parts}. Hold out more, or none ({source})"])
    if count and (rows != batch or setup.program.evaluated is not setup.program.loss):
        setup.eval_shapes(rows)
    return rows


class Feed:
    """Reads global batches: dicts of arrays [batch, ...], laid out as the setup says. Each process reads its devices' rows."""

    def __init__(self, data: Data, setup: Setup):
        self.data, self._shardings, self._element = data, setup.batch_shardings, setup.program.element
        self._batch, self._order = setup.run.config.train.batch, setup.row_order
        self._is_of_whole_batches, self.eval_batch = setup.objective.is_of_whole_batches, eval_batch_of(data, setup)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that tell a person about the data and how it is read."""
        if count := self.data.eval_sequences:
            if self.eval_batch != self._batch:
                note = f"An evaluation reads {count} samples in batches of {self.eval_batch}, so that few are left out"
                return (*self.data.notes, note)
            if self._is_of_whole_batches:
                return (*self.data.notes, "An evaluation reads whole batches only, because the loss compares their rows")
        return tuple(self.data.notes)

    def train(self, samples: int) -> Iterator[DeviceBatch]:
        """Training batches without end, after the first `samples` sequences of the training data. Of a stream, returns when it is there."""
        rows = self._rows(self._batch)
        batches = self.data.train_batches(samples, self._batch, rows)
        return (self._global(local, self._batch, rows) for local in batches)

    def evaluation(self, max_batches: int | None, part: str | None = None) -> Iterator[DeviceBatch]:
        """The held-out samples, of one part or of all, once, in order; of each part at most `max_batches` batches of `eval_batch` rows."""
        rows = self._rows(self.eval_batch)
        for local in self.data.eval_batches(self.eval_batch, rows, max_batches, part=part):
            yield self._global(local, self.eval_batch, rows)

    def held_out(self, max_batches: int | None) -> dict[str, Iterator[DeviceBatch]]:
        """The held-out samples of each part, as `evaluation` reads them."""
        return {part: self.evaluation(max_batches, part) for part in self.data.eval_parts}

    def _rows(self, batch: int) -> list[int]:
        needed = [local_rows(sharding, (batch, *self._element[name].shape)) for name, sharding in self._shardings.items()]
        return sorted({row for rows in needed for row in rows})

    def _global(self, local: Mapping[str, np.ndarray], batch: int, rows: Sequence[int]) -> DeviceBatch:
        # `local` has this process's rows one after another. They need not be neighbours in the global batch.
        place = {row: i for i, row in enumerate(rows)}
        if self._order is not None:
            ordered = {name: x[..., self._order] if x.shape[-1:] == self._order.shape else x for name, x in local.items()}
            local = {**ordered, "positions": np.broadcast_to(self._order, local["inputs"].shape)}

        def array(name: str, sharding: NamedSharding) -> jax.Array:
            def part(index: Any) -> np.ndarray:
                # [local rows, ...] → [rows of one device, its part of the other dims]
                return local[name][[place[row] for row in range(*index[0].indices(batch))]][(slice(None), *index[1:])]

            return jax.make_array_from_callback((batch, *self._element[name].shape), sharding, part, dtype=local[name].dtype)

        return {name: array(name, sharding) for name, sharding in self._shardings.items()}


def local_rows(sharding: NamedSharding, shape: tuple[int, ...]) -> list[int]:
    """The rows of a global [batch, ...] array that this process's devices need, in order."""
    # Not batch / processes, because devices of several processes may hold the same rows.
    indices = sharding.addressable_devices_indices_map(shape).values()
    return sorted({row for index in indices if index is not None for row in range(*index[0].indices(shape[0]))})
