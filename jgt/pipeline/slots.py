"""What one stage does in its slots: forward, backward and weight gradients of one chunk, layer by layer.

These functions run on one stage, inside a shard_map over the stage axis: arrays have no stage dim, collectives go along
the axis, other mesh axes are left to the partitioner or belong to the shard_map around.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jgt import scopes
from jgt.parts import Part
from jgt.pipeline.floats import Values
from jgt.pipeline.layer import Gradients, Layer


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What the layers of a stage read in one slot: its stacked weights [chunks * layers, ...], common and local values.

    ids: the number of each layer in the model, negative for padding, [chunks * layers].
    """

    weights: Values
    ids: Any
    common: Values
    local: Values


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The slots of a stage.

    local: what layers read of inputs alone. per_chunk: layers of a chunk, padding included. gather: makes a layer's weights whole; scatter: the reverse, for
    gradients. keep_input: only the chunk's input is saved, and backward runs it forward again. skips: without an item the layers are
    not run.
    """

    layer: Layer
    local: Part
    axis: str
    num_stages: int
    per_chunk: int
    gather: Callable[[Values], Values]
    scatter: Callable[[int, Any], Any]
    keep_input: bool
    apart: bool
    skips: bool

    @property
    def stashed_shapes(self) -> Values:
        """What backward leaves for the weight gradients of one layer; residuals too, where forward did not save them."""
        if not self.apart:
            return []
        return [*self.layer.stashed_shapes, *(self.layer.saved_shapes if self.keep_input else [])]

    def evaluate(self, item: Mapping[str, Any], chunk: Chunk, travel: Values) -> Values:
        """What leaves a chunk, with nothing saved."""

        def one(travel: Values, i: Any) -> tuple[Values, None]:
            weights, layer = self._layer(chunk, item, i)
            return self._wanted(item, lambda: self.layer.ahead(weights, chunk.common, chunk.local, layer, travel)), None

        return jax.lax.scan(one, travel, jnp.arange(self.per_chunk))[0]

    def forward(self, item: Mapping[str, Any], chunk: Chunk, travel: Values, saved: Values) -> tuple[Values, Values]:
        """What leaves a chunk; what backward needs goes into the item's slot of `saved`."""
        if self.keep_input:
            saved = [_put(buffer, value, item["saved"]) for buffer, value in zip(saved, travel, strict=True)]
            return self.evaluate(item, chunk, travel), saved

        def one(carry: tuple[Values, Values], i: Any) -> tuple[tuple[Values, Values], None]:
            travel, saved = carry
            weights, layer = self._layer(chunk, item, i)
            travel, new = self._wanted(item, lambda: self.layer.forward(weights, chunk.common, chunk.local, layer, travel))
            return (travel, [_put(b, x, item["saved"], i) for b, x in zip(saved, new, strict=True)]), None

        return jax.lax.scan(one, (travel, saved), jnp.arange(self.per_chunk))[0]

    def backward(
        self, item: Mapping[str, Any], chunk: Chunk, cotangents: Values, saved: Values, stashed: Values, sums: Sums
    ) -> tuple[Values, Values, Sums]:
        """The cotangents of what entered a chunk; gradients are added up, or what they need is stashed."""
        with scopes.recompute():
            again = self._again(item, chunk, saved) if self.keep_input else None

        def one(carry: tuple[Values, Values, Sums], i: Any) -> tuple[tuple[Values, Values, Sums], None]:
            cotangents, stashed, sums = carry
            weights, layer = self._layer(chunk, item, i)
            kept = [_at(b, i) for b in again] if again is not None else [_at(b, item["saved"], i) for b in saved]
            cotangents, ready, left = self._wanted(
                item, lambda: self.layer.backward(weights, chunk.common, chunk.local, layer, kept, cotangents)
            )
            sums = self._added(sums, ready, item, i, layer)
            if self.apart:
                left = [*left, *(kept if self.keep_input else [])]
                stashed = [_put(b, x, item["stashed"], i) for b, x in zip(stashed, left, strict=True)]
            return (cotangents, stashed, sums), None

        return jax.lax.scan(one, (cotangents, stashed, sums), jnp.arange(self.per_chunk), reverse=True)[0]

    def weight_gradients(self, item: Mapping[str, Any], chunk: Chunk, saved: Values, stashed: Values, sums: Sums) -> Sums:
        """Adds the gradients that backward left."""

        def one(sums: Sums, i: Any) -> tuple[Sums, None]:
            weights, layer = self._layer(chunk, item, i)
            left = [_at(b, item["stashed"], i) for b in stashed]
            num = len(self.layer.stashed_shapes)
            kept = left[num:] if self.keep_input else [_at(b, item["saved"], i) for b in saved]
            found = self._wanted(item, lambda: self.layer.weight_gradients(weights, chunk.common, chunk.local, layer, kept, left[:num]))
            return self._added(sums, found, item, i, layer), None

        return jax.lax.scan(one, sums, jnp.arange(self.per_chunk))[0]

    def sent(self, item: Mapping[str, Any], pairs: Mapping[int, Any], values: Values, inbox: Values) -> Values:
        """The inbox after every stage sent its values along each shift of the table, to those that ever need them."""
        for shift, slot in item["into"].items():
            inbox = [_put(box, self._shifted(x, int(shift), pairs), slot) for box, x in zip(inbox, values, strict=True)]
        return inbox

    def shown(self, flag: Any, values: Values) -> Values:
        """The values of the one stage whose flag is set, on every stage."""
        return [self._sum(jnp.where(flag, x, jnp.zeros_like(x))) for x in values] if self.num_stages > 1 else values

    def _sum(self, x: Any) -> Any:
        # XLA on CPU aborts on half-precision sums between stages; the sum of one value and zeros is exact in any precision.
        wide = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4 else jnp.int32 if x.dtype == bool else x.dtype
        return jax.lax.psum(x.astype(wide), self.axis).astype(x.dtype)

    def _shifted(self, x: Any, shift: int, pairs: Mapping[int, Any]) -> Any:
        return x if shift == 0 else jax.lax.ppermute(x, self.axis, pairs[shift])

    def _layer(self, chunk: Chunk, item: Mapping[str, Any], i: Any) -> tuple[Values, Any]:
        at = item["chunk"] * self.per_chunk + i
        return self.gather([_at(w, at) for w in chunk.weights]), _at(chunk.ids, at)

    def _again(self, item: Mapping[str, Any], chunk: Chunk, saved: Values) -> Values:
        def one(travel: Values, i: Any) -> tuple[Values, Values]:
            weights, layer = self._layer(chunk, item, i)
            return self._wanted(item, lambda: self.layer.forward(weights, chunk.common, chunk.local, layer, travel))

        return jax.lax.scan(one, [_at(b, item["saved"]) for b in saved], jnp.arange(self.per_chunk))[1]

    def _wanted(self, item: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        """What a layer's program gives; of no item garbage, or zeros.

        Only the layer is in the branch: XLA copies what a branch hands through, and buffers are large.
        """
        if not self.skips:
            return run()
        return jax.lax.cond(item["on"], run, lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run)))

    def _added(self, sums: Sums, found: Gradients, item: Mapping[str, Any], i: Any, layer: Any) -> Sums:
        at = item["chunk"] * self.per_chunk + i
        real = item["on"] & (layer >= 0)
        weights, common = list(sums.weights), list(sums.common)
        for index, gradient in found.weights.items():
            total = weights[index]
            # Garbage may be infinite: it is dropped, not multiplied away.
            part = jnp.where(real, self.scatter(index, gradient.astype(total.dtype)), 0)
            weights[index] = _put(total, _at(total, at) + part, at)
        for index, gradient in found.common.items():
            common[index] = common[index] + jnp.where(real, gradient.astype(common[index].dtype), 0)
        return Sums(weights, common)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Sums:
    """Gradients added up over microbatches: of the stage's stacked weights, and of common values that its layers read."""

    weights: Values
    common: Values

    def tree_flatten(self) -> tuple[tuple[Values, Values], None]:
        """Both lists."""
        return (self.weights, self.common), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[Values]) -> Sums:
        """From both lists."""
        return cls(*children)


def _at(buffer: Any, *index: Any) -> Any:
    """buffer[index], where the index may be traced."""
    num = len(index)
    start = [*index, *(0,) * (buffer.ndim - num)]
    return jax.lax.dynamic_slice(buffer, start, (*(1,) * num, *buffer.shape[num:])).reshape(buffer.shape[num:])


def _put(buffer: Any, value: Any, *index: Any) -> Any:
    """The buffer with buffer[index] replaced."""
    start = [*index, *(0,) * (buffer.ndim - len(index))]
    return jax.lax.dynamic_update_slice(buffer, value.astype(buffer.dtype)[(None,) * len(index)], start)
