"""The layers of each stage: a model's layers cut into chunks, of almost equal length or as asked for, laid out over a table's stages.

A schedule says which stage runs which chunk. All stages run the same program, so the stacked weights [layers, ...] become [stages, layers
of a stage, ...], where the layers of a stage are its chunks one after another. Shorter chunks are padded. Stages that skip layers when idle
skip padding too; others compute and drop it, which costs no time if layers take equally long, since all wait for the longest chunk. Seven
layers on two stages with two chunks each (interleaved), -1 for padding:

    chunks: 0 1 | 2 3 | 4 5 | 6 -1      stage 0: layers 0 1 4 5      stage 1: layers 2 3 6 -1

The parameters of layers are stored by stage if each stage runs as many neighbouring layers. Elsewhere no split of the dim of layers would
do, so another dim is split over the stages, and each step moves every weight to its stage and its gradient back by one all-to-all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jgt.pipeline.split import Split
from jgt.program.dims import Dims
from jgt.replacements.replacement import ParameterPlace
from jgt.sharding.storage import Form, Stack


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """A model's layers in chunks. stages, sizes: the stage and the number of layers of each chunk, in the order of the model."""

    num_stages: int
    stages: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return sum(self.sizes)

    @property
    def layers_per_chunk(self) -> int:
        """Layers of a chunk, padding included."""
        return max(self.sizes)

    @property
    def share(self) -> Fraction:
        """The share of the computed layers that are the model's own and not padding."""
        return Fraction(self.num_layers, self.layers_per_chunk * len(self.stages))

    @property
    def is_padded(self) -> bool:
        """Whether some chunk is shorter than others."""
        return len(set(self.sizes)) > 1

    @property
    def are_neighbours(self) -> bool:
        """Whether each stage runs as many layers as the others, all of them neighbours: then the stages can split [layers, ...]."""
        return not self.is_padded and self.stages == tuple(range(self.num_stages))

    @cached_property
    def ids(self) -> NDArray[np.int32]:
        """The number of the layer at each place [stages, layers of a stage]; -1 for padding."""
        chunks = np.split(np.arange(self.num_layers), np.cumsum(self.sizes[:-1]))
        rows: list[list[int]] = [[] for _ in range(self.num_stages)]
        for stage, chunk in zip(self.stages, chunks, strict=True):
            rows[stage] += [*chunk, *[-1] * (self.layers_per_chunk - len(chunk))]
        return np.asarray(rows, np.int32)

    @property
    def rows_shape(self) -> tuple[int, int, int]:
        """(chunks of a stage, stages, layers of a chunk): the first dims of stacked weights whose chunks are stored on their stages."""
        return len(self.stages) // self.num_stages, self.num_stages, self.layers_per_chunk

    def staged(self, x: jax.Array) -> jax.Array:
        """[chunks of a stage, stages, layers of a chunk, ...] → [stages, layers of a stage, ...]; no layer changes its stage."""
        return jnp.swapaxes(x, 0, 1).reshape(self.num_stages, -1, *x.shape[3:])

    def rows(self, x: jax.Array) -> jax.Array:
        """The inverse of `staged`. The first dims are in the order of the model if each stage runs every S-th chunk."""
        virtual, stages, layers = self.rows_shape
        return jnp.swapaxes(x.reshape(stages, virtual, layers, *x.shape[2:]), 0, 1)

    def arrange(self, x: jax.Array) -> jax.Array:
        """[layers, ...] → [stages, layers of a stage, ...]; padding repeats the first layer."""
        S, k = self.num_stages, self.layers_per_chunk
        # Reshapes keep what is sharded where it is; a gather over a sharded dim would bring it together first.
        if self._is_round_robin:
            return self.staged(x.reshape(-1, S, k, *x.shape[1:]))
        if self._is_down_and_up:
            # [layers, ...] → two arrays [S, k, ...]: the first S chunks go down the stages, the others come back up.
            down, up = x.reshape(2, S, k, *x.shape[1:])
            return jnp.stack([down, jnp.flip(up, 0)], 1).reshape(S, -1, *x.shape[1:])
        # Slices, not a gather: XLA aborts on some gathers over a dim that a shard_map leaves to it.
        parts = [x[layer : layer + count] for layer, count in _runs(np.maximum(self.ids, 0).ravel())]
        return jnp.concatenate(parts).reshape(S, -1, *x.shape[1:])

    def restore(self, x: jax.Array) -> jax.Array:
        """The inverse of `arrange`; values at padding are dropped."""
        S, k = self.num_stages, self.layers_per_chunk
        rest = x.shape[2:]
        if self._is_round_robin:
            return self.rows(x).reshape(self.num_layers, *rest)
        if self._is_down_and_up:
            x = x.reshape(S, 2, k, *rest)
            return jnp.concatenate([x[:, 0], jnp.flip(x[:, 1], 0)]).reshape(self.num_layers, *rest)
        # Where each layer is, in the order of the model: padding sorts to the end and is cut off.
        places = np.argsort(np.where(self.ids < 0, self.num_layers, self.ids).ravel(), kind="stable")[: self.num_layers]
        flat = x.reshape(-1, *rest)
        return jnp.concatenate([flat[place : place + count] for place, count in _runs(places)])

    @property
    def _is_round_robin(self) -> bool:
        """Chunk c is on stage c % S, as in gpipe, 1f1b, zb and their interleaved forms."""
        S = self.num_stages
        return not self.is_padded and self.stages == (*range(S),) * (len(self.stages) // S)

    @property
    def _is_down_and_up(self) -> bool:
        """Chunks go down the stages and up again, as in zigzag."""
        S = self.num_stages
        return not self.is_padded and self.stages == (*range(S), *reversed(range(S)))


def staged_places(
    parameters: tuple[ParameterPlace, ...], cut: Split, chunks: Chunks, axis: str, batch_axes: Sequence[str], sizes: Mapping[str, int]
) -> tuple[ParameterPlace, ...]:
    """Places of the parameters. Layers are split over the stages: by layers if each stage runs neighbouring layers."""

    def split(one: ParameterPlace, dims: Dims) -> Dims:
        if chunks.are_neighbours:
            return ((axis,), *dims[1:])
        dim = _dim_to_split(one.shape, dims, sizes[axis], batch_axes, sizes)
        return dims if dim is None else (*dims[:dim], (*dims[dim], axis), *dims[dim + 1 :])

    def place(index: int, one: ParameterPlace) -> ParameterPlace:
        # A rule that splits the dim of layers itself is not overridden.
        if index not in cut.stacks or one.dims[0] or one.optimizer_dims[0]:
            return one
        return replace(one, dims=split(one, one.dims), optimizer_dims=split(one, one.optimizer_dims))

    return tuple(place(i, p) for i, p in enumerate(parameters))


def _dim_to_split(shape: Sequence[int], dims: Dims, num_stages: int, batch_axes: Sequence[str], sizes: Mapping[str, int]) -> int | None:
    """The dim of a stack, other than the dim of layers, to split over the stages; None if the stages divide none."""

    def others(dim: int) -> tuple[int, int]:
        # Weights go to their stages by one all-to-all from a dim that has no other axis inside the pipeline.
        return sum(a not in batch_axes and sizes[a] > 1 for a in dims[dim]), len(dims[dim])

    fits = [d for d in range(1, len(shape)) if shape[d] % (num_stages * math.prod(sizes[a] for a in dims[d])) == 0]
    return min(fits, key=others, default=None)


def stored_form(place: ParameterPlace, chunks: Chunks, axis: str) -> Form:
    """The stored form of a stack of layers whose chunks are stored on their stages."""
    stored = replace(
        place,
        shape=(*chunks.rows_shape, *place.shape[1:]),
        dims=stored_dims(place.dims, axis),
        optimizer_dims=stored_dims(place.optimizer_dims, axis),
        sliced=frozenset({0, 1, 2} | {dim + 2 for dim in place.sliced}),
    )
    stack = Stack(lambda x: chunks.rows(chunks.arrange(x)), lambda x: chunks.restore(chunks.staged(x)))
    return Form(model=place, stored=stored, saved=place, stack=stack)


def stored_dims(dims: Dims, axis: str) -> Dims:
    """The dims of a stored stack, from the dims of the stack [layers, ...]: split over the stages where these are, and nowhere else."""
    return ((), (axis,), (), *(tuple(a for a in axes if a != axis) for axes in dims[1:]))


def _runs(places: NDArray[np.integer]) -> list[tuple[int, int]]:
    """(first, length) of each run of consecutive numbers."""
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    return [(int(run[0]), len(run)) for run in runs]
