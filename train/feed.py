"""Batches on the devices: each process reads the rows that its devices hold, asked from the sharding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from train.data.batches import Data


class Feed:
    """Reads global batches [batch, seq] laid out by `shardings` (one a key of the batch)."""

    def __init__(self, data: Data, shardings: Mapping[str, NamedSharding], batch: int, seq: int):
        self._data = data
        self._shardings = shardings
        self._batch, self._shape = batch, (batch, seq)
        self._rows = local_rows(shardings["inputs"], self._shape)

    def train(self, samples: int) -> Iterator[dict[str, jax.Array]]:
        """Training batches from a position on, without end."""
        for local in self._data.train_batches(samples, self._batch, self._rows):
            yield self._global(local)

    def evaluation(self, max_batches: int | None) -> Iterator[dict[str, jax.Array]]:
        """The held-out split, once, in order."""
        for local in self._data.eval_batches(self._batch, self._rows, max_batches):
            yield self._global(local)

    def _global(self, local: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        return {name: self._array(local[name], sharding) for name, sharding in self._shardings.items()}

    def _array(self, local: np.ndarray, sharding: NamedSharding) -> jax.Array:
        place = {row: i for i, row in enumerate(self._rows)}

        def part(index: Any) -> np.ndarray:
            rows = range(*index[0].indices(self._batch))
            return local[[place[row] for row in rows]][:, index[1]]

        return jax.make_array_from_callback(self._shape, sharding, part, dtype=local.dtype)


def local_rows(sharding: NamedSharding, shape: tuple[int, int]) -> list[int]:
    """The rows of a global [batch, seq] array of which this process's devices hold a part."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    return sorted({row for index in indices if index is not None for row in range(*index[0].indices(shape[0]))})
