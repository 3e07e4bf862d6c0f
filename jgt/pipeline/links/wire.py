"""The links between stages, which send activations and cotangents along the ring, and from one stage to all.

All devices of a stage (tensor, expert) have the same activation, or parts of it, if rules split it over them. If each of them sent all of
it, the network would carry the same bytes as many times as a stage has devices. Here each device sends one part, and its stage puts the
parts together again over its own, faster links (Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, section
4.1, https://arxiv.org/abs/2104.04473). With tensor 4, an activation [rows, seq, embed] is sent as [rows, seq / 4, embed] by each device,
and an all-gather over tensor puts it together.

The collectives run in a shard_map over the axes of a stage, inside of that over the stage axis. A sharding constraint would not do: the
partitioner would lay the layers out like what they send. And where all axes are manual, values travel in their own type on every platform.
XLA on CPU aborts on half-precision sums in a region that is manual over some axes only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp

from jgt.pipeline.arrays import Arrays, Flags
from jgt.pipeline.links.layout import Axes
from jgt.pipeline.links.moves import Moves
from jgt.program.dims import Dims, partition_spec

Pairs = tuple[tuple[int, int], ...]
"""(sender, receiver) of stages."""


@dataclass(frozen=True, kw_only=True)
class Wire:
    """The links between stages, for a list of values. dims: the axes that split each value within a stage, by the rules."""

    moves: Moves
    dims: tuple[Dims, ...]

    def send(self, values: Arrays, pairs: Pairs) -> Arrays:
        """The values of the stage that sends to here. Stages that nothing is sent to receive zeros."""
        return self._by_parts(lambda x: cast(jax.Array, jax.lax.ppermute(x, self.moves.axis, pairs)), values)

    def show(self, flag: Flags, values: Arrays) -> Arrays:
        """The values of the one stage whose flag is set, on every stage."""
        # One stage contributes its values and the others zeros, so the sum is a broadcast from a stage that only data names. It is
        # exact in any precision.
        return self._by_parts(self._sum, [jnp.where(flag, x, jnp.zeros_like(x)) for x in values])

    def pin(self, values: Arrays) -> Arrays:
        """Values that are about to enter a stage, or have left one, laid out as stages have them."""
        return [self.moves.constrain(x, partition_spec(dims)) for x, dims in zip(values, self.dims, strict=True)]

    def _sum(self, x: jax.Array) -> jax.Array:
        numbers = x.astype(jnp.int32) if x.dtype == bool else x
        return cast(jax.Array, jax.lax.psum(numbers, self.moves.axis)).astype(x.dtype)

    def _by_parts(self, fn: Callable[[jax.Array], jax.Array], values: Arrays) -> Arrays:
        return [self._by_part(fn, x, dims) for x, dims in zip(values, self.dims, strict=True)]

    def _by_part(self, fn: Callable[[jax.Array], jax.Array], x: jax.Array, dims: Dims) -> jax.Array:
        axes = self.moves.axes_inside
        if not axes:
            return fn(x)
        parts = split_further(x.shape, dims, axes, self.moves.sizes)

        def put_together(part: jax.Array) -> jax.Array:
            part = fn(part)
            for dim, (before, after) in enumerate(zip(dims, parts, strict=True)):
                if rest := after[len(before) :]:
                    part = cast(jax.Array, jax.lax.all_gather(part, rest, axis=dim, tiled=True))
            return part

        # Pinned on both sides, or the partitioner would lay out the layers before and after like the parts.
        spec = partition_spec(dims)
        inside = self.moves.manual(put_together, axes, partition_spec(parts), spec)
        return self.moves.constrain(inside(self.moves.constrain(x, spec)), spec)


def split_further(shape: Sequence[int], dims: Dims, axes: Axes, sizes: dict[str, int]) -> Dims:
    """These dims, with the rest of the axes at the first dim that they divide: one behind the rows, or the rows. Otherwise as they are."""
    rest = tuple(axis for axis in axes if not any(axis in split for split in dims))
    num_parts = math.prod(sizes[axis] for axis in rest)
    for dim in [*range(1, len(shape)), *range(len(shape))[:1]]:
        if shape[dim] % (num_parts * math.prod(sizes[axis] for axis in dims[dim])) == 0:
            return (*dims[:dim], (*dims[dim], *rest), *dims[dim + 1 :])
    return dims
