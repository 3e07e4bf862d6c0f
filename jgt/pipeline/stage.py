"""The work of one stage on the items of a tick: forward, backward and weight gradients of one chunk, layer by layer.

These functions run inside a shard_map over the stage axis: arrays have no dim of stages, and the other mesh axes belong to the partitioner
or to the shard_map around. A stage without an item computes on zeros or stale values, into buffer slots that nothing reads (`idle:
compute`), which leaves collectives within a layer possible. Where layers contain no collectives, a stage may skip them (`idle: skip`). A
chunk is a scan over its layers, so the program is as long for 80 layers as for 8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from jgt.pipeline.arrays import Arrays, Flags, Floats, Integers, Structs, call, row, wide_zeros, zeros
from jgt.pipeline.chunks import Chunks
from jgt.pipeline.layer import Gradients, Layer, LayerInputs
from jgt.pipeline.links.moves import Moves
from jgt.pipeline.links.wire import Pairs, Wire
from jgt.pipeline.split import Split
from jgt.pipeline.ticks import Everywhere, OnStage, SendingItem, StageBuffers, StageItem, Ticks
from jgt.program import scopes
from jgt.program.parts import Part

_T = TypeVar("_T")

Changes = tuple[StageBuffers, Arrays]
"""The buffers that an item changed, and the values that it shows to all stages."""

Inputs = LayerInputs[jax.Array]

InputsOf = Callable[[jax.Array, Arrays], Inputs]
"""(a position in the item's chunk, what travels) → what the layer at that position reads."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage's programs.

    local: the part that computes what layers read of inputs alone. wire, wire_back: the links for what travels, and for its cotangents.
    keep_input: whether only the chunk's input is saved, and backward runs it forward again. trains: whether backward items follow, for
    which forward items save values.
    """

    split: Split
    moves: Moves
    chunks: Chunks
    ticks: Ticks
    layer: Layer
    local: Part
    wire: Wire
    wire_back: Wire
    keep_input: bool
    trains: bool

    def empty_buffers(self, travel: Structs, weights: Arrays, common: Arrays) -> StageBuffers:
        """The stage's buffers before the first tick; travel: the shapes that travel."""
        split, slots, num_layers = self.split, self.ticks.buffers, self.chunks.layers_per_chunk
        # [slots, ...] for what travels, [slots, layers of a chunk, ...] for what each layer saves.
        inbox, saved = zeros(travel, slots.forward.inbox.num_slots), slots.saved.num_slots
        if not self.trains:
            return StageBuffers(inbox=inbox)
        # Backward leaves residuals for the weight gradients, too, if forward did not save them.
        also_stashed = self.layer.saved_shapes if self.ticks.apart and self.keep_input else []
        return StageBuffers(
            inbox=inbox,
            saved=zeros(travel, saved) if self.keep_input else zeros(self.layer.saved_shapes, saved, num_layers),
            inbox_back=zeros(Floats.among(travel).select(travel), slots.backward.inbox.num_slots),
            stashed=zeros([*self.layer.stashed_shapes, *also_stashed], slots.stashed.num_slots, num_layers),
            sums=[wide_zeros(x) for x in split.floats([*split.weights, *split.in_layers]).select([*weights, *common])],
        )

    # -- the items --------------------------------------------------------------------------------------------------------

    def forward(self, own: OnStage[SendingItem], everywhere: Everywhere, *, shown: Fraction | None) -> Changes:
        """Runs a chunk on what waits in the inbox or enters the model, and sends its outputs on; what backward needs is saved.

        shown: the share of ticks in which the outputs of the last chunk are shown, if there are any.
        """
        item, travel, saved = own.item, everywhere.ends, own.buffers.saved
        inputs_of, sends = self._inputs(own, everywhere), self.ticks.buffers.forward
        # There is no inbox with one stage and one chunk: nothing is ever received.
        if sends.inbox.num_slots:
            travel = [jnp.where(item.first, x, row(box, item.read)) for x, box in zip(travel, own.buffers.inbox, strict=True)]
        if self.trains and not self.keep_input:
            travel, saved = self._save_residuals(item, inputs_of, travel, saved)
        else:
            if self.trains:
                saved = [_put(buffer, value, item.saved) for buffer, value in zip(saved, travel, strict=True)]
            travel, _ = self._through(item, inputs_of, travel, self.layer.ahead)
        inbox = self._send(self.wire, item, sends.pairs, travel, own.buffers.inbox)
        return StageBuffers(inbox=inbox, saved=saved), self._show(self.wire, item.last, travel, everywhere, shown)

    def _through(
        self, item: StageItem, inputs_of: InputsOf, travel: Arrays, run: Callable[[Inputs], tuple[Arrays, Arrays]]
    ) -> tuple[Arrays, Arrays]:
        """A chunk's outputs and what every layer saves, [layers of a chunk, ...]. run: `Layer.ahead` or `Layer.forward`."""

        def step(travel: Arrays, i: jax.Array) -> tuple[Arrays, Arrays]:
            inputs = inputs_of(i, travel)
            return self._if_wanted(item, inputs, travel, lambda: run(inputs))

        return jax.lax.scan(step, travel, self._positions)

    def _save_residuals(self, item: StageItem, inputs_of: InputsOf, travel: Arrays, saved: Arrays) -> tuple[Arrays, Arrays]:
        """A chunk's outputs, and the buffers with every layer's residuals in the item's slot."""

        def step(carry: tuple[Arrays, Arrays], i: jax.Array) -> tuple[tuple[Arrays, Arrays], None]:
            travel, saved = carry
            inputs = inputs_of(i, travel)
            travel, new = self._if_wanted(item, inputs, travel, lambda: self.layer.forward(inputs))
            return (travel, [_put(b, x, item.saved, i) for b, x in zip(saved, new, strict=True)]), None

        return jax.lax.scan(step, (travel, saved), self._positions)[0]

    def backward(self, own: OnStage[SendingItem], everywhere: Everywhere, *, shown: Fraction | None) -> Changes:
        """Runs a chunk backward and sends the cotangents of its inputs on.

        shown: the share of ticks in which the cotangents of the first chunk's inputs are shown, if there are any.
        """
        item, buffers, cotangents = own.item, own.buffers, everywhere.ends
        inputs_of, sends = self._inputs(own, everywhere), self.ticks.buffers.backward
        if sends.inbox.num_slots:
            waiting = [row(box, item.read) for box in buffers.inbox_back]
            # The head's cotangents come straight from this tick, unless they too wait in the inbox.
            cotangents = [jnp.where(item.last, x, w) for x, w in zip(cotangents, waiting, strict=True)] if cotangents else waiting
        with scopes.recompute():
            again: Arrays = []
            if self.keep_input:
                chunk_input = [_at(b, item.saved) for b in buffers.saved]
                _, again = self._through(item, inputs_of, chunk_input, self.layer.forward)

        def step(carry: tuple[Arrays, Arrays, Arrays], i: jax.Array) -> tuple[tuple[Arrays, Arrays, Arrays], None]:
            cotangents, stashed, sums = carry
            inputs = inputs_of(i, [])
            residuals = [_at(b, i) for b in again] if self.keep_input else [self._kept(b, item.saved, i) for b in buffers.saved]
            run = partial(self.layer.backward, inputs, residuals, cotangents)
            cotangents, ready, later = self._if_wanted(item, inputs, cotangents, run)
            sums = self._add(sums, ready, item, i, inputs.index)
            if self.ticks.apart:
                assert item.stashed is not None
                # Residuals that were computed again are gone after this item, so the weight gradients' item gets them too.
                later = [*later, *(residuals if self.keep_input else [])]
                stashed = [_put(b, x, item.stashed, i) for b, x in zip(stashed, later, strict=True)]
            return (cotangents, stashed, sums), None

        cotangents, stashed, sums = jax.lax.scan(step, (cotangents, buffers.stashed, buffers.sums), self._positions, reverse=True)[0]
        inbox = self._send(self.wire_back, item, sends.pairs, cotangents, buffers.inbox_back)
        new = StageBuffers(inbox_back=inbox, stashed=stashed, sums=sums)
        return new, self._show(self.wire_back, item.first, cotangents, everywhere, shown)

    def weight_gradients(self, own: OnStage[StageItem], everywhere: Everywhere) -> Changes:
        """Adds the gradients that backward did not compute to the sums."""
        item, buffers, num_stashed = own.item, own.buffers, len(self.layer.stashed_shapes)
        inputs_of, stashed = self._inputs(own, everywhere), item.stashed
        assert stashed is not None

        def step(sums: Arrays, i: jax.Array) -> tuple[Arrays, None]:
            inputs = inputs_of(i, [])
            later = [self._kept(b, stashed, i) for b in buffers.stashed]
            residuals = later[num_stashed:] if self.keep_input else [self._kept(b, item.saved, i) for b in buffers.saved]
            run = partial(self.layer.weight_gradients, inputs, residuals, later[:num_stashed])
            (gradients,) = self._if_wanted(item, inputs, None, lambda: (run(),))
            return self._add(sums, gradients, item, i, inputs.index), None

        return StageBuffers(sums=jax.lax.scan(step, buffers.sums, self._positions)[0]), []

    # -- what the items share ---------------------------------------------------------------------------------------------

    @property
    def _positions(self) -> jax.Array:
        return jnp.arange(self.chunks.layers_per_chunk)

    def _inputs(self, own: OnStage[SendingItem] | OnStage[StageItem], everywhere: Everywhere) -> InputsOf:
        """The inputs of the layers of the item's chunk. Values that are the same for all layers are computed here, once."""
        item: StageItem = own.item
        local = call(self.local, everywhere.batch.known(self.split, item.microbatch))

        def inputs_of(i: jax.Array, travel: Arrays) -> Inputs:
            at = item.chunk * self.chunks.layers_per_chunk + i
            # One layer at a time: a slice of the whole chunk would copy all of its weights in every tick.
            sliced = [_at(w, at) for w in own.weights]
            weights = [self.moves.gather_layer(v, x) for v, x in zip(self.split.weights, sliced, strict=True)]
            return LayerInputs(weights=weights, common=everywhere.common, local=local, index=_at(own.ids, at), travel=travel)

        return inputs_of

    def _kept(self, buffer: jax.Array, slot: Integers, i: jax.Array) -> jax.Array:
        """The values that the layer at a position has left in a slot, in row-major order."""
        return self.moves.row_major(_at(buffer, slot, i))

    def _if_wanted(self, item: StageItem, inputs: Inputs, passing: Arrays | None, run: Callable[[], _T]) -> _T:
        """The results of a layer's program; without an item garbage, or zeros if stages skip.

        passing: the values that padding hands on in place of the first result; None if that does not travel. Only the layer is in the
        branch: XLA copies what a branch hands through, and buffers are large.
        """
        if not self.ticks.skips:
            return run()

        def skipped() -> _T:
            first, *others = jax.tree.map(_zeros_of, jax.eval_shape(run))
            return cast(_T, (first if passing is None or not self.chunks.is_padded else passing, *others))

        wanted = item.on & (inputs.index >= 0) if self.chunks.is_padded else item.on
        return cast(_T, jax.lax.cond(wanted, run, skipped))

    def _add(self, sums: Arrays, gradients: Gradients, item: StageItem, i: jax.Array, layer: jax.Array) -> Arrays:
        """The sums with the gradients of the layer at a position of the item's chunk, if there is an item and the layer is not padding."""
        at, is_real, new = item.chunk * self.chunks.layers_per_chunk + i, item.on & (layer >= 0), list(sums)
        weights = dict(enumerate(self.split.differentiated(self.split.weights)))
        for index, gradient in gradients.items():
            total, wide = sums[index], gradient.astype(sums[index].dtype)
            part = self.moves.scatter_layer(weights[index], wide) if index in weights else wide
            # Garbage may be infinite: it is dropped, not multiplied away.
            part = jnp.where(is_real, part, 0)
            new[index] = _put(total, _at(total, at) + part, at) if index in weights else total + part
        return new

    def _send(self, wire: Wire, item: SendingItem, pairs: Mapping[int, Pairs], values: Arrays, inbox: Arrays) -> Arrays:
        """The inbox after every stage sent its values along each shift of the table.

        pairs: the (sender, receiver) stages of each shift.
        """
        # A shift is static, because ppermute needs its pairs at compile time; which slot a stage writes is data.
        for shift, slot in item.into.items():
            sent = values if shift == 0 else wire.send(values, pairs[shift])
            inbox = [_put(box, x, slot) for box, x in zip(inbox, sent, strict=True)]
        return inbox

    def _show(self, wire: Wire, flag: Flags, values: Arrays, everywhere: Everywhere, share: Fraction | None) -> Arrays:
        """The values of the one stage whose flag is set, on every stage; zeros in ticks that do not read them.

        share: the share of ticks that read them. All devices take the same branch.
        """
        if share is None:
            return []
        if everywhere.is_read is None or self.chunks.num_stages == 1:
            return wire.show(flag, values) if self.chunks.num_stages > 1 else values

        def show() -> Arrays:
            with scopes.branch_taken(share):
                return wire.show(flag, values)

        # The partitioner requires the same layout in both branches, and zeros have none of their own.
        return cast(Arrays, jax.lax.cond(everywhere.is_read, show, lambda: wire.pin([jnp.zeros_like(x) for x in values])))


def keep_cotangents(own: OnStage[Integers], everywhere: Everywhere) -> Changes:
    """Puts the head's cotangents into the inbox of the last chunk's stage, for a later tick; the item is the slot."""
    boxes = zip(own.buffers.inbox_back, everywhere.ends, strict=True)
    return StageBuffers(inbox_back=[jax.lax.dynamic_update_index_in_dim(box, x, own.item, 0) for box, x in boxes]), []


def _zeros_of(shape: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(shape.shape, shape.dtype)


def _start(buffer: jax.Array, index: tuple[Integers, ...]) -> list[Integers | np.int32]:
    """The first element of buffer[index], in one type: where x64 is enabled, Python's integers are of another than the table's."""
    # JAX counts traced integers below 0 from the end, which costs three operations for each.
    return [*(i.astype(np.int32) for i in index), *(np.int32(0),) * (buffer.ndim - len(index))]


def _at(buffer: jax.Array, *index: Integers) -> jax.Array:
    """buffer[index], where the index may be traced."""
    # dynamic_slice keeps the indexed dims, with the size 1. The reshape drops them.
    num = len(index)
    return jax.lax.dynamic_slice(buffer, _start(buffer, index), (*(1,) * num, *buffer.shape[num:])).reshape(buffer.shape[num:])


def _put(buffer: jax.Array, value: jax.Array, *index: Integers) -> jax.Array:
    """The buffer with buffer[index] replaced, where the index may be traced."""
    return jax.lax.dynamic_update_slice(buffer, value.astype(buffer.dtype)[(None,) * len(index)], _start(buffer, index))
