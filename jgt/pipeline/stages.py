"""Which layers each stage holds: the model's layers cut into chunks of almost equal length, in the order of a table."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Layers of equal cost over chunks; `stages` are the stages of the chunks, along the model.

    Chunks differ by one layer at most. The shorter ones are padded with a layer that is computed and dropped, since all
    stages wait for the longest anyway.
    """

    num_layers: int
    num_stages: int
    stages: tuple[int, ...]

    @property
    def per_chunk(self) -> int:
        """Layers of a chunk, padding included."""
        return -(-self.num_layers // len(self.stages))

    @property
    def share(self) -> Fraction:
        """How many of the layers that are computed are the model's own."""
        return Fraction(self.num_layers, self.per_chunk * len(self.stages))

    @property
    def is_padded(self) -> bool:
        """Whether some chunk is shorter than others."""
        return self.num_layers % len(self.stages) != 0

    @cached_property
    def ids(self) -> np.ndarray:
        """The layer at each place [stages, chunks * layers of a chunk]; -1: padding."""
        chunks = np.array_split(np.arange(self.num_layers), len(self.stages))
        rows: list[list[int]] = [[] for _ in range(self.num_stages)]
        for stage, chunk in zip(self.stages, chunks, strict=True):
            rows[stage] += [*chunk, *[-1] * (self.per_chunk - len(chunk))]
        return np.asarray(rows, np.int32)

    def arrange(self, x: Any) -> Any:
        """[layers, ...] → [stages, chunks * layers of a chunk, ...]; padding repeats the first layer."""
        S, k = self.num_stages, self.per_chunk
        if not self.is_padded and self.stages == (*range(S),) * (len(self.stages) // S):
            # Reshapes keep what is sharded where it is; a gather over a sharded dim would bring it together first.
            return jnp.swapaxes(x.reshape(-1, S, k, *x.shape[1:]), 0, 1).reshape(S, -1, *x.shape[1:])
        if not self.is_padded and self.stages == (*range(S), *reversed(range(S))):
            down, up = x.reshape(2, S, k, *x.shape[1:])
            return jnp.stack([down, jnp.flip(up, 0)], 1).reshape(S, -1, *x.shape[1:])
        # Slices, not a gather: XLA aborts on some gathers over a dim that a shard_map leaves to it.
        parts = [x[layer : layer + count] for layer, count in self._runs(np.maximum(self.ids, 0).ravel())]
        return jnp.concatenate(parts).reshape(S, -1, *x.shape[1:])

    def restore(self, x: Any) -> Any:
        """The inverse of arrange; what stands in padding is lost."""
        S, k = self.num_stages, self.per_chunk
        rest = x.shape[2:]
        if not self.is_padded and self.stages == (*range(S),) * (len(self.stages) // S):
            return jnp.swapaxes(x.reshape(S, -1, k, *rest), 0, 1).reshape(self.num_layers, *rest)
        if not self.is_padded and self.stages == (*range(S), *reversed(range(S))):
            x = x.reshape(S, 2, k, *rest)
            return jnp.concatenate([x[:, 0], jnp.flip(x[:, 1], 0)]).reshape(self.num_layers, *rest)
        places = np.argsort(np.where(self.ids < 0, self.num_layers, self.ids).ravel(), kind="stable")[: self.num_layers]
        flat = x.reshape(-1, *rest)
        return jnp.concatenate([flat[place : place + count] for place, count in self._runs(places)])

    @staticmethod
    def _runs(places: np.ndarray) -> list[tuple[int, int]]:
        """(first, length) of the runs of consecutive numbers."""
        runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
        return [(int(run[0]), len(run)) for run in runs]
