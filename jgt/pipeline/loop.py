"""The loop over a table's ticks on one data shard: the stages' items, with embedding and head between them.

One scan for each segment of the table runs its ticks. All devices run all ticks together, and none branches on where it is, because SPMD
programs deadlock when devices disagree about collectives. A stage without an item computes garbage, which is written to a slot that is
never read and masked out of every sum. All devices together skip embedding and head in ticks that have no microbatch for them.

The backward pass is written out here and not derived: `jax.grad` of the loop would keep residuals of every tick and run all backward passes
after all forward passes, which is gpipe whatever the table says. So the loss must be linear in its totals; then `seeds`, its derivative by
the totals of one microbatch, are known before the first tick.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import TypeVar, cast

import jax
import jax.numpy as jnp

from jgt.pipeline.arrays import Arrays, Flags, Integers, wide_zeros
from jgt.pipeline.chunks import Chunks
from jgt.pipeline.ends import EmbedAndHead
from jgt.pipeline.layer import Body, Layer, LayerInputs
from jgt.pipeline.links.moves import Moves, StageResults
from jgt.pipeline.links.wire import Wire
from jgt.pipeline.stage import Changes, Stage, keep_cotangents
from jgt.pipeline.ticks import Carry, EndItem, EndName, Everywhere, ItemName, OnStage, Segment, StageBuffers, Ticks, Work
from jgt.program import jaxpr as jx
from jgt.program import scopes

_T = TypeVar("_T")
_Item = TypeVar("_Item")

OnEach = Callable[[OnStage[_Item], Everywhere], StageResults]


class Loop:
    """One table, one program, one data shard.

    remat: the values that backward computes again. weights: [stages, layers of a stage, ...]. seeds: the derivative of the loss by the
    totals of one microbatch that are floats; None without gradients.
    """

    def __init__(self, ends: EmbedAndHead, moves: Moves, ticks: Ticks, chunks: Chunks, remat: str, weights: Arrays, seeds: Arrays | None):
        self._ends, self._moves, self._ticks, self._chunks = ends, moves, ticks, chunks
        self._split, self._seeds, self._weights = ends.split, seeds, weights
        # [stages, layers of a stage], with -1 for padding.
        self._ids = jnp.asarray(chunks.ids)
        self._stage = self._make_stage(remat)

    def run(self, carry: Carry) -> Carry:
        """The carry after the last tick, from the one before the first. Sums are added to those that it has."""
        for segment in self._ticks.segments:
            carry, _ = jax.lax.scan(partial(self._tick, segment), carry, jax.tree.map(_on_device, segment.work))
        return carry

    def _tick(self, segment: Segment, carry: Carry, work: Work) -> tuple[Carry, None]:
        from_head: Arrays = []
        if work.forward is not None:
            ends, pinned = self._ends, self._stage.wire.pin
            entering = self._maybe(segment, "embed", work.embed, lambda m, _: ends.embed(m), ends.no_travel, pinned)
            with self._counted(segment, "forward"):
                forward = partial(self._stage.forward, shown=_share(segment, "head"))
                buffers = StageBuffers(inbox=carry.staged.inbox, saved=carry.staged.saved)
                carry, leaving = self._on_stages(forward, carry, work.forward, buffers, entering, _flag(segment, "head", work.head))
            carry, from_head = self._head(segment, carry, work.head, leaving)
            # Some tables (gpipe) run the last chunk's backward item in a later tick than its forward item. The head's
            # cotangents wait for it in the inbox.
            if from_head and work.forward.from_head is not None:
                buffers = StageBuffers(inbox_back=carry.staged.inbox_back)
                carry, from_head = self._on_stages(keep_cotangents, carry, work.forward.from_head, buffers, from_head)
        if work.backward is not None:
            with self._counted(segment, "backward"), scopes.backward():
                buffers = replace(carry.staged, inbox=[])
                backward = partial(self._stage.backward, shown=_share(segment, "embed_back"))
                is_read = _flag(segment, "embed_back", work.embed_back)
                carry, entered = self._on_stages(backward, carry, work.backward, buffers, from_head, is_read)
            carry = self._embed_back(segment, carry, work.embed_back, entered)
        if work.weight is not None:
            with self._counted(segment, "weight"), scopes.backward():
                buffers = replace(carry.staged, inbox=[], inbox_back=[])
                carry, _ = self._on_stages(self._stage.weight_gradients, carry, work.weight, buffers, [])
        return carry, None

    def _counted(self, segment: Segment, name: ItemName) -> AbstractContextManager[object]:
        """Names the share of useful work, for readers of the compiled program: idle stages and padding layers add useless work."""
        return scopes.useful(segment.share(name) * self._chunks.share)

    def _maybe(
        self,
        segment: Segment,
        name: EndName,
        item: EndItem | None,
        do: Callable[[Integers, Flags | bool], _T],
        skip: Callable[[], _T],
        pinned: Callable[[_T], _T],
    ) -> _T:
        """do(microbatch, whether it counts), for work that not every tick has, and which the others skip.

        All devices take the same branch. pinned: gives the results of both branches one layout, which the partitioner requires; the zeros
        of the other branch have none.
        """
        if item is None:
            return skip()
        share, on, microbatch = segment.share(name), item.on, item.microbatch
        if name not in segment.branches:
            with scopes.useful(share):
                return do(microbatch, True if share == 1 else on)

        def wanted() -> _T:
            with scopes.branch_taken(share):
                return pinned(do(microbatch, True))

        return cast(_T, jax.lax.cond(on, wanted, lambda: pinned(skip())))

    # -- embedding and head ---------------------------------------------------------------------------------------------

    def _head(self, segment: Segment, carry: Carry, item: EndItem | None, leaving: Arrays) -> tuple[Carry, Arrays]:
        """The totals, and gradients, of the microbatch that left the last chunk; the cotangents that go back into it."""
        seeds = self._seeds

        def do(microbatch: Integers, on: Flags | bool) -> tuple[Arrays, Arrays, Arrays]:
            if seeds is None:
                return [], _add(carry.totals, self._ends.totals(microbatch, leaving), on), []
            # Loss and its derivative in one go: the head of a microbatch runs once, and its logits never leave the tick.
            totals, cotangents, gradients = self._ends.head(microbatch, leaving, seeds)
            return self._add_common(carry, gradients, on), _add(carry.totals, totals, on), cotangents

        def skip() -> tuple[Arrays, Arrays, Arrays]:
            # Both branches of a cond have to return the same shapes.
            cotangents = [] if seeds is None else self._ends.travel_floats.select(self._ends.no_travel())
            return carry.common, carry.totals, cotangents

        def pinned(results: tuple[Arrays, Arrays, Arrays]) -> tuple[Arrays, Arrays, Arrays]:
            if seeds is None:
                return results
            common, totals, cotangents = results
            return self._pin_common(common), totals, self._stage.wire_back.pin(cotangents)

        if item is None:
            return carry, []
        common, totals, cotangents = self._maybe(segment, "head", item, do, skip, pinned)
        return replace(carry, common=common, totals=totals), cotangents

    def _embed_back(self, segment: Segment, carry: Carry, item: EndItem | None, entered: Arrays) -> Carry:
        def do(microbatch: Integers, _: Flags | bool) -> Arrays:
            # The cotangents are zeros where nothing entered, and so are the gradients.
            return self._add_common(carry, self._ends.embed_back(microbatch, entered), True)

        return replace(carry, common=self._maybe(segment, "embed_back", item, do, lambda: carry.common, self._pin_common))

    def _add_common(self, carry: Carry, gradients: Arrays, on: Flags | bool) -> Arrays:
        """The sums of the gradients of common values, each where its value is.

        The first carry is pinned, too, but inside a branch the partitioner would not see that, and gather the table's gradient in
        every tick.
        """
        return self._pin_common(_add(carry.common, self._pin_common(gradients), on))

    def _pin_common(self, gradients: Arrays) -> Arrays:
        variables = self._split.differentiated(self._split.common)
        return [self._moves.pin(v, g) for v, g in zip(variables, gradients, strict=True)]

    # -- the items of the stages ------------------------------------------------------------------------------------------

    def _on_stages(
        self, work: OnEach[_Item, Changes], carry: Carry, item: _Item, buffers: StageBuffers, ends: Arrays, is_read: Flags | None = None
    ) -> tuple[Carry, Arrays]:
        """The carry with the buffers that `work` changed on every stage, and the values that it shows on all of them.

        buffers: the buffers that `work` reads. ends, is_read: fields of `Everywhere`.
        """
        results = self._on_every_stage(work, item, buffers, ends, (True, False), is_read)
        # XLA dissolves a loop over one layer, fuses what one item writes into what the next one reads, and copies whole
        # buffers for it. A loop over more layers keeps the items apart without help.
        changed, shown = jax.lax.optimization_barrier(results) if self._chunks.layers_per_chunk == 1 else results
        return replace(carry, staged=carry.staged.updated(changed)), shown

    def _on_every_stage(
        self,
        fn: OnEach[_Item, StageResults],
        item: _Item,
        buffers: StageBuffers,
        ends: Arrays,
        has_stages: tuple[bool, ...],
        is_read: Flags | None = None,
    ) -> StageResults:
        common = dict(zip(self._split.common, self._ends.common, strict=True))
        own = OnStage(buffers=buffers, ids=self._ids, item=item, weights=self._weights)
        in_layers = [common[v] for v in self._split.in_layers]
        everywhere = Everywhere(batch=self._ends.batch, common=in_layers, ends=ends, is_read=is_read)
        return self._moves.on_every_stage(fn, own, everywhere, has_stages)

    # -- before the first tick ----------------------------------------------------------------------------------------------

    def _make_stage(self, remat: str) -> Stage:
        """The programs of a layer, traced as in the shard_map in which they run."""
        split, moves, rewrite, travel = self._split, self._moves, self._ends.rewrite, self._ends.travel_shapes
        common = dict(zip(split.common, self._ends.common, strict=True))
        with moves.as_on_a_stage():
            local = split.local.changed(lambda p: rewrite(p, split.place))
            body = Body(split=split, program=rewrite(split.scan.params["jaxpr"], split.place), is_padded=self._chunks.is_padded)
            dims = body.travel_dims(travel, moves.axes_inside)
            # One layer on one stage: without the dims of stages and of layers.
            layers = [jax.ShapeDtypeStruct(w.shape[2:], w.dtype) for w in self._weights]
            shapes = LayerInputs(
                weights=[jax.eval_shape(partial(moves.gather_layer, v), x) for v, x in zip(split.weights, layers, strict=True)],
                common=[jax.ShapeDtypeStruct(common[v].shape, common[v].dtype) for v in split.in_layers],
                local=[jx.struct_of(a) for a in local.outputs],
                index=jax.ShapeDtypeStruct((), jnp.int32),
                travel=travel,
            )
            weights, in_layers = split.floats(split.weights), split.floats(split.in_layers)
            layer = Layer(body, shapes, weights, in_layers, recompute=remat == "layer", apart=self._ticks.apart)
        return Stage(
            split=split,
            moves=moves,
            chunks=self._chunks,
            ticks=self._ticks,
            layer=layer,
            local=local,
            wire=Wire(moves=moves, dims=tuple(dims)),
            wire_back=Wire(moves=moves, dims=tuple(self._ends.travel_floats.select(dims))),
            keep_input=remat == "stage",
            trains=self._seeds is not None and split.goes_back,
        )

    def first_carry(self) -> Carry:
        """Zeros for everything that ticks carry."""
        ends, moves = self._ends, self._moves

        def make(own: OnStage[None], everywhere: Everywhere) -> tuple[StageBuffers]:
            return (self._stage.empty_buffers(ends.travel_shapes, own.weights, everywhere.common),)

        # The zeros are made inside the shard_map, in which all shapes belong to one stage.
        (staged,) = self._on_every_stage(make, None, StageBuffers(), [], (True,))
        totals = [wide_zeros(jx.struct_of(t.var)) for t in self._split.totals]
        if self._seeds is None:
            return Carry(common=[], staged=staged, totals=totals)
        split = self._split
        common = self._pin_common([wide_zeros(c) for c in split.floats(split.common).select(ends.common)])
        floats = split.differentiated(split.weights)
        # Without this the partitioner may keep the sums, which are as large as the weights, whole on every device of a stage.
        weights = [moves.on_stages(v, s) for v, s in zip(floats, staged.sums, strict=False)]
        return Carry(common=common, staged=replace(staged, sums=[*weights, *staged.sums[len(weights) :]]), totals=totals)


def _share(segment: Segment, name: EndName) -> Fraction | None:
    """The share of the ticks in which this end reads what the stages show; None in a segment without it."""
    return segment.share(name) if getattr(segment.work, name) is not None else None


def _flag(segment: Segment, name: EndName, item: EndItem | None) -> Flags | None:
    """Whether this end reads what the stages show in this tick, if it does not in every one."""
    return item.on if item is not None and name in segment.branches else None


def _on_device(x: Integers | Flags) -> jax.Array:
    return jnp.asarray(x)


def _add(sums: Arrays, values: Arrays, on: Flags | bool) -> Arrays:
    added = [s + v.astype(s.dtype) for s, v in zip(sums, values, strict=True)]
    return added if on is True else [jnp.where(on, a, s) for a, s in zip(added, sums, strict=True)]
