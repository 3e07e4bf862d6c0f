"""The loop over a table's ticks on one data shard: slots of the layers on every stage, embedding and head between them.

All stages go through the same ticks, and nobody branches on where it is: a stage without an item computes garbage, which
is dropped. What ticks leave for each other waits in buffers with a stage dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jgt import scopes
from jgt.pipeline.ends import Batch, Ends, call
from jgt.pipeline.floats import Values, float_variables, is_float, wide_zeros
from jgt.pipeline.layer import Body, Layer, Shapes
from jgt.pipeline.layout import Layout
from jgt.pipeline.schedule import Kind
from jgt.pipeline.slots import Chunk, Stage, Sums
from jgt.pipeline.stages import Stages
from jgt.pipeline.ticks import Segment, Ticks

State = dict[str, Any]
"""What a tick leaves for the next. staged: buffers on every stage; totals; with gradients sums and common, too."""


class Loop:
    """One table, one program, one data shard. weights: staged; seeds: of one microbatch, None without gradients."""

    def __init__(
        self,
        ends: Ends,
        layout: Layout,
        ticks: Ticks,
        stages: Stages,
        weights: Values,
        seeds: Values | None,
        *,
        remat: str,
        gather_layers: bool,
        skips: bool,
    ):
        self._ends, self._layout, self._ticks, self._stages = ends, layout, ticks, stages
        self._split = ends.split
        self._seeds = seeds
        self._staged = {"weights": weights, "ids": jnp.asarray(stages.ids)}
        self._gather_layers = gather_layers
        self._apart = ticks.table.weight is not None and seeds is not None
        self._stage = self._make_stage(remat, skips=skips)

    def run(self) -> State:
        """The state after the last tick."""
        state = self._start()
        for segment in self._ticks.segments:
            rows = jax.tree.map(jnp.asarray, {"staged": segment.staged, "common": segment.common})
            state, _ = jax.lax.scan(partial(self._tick, segment), state, rows)
        return state

    def _tick(self, segment: Segment, state: State, rows: Mapping[str, Any]) -> tuple[State, None]:
        work, items = rows["common"], rows["staged"]
        from_head: Values = []
        if "F" in segment.kinds:
            entering = self._maybe(segment, work, "embed", lambda m, _: self._ends.embed(m), self._ends.no_travel)
            with self._counted(segment, "F"):
                state, leaving = self._forward(segment, state, items["F"], entering)
            state, from_head = self._head(segment, state, work, leaving)
            if from_head and self._ticks.buffers.head_waits:
                state, from_head = self._wait(state, items["F"]["from_head"], from_head), []
        if "B" in segment.kinds:
            with self._counted(segment, "B"), scopes.backward():
                state, entered = self._backward(state, items["B"], from_head)
            state = self._embed_back(segment, state, work, entered)
        if "W" in segment.kinds:
            with self._counted(segment, "W"), scopes.backward():
                state = self._weight_gradients(state, items["W"])
        return state, None

    def _counted(self, segment: Segment, kind: Kind) -> AbstractContextManager[None]:
        """Slots without an item, and layers that are padding, are work for nothing."""
        return scopes.useful(segment.share(kind) * self._stages.share)

    def _maybe(self, segment: Segment, work: Mapping[str, Any], name: str, do: Callable[[Any, Any], Any], skip: Callable[[], Any]) -> Any:
        """do(microbatch, whether it counts), for work that not every tick has: skipped where that is worth a branch.

        All devices take the branch together.
        """
        if name not in segment.common:
            return skip()
        on, microbatch = work[name]["on"], work[name]["microbatch"]
        if name not in segment.rarely:
            with scopes.useful(segment.share(name)):
                return do(microbatch, True if name in segment.always else on)

        def wanted() -> Any:
            with scopes.taken(segment.share(name)):
                return do(microbatch, True)

        return jax.lax.cond(on, wanted, skip)

    # -- embedding and head ---------------------------------------------------------------------------------------------

    def _head(self, segment: Segment, state: State, work: Mapping[str, Any], leaving: Values) -> tuple[State, Values]:
        """The totals, and gradients, of the microbatch that left the last chunk; the cotangents that go back into it."""
        names = ("totals",) if self._seeds is None else ("totals", "common")
        old = {name: state[name] for name in names}

        def do(microbatch: Any, on: Any) -> tuple[State, Values]:
            if self._seeds is None:
                return {"totals": _added(old["totals"], self._ends.totals(microbatch, leaving), on)}, []
            totals, cotangents, gradients = self._ends.head(microbatch, leaving, self._seeds)
            return {"totals": _added(old["totals"], totals, on), "common": _added(old["common"], gradients, on)}, cotangents

        def skip() -> tuple[State, Values]:
            return old, [] if self._seeds is None else self._ends.travel_floats.take(self._ends.no_travel())

        if "head" not in segment.common:
            return state, []
        new, cotangents = self._maybe(segment, work, "head", do, skip)
        return state | new, cotangents

    def _embed_back(self, segment: Segment, state: State, work: Mapping[str, Any], entered: Values) -> State:
        old = state["common"]

        def do(microbatch: Any, _: Any) -> Values:
            # The cotangents are zeros where nothing entered, and so are the gradients.
            return _added(old, self._ends.embed_back(microbatch, entered), True)

        return state | {"common": self._maybe(segment, work, "embed_back", do, lambda: old)}

    # -- the slots of the layers ------------------------------------------------------------------------------------------

    def _forward(self, segment: Segment, state: State, item: Any, entering: Values) -> tuple[State, Values]:
        """All stages' forward slots; what left the last chunk."""
        sends = self._ticks.buffers.forward

        def slot(own: Any, everywhere: Any) -> tuple[State, Values]:
            item, buffers, travel = own["item"], dict(own["buffers"]), everywhere["entering"]
            chunk = self._chunk(own, everywhere)
            if sends.inbox.num_slots:
                travel = [jnp.where(item["first"], x, _read(box, item["read"])) for x, box in zip(travel, buffers["inbox"], strict=True)]
            if self._seeds is None:
                travel = self._stage.evaluate(item, chunk, travel)
            else:
                travel, buffers["saved"] = self._stage.forward(item, chunk, travel, buffers["saved"])
            buffers["inbox"] = self._stage.sent(item, sends.pairs, travel, buffers["inbox"])
            return buffers, self._stage.shown(item["last"], travel) if "head" in segment.common else []

        names = ("inbox",) if self._seeds is None else ("inbox", "saved")
        return self._slot(slot, state, item, names, {"entering": entering}, shows=True)

    def _backward(self, state: State, item: Any, from_head: Values) -> tuple[State, Values]:
        """All stages' backward slots; the cotangents of what entered the first chunk."""
        sends = self._ticks.buffers.backward

        def slot(own: Any, everywhere: Any) -> tuple[State, Values]:
            item, buffers, cotangents = own["item"], dict(own["buffers"]), everywhere["from_head"]
            chunk = self._chunk(own, everywhere)
            if sends.inbox.num_slots:
                waiting = [_read(box, item["read"]) for box in buffers["inbox_back"]]
                cotangents = [jnp.where(item["last"], x, w) for x, w in zip(cotangents, waiting, strict=True)] if cotangents else waiting
            cotangents, buffers["stashed"], buffers["sums"] = self._stage.backward(
                item, chunk, cotangents, buffers.pop("saved"), buffers["stashed"], buffers["sums"]
            )
            buffers["inbox_back"] = self._stage.sent(item, sends.pairs, cotangents, buffers["inbox_back"])
            return buffers, self._stage.shown(item["first"], cotangents)

        names = ("inbox_back", "saved", "stashed", "sums")
        return self._slot(slot, state, item, names, {"from_head": from_head}, shows=True)

    def _weight_gradients(self, state: State, item: Any) -> State:
        def slot(own: Any, everywhere: Any) -> tuple[State, Values]:
            buffers = own["buffers"]
            chunk = self._chunk(own, everywhere)
            sums = self._stage.weight_gradients(own["item"], chunk, buffers["saved"], buffers["stashed"], buffers["sums"])
            return {"sums": sums}, []

        return self._slot(slot, state, item, ("saved", "stashed", "sums"), {})[0]

    def _wait(self, state: State, slots: Any, from_head: Values) -> State:
        """The head's cotangents put into the inbox of the last chunk's stage, for a later tick."""

        def slot(own: Any, everywhere: Any) -> tuple[State, Values]:
            boxes = zip(own["buffers"]["inbox_back"], everywhere["from_head"], strict=True)
            return {"inbox_back": [jax.lax.dynamic_update_index_in_dim(box, x, own["item"], 0) for box, x in boxes]}, []

        return self._slot(slot, state, slots, ("inbox_back",), {"from_head": from_head})[0]

    def _slot(
        self, fn: Callable[..., Any], state: State, item: Any, names: tuple[str, ...], more: Mapping[str, Any], *, shows: bool = False
    ) -> tuple[State, Values]:
        """fn(own, everywhere) → (the buffers of these names that change, what all stages see), on every stage."""
        own = self._staged | {"item": item, "buffers": {name: state["staged"][name] for name in names}}
        found = self._on_every_stage(fn, own, self._everywhere() | dict(more), (True, not shows))
        # XLA dissolves a loop over one layer, fuses what one slot writes into what the next one reads, and copies whole
        # buffers for it. A loop over more layers keeps the slots apart by itself.
        changed, shown = jax.lax.optimization_barrier(found) if self._stages.per_chunk == 1 else found
        return state | {"staged": state["staged"] | changed}, shown

    def _on_every_stage(self, fn: Callable[..., Any], own: Any, everywhere: Any, out: tuple[bool, ...]) -> Any:
        return self._layout.on_every_stage(fn, own, everywhere, out)

    def _everywhere(self) -> dict[str, Any]:
        common = dict(zip(self._split.common, self._ends.common, strict=True))
        return {"batch": self._ends.batch.arrays, "common": [common[v] for v in self._split.in_layers]}

    def _chunk(self, own: Mapping[str, Any], everywhere: Mapping[str, Any]) -> Chunk:
        batch: Batch = self._ends.batch.with_arrays(everywhere["batch"])
        local = call(self._stage.local, batch.known(self._split, own["item"]["microbatch"]))
        return Chunk(weights=own["weights"], ids=own["ids"], common=everywhere["common"], local=local)

    # -- before the first tick ----------------------------------------------------------------------------------------------

    def _make_stage(self, remat: str, *, skips: bool) -> Stage:
        """The programs of a layer, traced where they will run."""
        made: list[Stage] = []
        split, layout = self._split, self._layout

        def gather(weights: Values) -> Values:
            return [layout.gathered_layer(v, x) for v, x in zip(split.weights, weights, strict=True)] if self._gather_layers else weights

        with_gradients = float_variables(split.weights)

        def scatter(index: int, gradient: Any) -> Any:
            return layout.scattered_layer(with_gradients[index], gradient) if self._gather_layers else gradient

        def make(own: Any, everywhere: Any) -> tuple[()]:
            local = split.local.changed(lambda p: self._ends.rewrite(p, split.place))
            body = Body(split, self._ends.rewrite(split.scan.params["jaxpr"], split.place), is_padded=self._stages.is_padded)
            shapes = Shapes(
                weights=jax.eval_shape(lambda stacked: gather([x[0] for x in stacked]), own["weights"]),
                common=[jax.ShapeDtypeStruct(c.shape, c.dtype) for c in everywhere["common"]],
                local=[jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in local.outputs],
                travel=self._ends.travel_shapes,
            )
            stage = Stage(
                layer=Layer(body, shapes, recompute=remat == "layer", apart=self._apart),
                local=local,
                axis=layout.axis,
                num_stages=self._stages.num_stages,
                per_chunk=self._stages.per_chunk,
                gather=gather,
                scatter=scatter,
                keep_input=remat == "stage",
                apart=self._apart,
                skips=skips,
            )
            made.append(stage)
            return ()

        self._on_every_stage(make, self._staged, self._everywhere(), ())
        return made[0]

    def _start(self) -> State:
        """Zeros for all that the ticks carry."""
        ends, stage, buffers, per_chunk = self._ends, self._stage, self._ticks.buffers, self._stages.per_chunk
        layer = stage.layer

        def zeros(shapes: Values, *lead: int) -> Values:
            return [jnp.zeros((*lead, *s.shape), s.dtype) for s in shapes]

        def make(own: Any, everywhere: Any) -> tuple[State]:
            inbox = {"inbox": zeros(ends.travel_shapes, buffers.forward.inbox.num_slots)}
            if self._seeds is None:
                return (inbox,)
            kept = zeros(ends.travel_shapes, buffers.saved.num_slots) if stage.keep_input else zeros(layer.saved_shapes, buffers.saved.num_slots, per_chunk)
            return (
                inbox
                | {
                    "inbox_back": zeros(ends.travel_floats.take(ends.travel_shapes), buffers.backward.inbox.num_slots),
                    "saved": kept,
                    "stashed": zeros(stage.stashed_shapes, buffers.stashed.num_slots, per_chunk),
                    "sums": Sums(*([wide_zeros(x) for x in values if is_float(x)] for values in (own["weights"], everywhere["common"]))),
                },
            )

        (staged,) = self._on_every_stage(make, self._staged, self._everywhere(), (True,))
        state: State = {"staged": staged, "totals": ends.no_totals()}
        if self._seeds is not None:
            kept = zip(self._split.common, ends.common, strict=True)
            state["common"] = [self._layout.pinned(v, wide_zeros(c)) for v, c in kept if is_float(c)]
            floats = float_variables(self._split.weights)
            staged["sums"] = Sums([self._layout.on_stages(v, s) for v, s in zip(floats, staged["sums"].weights, strict=True)], staged["sums"].common)
        return state


def _read(buffer: Any, slot: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(buffer, slot, keepdims=False)


def _added(sums: Values, values: Values, on: Any) -> Values:
    """The sums with values added, where they count."""
    added = [s + v.astype(s.dtype) for s, v in zip(sums, values, strict=True)]
    return added if on is True else [jnp.where(on, a, s) for a, s in zip(added, sums, strict=True)]
