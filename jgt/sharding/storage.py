"""Parameters stored on the stages that run them, where that is not by neighbouring layers.

A stage of an interleaved pipeline runs several chunks that are not neighbours in the model, and with layers that the chunks
do not divide some chunks are shorter. No sharding of [layers, ...] can express either, so each step would move all weights to their
stages and all gradients back. Between steps, arrays may have another shape instead: the chunks of each stage one after another,

    in the model    [layers, ...]                                            12 layers: [12, embed, ffn]
    stored          [chunks of a stage, stages, layers of a chunk, ...]      3 chunks on 2 stages: [3, 2, 2, embed, ffn]

with the stage axis on the second dim. Where each stage runs every S-th of v · S equal chunks, this is a reshape: the bytes and their
order stay the same. Shorter chunks are padded by a layer of zeros that nothing reads. An optimizer that treats all elements alike,
or each matrix alone, does not notice. A checkpoint has the model's shapes, so that it fits any mesh and schedule: `entered` and `left`
convert, by one all-to-all for each array, and no device ever holds more than its part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding

from jgt.pipeline.chunks import Chunks
from jgt.program.dims import Dims, partition_spec
from jgt.sharding.paths import KeyPath, path_text
from jgt.sharding.placement import ParameterPlace, Placement


def stored_dims(dims: Dims, axis: str) -> Dims:
    """The dims of a stored stack, from those of the stack [layers, ...]: split over the stages where these are, and nowhere else."""
    return ((), (axis,), (), *(tuple(a for a in axes if a != axis) for axes in dims[1:]))


@dataclass(frozen=True, kw_only=True)
class Storage:
    """The stacks of layers of one model, by the paths of their parameters, and how they are stored. model: their places in the model."""

    chunks: Chunks
    axis: str
    model: Placement
    stacks: frozenset[str]

    @cached_property
    def placement(self) -> Placement:
        """The places of the stored parameters, and of all others."""
        return replace(self.model, parameters=tuple(self._stored(p) if p.path in self.stacks else p for p in self.model.parameters))

    def shapes(self, params: Any) -> Any:
        """The shapes of the model's parameters, from stored ones."""
        return jax.eval_shape(self.left, params)

    def entered(self, tree: Any, *, as_state: bool = False) -> Any:
        """A tree of the model's shapes, stored: parameters, or (as_state) anything that is laid out like the optimizer state."""

        def enter(place: ParameterPlace, x: jax.Array) -> jax.Array:
            dims = place.optimizer_dims if as_state else place.dims
            # Pinned before and after: in between the stage axis moves from one dim to another.
            rows = self.chunks.rows(self.chunks.arrange(self._pinned(x, dims)))
            return self._pinned(self._pinned(rows, ((), (), *dims)), stored_dims(dims, self.axis))

        return self._mapped(enter, self.model, tree)

    def left(self, tree: Any, *, as_state: bool = False) -> Any:
        """The inverse of `entered`."""
        of_model = {p.path: p for p in self.model.parameters}

        def leave(place: ParameterPlace, x: jax.Array) -> jax.Array:
            model = of_model[place.path]
            dims = model.optimizer_dims if as_state else model.dims
            rows = self._pinned(self._pinned(x, stored_dims(dims, self.axis)), ((), (), *dims))
            return self._pinned(self.chunks.restore(self.chunks.staged(rows)), dims)

        return self._mapped(leave, self.placement, tree)

    def _mapped(self, fn: Callable[[ParameterPlace, jax.Array], jax.Array], placement: Placement, tree: Any) -> Any:
        def one(path: KeyPath, x: jax.Array) -> jax.Array:
            place = placement.owner(path_text(path), x.shape)
            return x if place is None or place.path not in self.stacks else fn(place, x)

        return jax.tree.map_with_path(one, tree)

    def _stored(self, place: ParameterPlace) -> ParameterPlace:
        return replace(
            place,
            shape=(*self.chunks.rows_shape, *place.shape[1:]),
            dims=stored_dims(place.dims, self.axis),
            optimizer_dims=stored_dims(place.optimizer_dims, self.axis),
            sliced=frozenset({0, 1, 2} | {dim + 2 for dim in place.sliced}),
        )

    def _pinned(self, x: jax.Array, dims: Dims) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.model.mesh, partition_spec(dims)))
