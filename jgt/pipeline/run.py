"""The executor: runs any table in one SPMD program.

Two shard_maps stand inside each other. The outer one makes the axes that split the batch manual, so that gradients are
reduced over them once, after the loop. In it, embedding and head see the stage axis as any other: their vocabulary may be
sharded over it. The inner one makes the stage axis manual for the slots of the layers. All stages go through the same
ticks; nobody branches on where it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jgt import jaxpr as jx
from jgt.jaxpr import Place, Program, Var
from jgt.parts import Part
from jgt.pipeline.layer import Body, Floats, Layer, Shapes, Values, raw, raw_shape, whole_like
from jgt.pipeline.schedule import Table
from jgt.pipeline.slots import Chunk, Stage, Sums
from jgt.pipeline.split import Split
from jgt.pipeline.stages import Stages
from jgt.pipeline.ticks import Segment, arrays_of

Dims = tuple[tuple[str, ...], ...]
FREE = PartitionSpec.UNCONSTRAINED


@dataclass(frozen=True, kw_only=True)
class Input:
    """An argument that is no parameter: split into microbatches by rows, a random key of which each part gets its own, or whole."""

    kind: Literal["rows", "key", "whole"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What of the layers is recomputed, and when weights that are sharded over the batch's axes are gathered."""

    remat: Literal["none", "layer", "stage"] = "none"
    gather: Literal["step", "layer"] = "step"


@dataclass(frozen=True, kw_only=True)
class Results:
    """The totals of a step, and the gradients of weights and common values."""

    totals: Values
    weights: Values
    common: Values


class Executor:
    """One split program, ready to run by tables on a mesh.

    dims: the axes of each dim of weights and common values; None: not known. rewrite: puts constraints into a program that
    stands at a place, where the call is made. keeps: the policy of what `remat: layer` saves all the same.
    """

    def __init__(
        self,
        split: Split,
        *,
        mesh: Mesh | AbstractMesh,
        axis: str,
        batch_axes: tuple[str, ...],
        inputs: Sequence[Input],
        dims: Mapping[Var, Dims],
        rewrite: Callable[[Program, Place], Program],
        options: Options,
    ):
        self.split, self.mesh, self.axis, self.batch_axes = split, mesh, axis, batch_axes
        self.inputs, self.dims, self.rewrite, self.options = inputs, dims, rewrite, options
        self.num_shards = math.prod(dict(mesh.shape)[a] for a in batch_axes)

    def evaluate(self, table: Table, weights: Values, common: Values, inputs: Values, statistics: Values) -> Values:
        """The totals, forward only."""

        def run(weights: Values, common: Values, inputs: Values, statistics: Values) -> Values:
            return _Run(self, table.forward_only(), weights, common, inputs, statistics, None).totals()

        specs = ([self._manual(v) for v in self.split.weights], [self._manual(v) for v in self.split.common], self._input_specs(), PartitionSpec())
        return self.manual(run, self.batch_axes, specs, PartitionSpec())(weights, common, inputs, statistics)

    def train(self, table: Table, weights: Values, common: Values, inputs: Values, statistics: Values, seeds: Values) -> Results:
        """The totals, and the gradients of Σ seed · total; seeds of totals that are no floats are ignored."""

        def run(weights: Values, common: Values, inputs: Values, statistics: Values, seeds: Values) -> tuple[Values, Values, Values]:
            return _Run(self, table, weights, common, inputs, statistics, seeds).results()

        w, c = [self._manual(v) for v in self.split.weights], [self._manual(v) for v in self.split.common]
        specs = (w, c, self._input_specs(), PartitionSpec(), PartitionSpec())
        out = (PartitionSpec(), self.floats(self.split.weights).take(w), self.floats(self.split.common).take(c))
        totals, dw, dc = self.manual(run, self.batch_axes, specs, out)(weights, common, inputs, statistics, seeds)
        return Results(totals=totals, weights=dw, common=dc)

    def manual(self, fn: Callable[..., Any], axes: Sequence[str], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """shard_map over some axes; over none of them the function itself."""
        if not axes:
            return fn
        around = jx.mesh_around()
        mesh = {"mesh": self.mesh} if around is None else {}
        # Gradients are taken inside, of local functions: no collective is ever differentiated, and programs that were
        # traced outside know nothing of varying axes.
        return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes), check_vma=False, **mesh)

    def pinned(self, x: Any, spec: PartitionSpec) -> Any:
        """A value with its sharding over the axes that are not manual."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(jx.mesh_around() or self.mesh, spec))

    @staticmethod
    def floats(variables: Sequence[Var]) -> Floats:
        """Which of some variables have gradients."""
        return Floats.among([v.aval for v in variables])

    def manual_axes(self, var: Var) -> list[tuple[str, ...]]:
        """The batch axes of each dim of a value, as it is stored."""
        return [tuple(a for a in axes if a in self.batch_axes) for axes in self.dims.get(var, ())]

    def _manual(self, var: Var) -> PartitionSpec:
        return PartitionSpec(*[axes or None for axes in self.manual_axes(var)])

    def auto(self, var: Var) -> PartitionSpec | None:
        """The other axes of each dim; None when not known."""
        if var not in self.dims:
            return None
        return PartitionSpec(*[tuple(a for a in axes if a not in self.batch_axes) or None for axes in self.dims[var]])

    def _input_specs(self) -> list[PartitionSpec]:
        return [PartitionSpec(self.batch_axes or None) if i.kind == "rows" else PartitionSpec() for i in self.inputs]


class _Run:
    """One run of a table on one data shard; `seeds` are None in an evaluation."""

    def __init__(
        self, executor: Executor, table: Table, weights: Values, common: Values, inputs: Values, statistics: Values, seeds: Values | None
    ):
        self.executor, self.split, self.seeds, self.statistics = executor, executor.split, seeds, statistics
        self.axis, self.mesh = executor.axis, executor.mesh
        self.ticks = arrays_of(table)
        self.num_microbatches = table.num_microbatches
        self.stages = Stages(num_layers=self.split.num_layers, num_stages=table.num_stages, stages=table.stages)
        self.by_step = executor.options.gather == "step"
        if self.by_step:
            weights = [self._gathered(v, w) for v, w in zip(self.split.weights, weights, strict=True)]
        self.common = [self._gathered(v, c, pin=True) for v, c in zip(self.split.common, common, strict=True)]
        self.weights = [self._staged(v, w) for v, w in zip(self.split.weights, weights, strict=True)]
        self.inputs = [self._microbatched(i, x) for i, x in zip(executor.inputs, inputs, strict=True)]
        batch_axes = executor.batch_axes
        self.shard = jax.lax.axis_index(batch_axes) if batch_axes else jnp.int32(0)
        self.embed = self.split.embed.changed(lambda p: executor.rewrite(p, Place()))
        self.head = self.split.head.changed(lambda p: executor.rewrite(p, Place()))
        self.common_floats = Executor.floats(self.split.common)
        self.travel_shapes = [raw_shape(a.aval) for a in self.split.travel] + [raw_shape(v.aval) for v in self.split.ys]
        self.travel_floats = Floats.among(self.travel_shapes)
        self.total_floats = Floats.among([t.var.aval for t in self.split.totals])
        self.stage = self._make_stage()

    # -- what runs before and after the loop ------------------------------------------------------------------------

    def totals(self) -> Values:
        """The totals of all microbatches and data shards."""
        return self._finished(self._loop()["totals"])

    def results(self) -> tuple[Values, Values, Values]:
        """The totals and the gradients, reduced over the batch's axes and laid out like what they belong to."""
        state = self._loop()
        weight_floats = Executor.floats(self.split.weights)
        kept = [v for v, f in zip(self.split.weights, weight_floats.which, strict=True) if f]
        dw = [self._reduced(v, self._unstaged(v, g), scatter=self.by_step) for v, g in zip(kept, state["sums"].weights, strict=True)]
        shared = self.common_floats.take(self.split.common)
        in_layers = dict(zip(Executor.floats(self.split.in_layers).take(self.split.in_layers), state["sums"].common, strict=True))
        dc = [
            self._reduced(v, self._pinned(v, g if v not in in_layers else g + jnp.sum(in_layers[v], axis=0)), scatter=True)
            for v, g in zip(shared, state["common"], strict=True)
        ]
        return self._finished(state["totals"]), dw, dc

    def _finished(self, totals: Values) -> Values:
        axes = self.executor.batch_axes
        parts = self.num_microbatches * self.executor.num_shards
        summed = [jax.lax.psum(t, axes) if axes else t for t in totals]
        done = [s / parts if t.is_mean else s for s, t in zip(summed, self.split.totals, strict=True)]
        return [d.astype(t.var.aval.dtype) for d, t in zip(done, self.split.totals, strict=True)]

    def _gathered(self, var: Var, x: Any, *, pin: bool = False) -> Any:
        for dim, axes in enumerate(self.executor.manual_axes(var)):
            if axes:
                x = jax.lax.all_gather(x, axes, axis=dim, tiled=True)
        return self._pinned(var, x) if pin else x

    def _pinned(self, var: Var, x: Any) -> Any:
        spec = self.executor.auto(var)
        return x if spec is None or not any(spec) else self.executor.pinned(x, spec)

    def _reduced(self, var: Var, gradient: Any, *, scatter: bool) -> Any:
        stored = self.executor.manual_axes(var)
        over = tuple(a for a in self.executor.batch_axes if not any(a in axes for axes in stored))
        if over:
            gradient = jax.lax.psum(gradient, over)
        if scatter:
            for dim, axes in enumerate(stored):
                if axes:
                    gradient = jax.lax.psum_scatter(gradient, axes, scatter_dimension=dim, tiled=True)
        return gradient.astype(var.aval.dtype)

    def _staged_spec(self, var: Var) -> PartitionSpec:
        auto = self.executor.auto(var)
        rest = [FREE] * (len(var.aval.shape) - 1) if auto is None else [*auto, *[None] * len(var.aval.shape)][1 : len(var.aval.shape)]
        return PartitionSpec(self.axis, None, *rest)

    def _staged(self, var: Var, x: Any) -> Any:
        """[layers, ...] → [stages, layers of a stage, ...]."""
        return self.executor.pinned(self.stages.arrange(x), self._staged_spec(var))

    def _unstaged(self, var: Var, x: Any) -> Any:
        return self._pinned(var, self.stages.restore(self.executor.pinned(x, self._staged_spec(var))))

    def _microbatched(self, one: Input, x: Any) -> Any:
        return x.reshape(self.num_microbatches, -1, *x.shape[1:]) if one.kind == "rows" else x

    # -- one microbatch -----------------------------------------------------------------------------------------------

    def _inputs_of(self, microbatch: Any, inputs: Values, shard: Any) -> Values:
        def one(kind: str, x: Any) -> Any:
            if kind == "rows":
                return jax.lax.dynamic_index_in_dim(x, microbatch, keepdims=False)
            return jax.random.fold_in(x, microbatch * self.executor.num_shards + shard) if kind == "key" else x

        return [one(i.kind, x) for i, x in zip(self.executor.inputs, inputs, strict=True)]

    def _known(self, microbatch: Any, common: Values) -> dict[Var, Any]:
        micro_inputs = self._micro_inputs
        return {
            **dict(zip(micro_inputs, self._inputs_of(microbatch, self.inputs, self.shard), strict=True)),
            **dict(zip(self.split.statistics, self.statistics, strict=True)),
            **dict(zip(self.split.common, common, strict=True)),
        }

    @property
    def _micro_inputs(self) -> tuple[Var, ...]:
        return self.split.inputs

    def _embedded(self, microbatch: Any, common: Values) -> Values:
        """What enters the first chunk."""
        moving = _apply(self.embed, self._known(microbatch, common))
        zeros = [jnp.zeros(s.shape, s.dtype) for s in self.travel_shapes[len(moving) :]]
        return [*map(raw, moving), *zeros]

    def _embed_back(self, microbatch: Any, cotangents: Values, sums: Values) -> Values:
        def embed(common: Values) -> Values:
            return self.travel_floats.take(self._embedded(microbatch, self._with_floats(common)))

        _, derivative = jax.vjp(embed, self.common_floats.take(self.common))
        return self._added(sums, derivative(cotangents)[0])

    def _with_floats(self, floats: Values) -> Values:
        return self.common_floats.merge(floats, self.common_floats.leave(self.common))

    def _totals_of(self, microbatch: Any, travel: Values, common: Values) -> Values:
        num = len(self.split.travel)
        results = self.split.scan.outvars
        num_carry = num - self.split.num_extras
        known = self._known(microbatch, common)
        known |= {var: whole_like(x, var.aval) for var, x in zip(results[:num_carry], travel, strict=False)}
        known |= {var: whole_like(x, var.aval) for var, x in zip(self.split.travel[num_carry:], travel[num_carry:num], strict=True)}
        known |= dict(zip(self.split.ys, travel[num:], strict=True))
        return _apply(self.head, known)

    def _head(self, microbatch: Any, on: Any, travel: Values, state: dict[str, Any], *, train: bool) -> tuple[dict[str, Any], Values]:
        """The totals of one microbatch added; with `train` the cotangents of what left the last chunk, and gradients added."""

        def added(totals: Values, new: Values) -> Values:
            return [t + jnp.where(on, n.astype(t.dtype), 0) for t, n in zip(totals, new, strict=True)]

        if not train:
            return {**state, "totals": added(state["totals"], self._totals_of(microbatch, travel, self.common))}, []
        floats, others = self.travel_floats.take(travel), self.travel_floats.leave(travel)

        def head(floats: Values, common: Values) -> tuple[Values, Values]:
            found = self._totals_of(microbatch, self.travel_floats.merge(floats, others), self._with_floats(common))
            return self.total_floats.take(found), self.total_floats.leave(found)

        found, derivative, counts = jax.vjp(head, floats, self.common_floats.take(self.common), has_aux=True)
        cotangents, gradients = derivative(self._seeds())
        return {
            **state,
            "totals": added(state["totals"], self.total_floats.merge(found, counts)),
            "common": self._added(state["common"], gradients, on),
        }, cotangents

    def _seeds(self) -> Values:
        assert self.seeds is not None
        parts = self.num_microbatches * self.executor.num_shards
        seeds = [s / parts if t.is_mean else s for s, t in zip(self.seeds, self.split.totals, strict=True)]
        return [s.astype(t.var.aval.dtype) for s, t in zip(self.total_floats.take(seeds), self.total_floats.take(self.split.totals), strict=True)]

    @staticmethod
    def _added(sums: Values, gradients: Values, on: Any = True) -> Values:
        if on is True:
            return [s + g.astype(s.dtype) for s, g in zip(sums, gradients, strict=True)]
        return [jnp.where(on, s + g.astype(s.dtype), s) for s, g in zip(sums, gradients, strict=True)]

    # -- the slots, on one stage ----------------------------------------------------------------------------------------

    def _staged_call(self, fn: Callable[..., Any], staged: Any, common: Any, out: Any) -> Any:
        """fn(staged, common) on every stage: `staged` has a leading stage dim, which fn does not see; results as `out` says.

        out: a tree prefix of True (has a stage dim) and False (the same on all stages).
        """

        def local(staged: Any, common: Any) -> Any:
            found = fn(jax.tree.map(lambda x: x.reshape(x.shape[1:]), staged), common)
            return tuple(jax.tree.map(lambda x: x[None], f) if o else f for f, o in zip(found, out, strict=True))

        specs = tuple(PartitionSpec(self.axis) if o else PartitionSpec() for o in out)
        axes = (self.axis,) if self.stages.num_stages > 1 else ()
        return self.executor.manual(local, axes, (PartitionSpec(self.axis), PartitionSpec()), specs)(staged, common)

    def _everywhere(self) -> dict[str, Any]:
        by_var = dict(zip(self.split.common, self.common, strict=True))
        return {"common": [by_var[v] for v in self.split.in_layers], "inputs": self.inputs, "shard": self.shard, "statistics": self.statistics}

    def _chunk(self, item: Mapping[str, Any], staged: Mapping[str, Any], everywhere: Mapping[str, Any]) -> Chunk:
        known = {
            **dict(zip(self._micro_inputs, self._inputs_of(item["microbatch"], everywhere["inputs"], everywhere["shard"]), strict=True)),
            **dict(zip(self.split.statistics, everywhere["statistics"], strict=True)),
        }
        return Chunk(weights=staged["weights"], ids=staged["ids"], common=everywhere["common"], local=_apply(self._local, known))

    def _make_stage(self) -> Stage:
        made: list[Stage] = []

        def make(staged: Any, everywhere: Any) -> tuple[()]:
            self._local = self.split.local.changed(lambda p: self.executor.rewrite(p, self.split.place))
            body = self.executor.rewrite(self.split.scan.params["jaxpr"], self.split.place)
            weights = jax.eval_shape(lambda w: self._gather_layer([x[0] for x in w]), staged["weights"])
            local = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in self._local.outputs]
            common = [jax.ShapeDtypeStruct(c.shape, c.dtype) for c in everywhere["common"]]
            shapes = Shapes(weights=weights, common=common, local=local, travel=self.travel_shapes)
            layer = Layer(
                Body(self.split, body, is_padded=self.stages.is_padded),
                shapes,
                recompute=self.executor.options.remat == "layer",
                apart=self.ticks.table.weight is not None,
            )
            made.append(
                Stage(
                    layer=layer,
                    axis=self.axis,
                    num_stages=self.stages.num_stages,
                    per_chunk=self.stages.per_chunk,
                    floats=self.travel_floats,
                    gather=self._gather_layer,
                    scatter=self._scatter_layer,
                    keep_input=self.executor.options.remat == "stage",
                    apart=self.ticks.table.weight is not None,
                )
            )
            return ()

        self.ids = jnp.asarray(self.stages.ids, jnp.int32)
        self._staged_call(make, {"weights": self.weights, "ids": self.ids}, self._everywhere(), ())
        return made[0]

    def _gather_layer(self, weights: Values) -> Values:
        if self.by_step:
            return weights
        gathered = []
        for var, x in zip(self.split.weights, weights, strict=True):
            for dim, axes in enumerate(self.executor.manual_axes(var)[1:]):
                if axes:
                    x = jax.lax.all_gather(x, axes, axis=dim, tiled=True)
            gathered.append(x)
        return gathered

    def _scatter_layer(self, index: int, gradient: Any) -> Any:
        if self.by_step:
            return gradient
        var = Executor.floats(self.split.weights).take(self.split.weights)[index]
        for dim, axes in enumerate(self.executor.manual_axes(var)[1:]):
            if axes:
                gradient = jax.lax.psum_scatter(gradient, axes, scatter_dimension=dim, tiled=True)
        return gradient

    # -- the loop over ticks ----------------------------------------------------------------------------------------------

    def _loop(self) -> dict[str, Any]:
        train = self.seeds is not None
        state = self._start(train=train)
        for segment in self.ticks.segments:
            rows = {"staged": segment.staged, "common": segment.common}
            state, _ = jax.lax.scan(partial(self._tick, segment, train=train), state, jax.tree.map(jnp.asarray, rows))
        return state

    def _start(self, *, train: bool) -> dict[str, Any]:
        """Zeros for all that the loop carries."""
        buffers = self.ticks.buffers
        stage, per_chunk = self.stage, self.stages.per_chunk
        x, floats = self.travel_shapes, self.travel_floats.take(self.travel_shapes)

        def zeros(shapes: Sequence[Any], *lead: int) -> Values:
            return [jnp.zeros((*lead, *s.shape), s.dtype) for s in shapes]

        def staged(_: Any, everywhere: Any) -> tuple[Any, ...]:
            made = {"inbox": zeros(x, buffers.forward.inbox.num_slots)}
            if not train:
                return (made,)
            made["inbox_back"] = zeros(floats, buffers.backward.inbox.num_slots)
            keep = self.stage.keep_input
            made["saved"] = zeros(x, buffers.saved.num_slots) if keep else zeros(stage.layer.saved_shapes, buffers.saved.num_slots, per_chunk)
            stash = [*stage.layer.stashed_shapes, *(stage.layer.saved_shapes if keep else [])]
            made["stashed"] = zeros(stash, buffers.stashed.num_slots, per_chunk) if stage.apart else []
            made["sums"] = Sums([], [_wide_zeros(c) for c in everywhere["common"] if jnp.issubdtype(c.dtype, jnp.floating)])
            return (made,)

        (made,) = self._staged_call(staged, {"weights": self.weights, "ids": self.ids}, self._everywhere(), (True,))
        state = {"staged": made, "totals": [jnp.zeros((), _wide(t.var.aval.dtype)) if not t.var.aval.shape else jnp.zeros(t.var.aval.shape, _wide(t.var.aval.dtype)) for t in self.split.totals]}
        if train:
            kept = [(v, w) for v, w, f in zip(self.split.weights, self.weights, Executor.floats(self.split.weights).which, strict=True) if f]
            weights = [self.executor.pinned(_wide_zeros(w), self._staged_spec(v)) for v, w in kept]
            state["sums"] = Sums(weights, made.pop("sums").common)
            state["common"] = [self._pinned(v, _wide_zeros(c)) for v, c in zip(self.split.common, self.common, strict=True) if jnp.issubdtype(c.dtype, jnp.floating)]
        return state

    def _tick(self, segment: Segment, state: dict[str, Any], rows: Mapping[str, Any], *, train: bool) -> tuple[dict[str, Any], None]:
        work = rows["common"]
        cotangents: Values = []
        if "F" in segment.kinds:
            entering = self._maybe(segment, work, "embed", lambda m, on: self._embedded(m, self.common), lambda: [jnp.zeros(s.shape, s.dtype) for s in self.travel_shapes])
            state, leaving = self._forward(segment, state, rows["staged"]["F"], entering, train=train)
            if "head" in segment.common:
                def head(m: Any, on: Any) -> tuple[dict[str, Any], Values]:
                    return self._head(m, on, leaving, heads, train=train)

                heads = {k: state[k] for k in ("totals", "common") if k in state}
                floats = self.travel_floats.take(self.travel_shapes) if train else []
                heads, cotangents = self._maybe(segment, work, "head", head, lambda: (heads, [jnp.zeros(s.shape, s.dtype) for s in floats]))
                state = {**state, **heads}
                if train and self.ticks.buffers.head_waits:
                    state, cotangents = self._wait(state, rows["staged"]["F"]["from_head"], cotangents), []
        if "B" in segment.kinds:
            state, entered = self._backward(state, rows["staged"]["B"], cotangents)
            if "embed_back" in segment.common:
                sums = state["common"]
                sums = self._maybe(segment, work, "embed_back", lambda m, on: self._embed_back(m, entered, sums), lambda: sums)
                state = {**state, "common": sums}
        if "W" in segment.kinds:
            state = self._weights(state, rows["staged"]["W"])
        return state, None

    def _maybe(self, segment: Segment, work: Mapping[str, Any], name: str, do: Callable[[Any, Any], Any], skip: Callable[[], Any]) -> Any:
        """Work that not every tick has: skipped where that is worth a branch, which all devices take together."""
        if name not in segment.common:
            return skip()
        on, microbatch = work[name]["on"], work[name]["microbatch"]
        if name in segment.rarely:
            return jax.lax.cond(on, lambda: do(microbatch, True), skip)
        return do(microbatch, True if name in segment.always else on)

    def _forward(
        self, segment: Segment, state: dict[str, Any], item: Any, entering: Values, *, train: bool
    ) -> tuple[dict[str, Any], Values]:
        def slot(staged: Any, everywhere: Any) -> tuple[Any, Values]:
            item, own = staged["item"], dict(staged["state"])
            chunk = self._chunk(item, staged, everywhere)
            inbox = own["inbox"]
            travel = everywhere["entering"]
            if self.ticks.buffers.forward.inbox.num_slots:
                travel = [jnp.where(item["first"], x, _slot(box, item["read"])) for x, box in zip(travel, inbox, strict=True)]
            if train:
                travel, own["saved"] = self.stage.forward(item, chunk, travel, own["saved"])
            else:
                travel = self.stage.evaluate(item, chunk, travel)
            own["inbox"] = self.stage.sent(item, self.ticks.buffers.forward.pairs, travel, inbox)
            shown = self.stage.shown(item["last"], travel) if "head" in segment.common else []
            return own, shown

        names = ("inbox", "saved") if train else ("inbox",)
        staged = {"weights": self.weights, "ids": self.ids, "item": item, "state": {k: state["staged"][k] for k in names}}
        own, leaving = self._staged_call(slot, staged, {**self._everywhere(), "entering": entering}, (True, False))
        return {**state, "staged": {**state["staged"], **own}}, leaving

    def _backward(self, state: dict[str, Any], item: Any, from_head: Values) -> tuple[dict[str, Any], Values]:
        def slot(staged: Any, everywhere: Any) -> tuple[Any, Any, Values]:
            item, own = staged["item"], dict(staged["state"])
            chunk = self._chunk(item, staged, everywhere)
            inbox = own["inbox_back"]
            fresh = everywhere["from_head"]
            if self.ticks.buffers.backward.inbox.num_slots:
                cotangents = [_slot(box, item["read"]) for box in inbox]
                if fresh:
                    cotangents = [jnp.where(item["last"], x, c) for x, c in zip(fresh, cotangents, strict=True)]
            else:
                cotangents = fresh
            cotangents, own["stashed"], sums = self.stage.backward(item, chunk, cotangents, own["saved"], own["stashed"], staged["sums"])
            own["inbox_back"] = self.stage.sent(item, self.ticks.buffers.backward.pairs, cotangents, inbox)
            del own["saved"]
            return own, sums, self.stage.shown(item["first"], cotangents)

        staged = {
            "weights": self.weights,
            "ids": self.ids,
            "item": item,
            "state": {k: state["staged"][k] for k in ("inbox_back", "saved", "stashed")},
            "sums": state["sums"],
        }
        own, sums, entered = self._staged_call(slot, staged, {**self._everywhere(), "from_head": from_head}, (True, True, False))
        return {**state, "staged": {**state["staged"], **own}, "sums": sums}, entered

    def _wait(self, state: dict[str, Any], slots: Any, from_head: Values) -> dict[str, Any]:
        """The head's cotangents put into the inbox, for a later tick."""

        def slot(staged: Any, from_head: Any) -> tuple[Values]:
            return ([_filled(box, x, staged["slot"]) for box, x in zip(staged["inbox"], from_head, strict=True)],)

        (inbox,) = self._staged_call(slot, {"inbox": state["staged"]["inbox_back"], "slot": slots}, from_head, (True,))
        return {**state, "staged": {**state["staged"], "inbox_back": inbox}}

    def _weights(self, state: dict[str, Any], item: Any) -> dict[str, Any]:
        def slot(staged: Any, everywhere: Any) -> tuple[Sums]:
            item = staged["item"]
            chunk = self._chunk(item, staged, everywhere)
            return (self.stage.weight_gradients(item, chunk, staged["state"]["saved"], staged["state"]["stashed"], staged["sums"]),)

        staged = {
            "weights": self.weights,
            "ids": self.ids,
            "item": item,
            "state": {k: state["staged"][k] for k in ("saved", "stashed")},
            "sums": state["sums"],
        }
        (sums,) = self._staged_call(slot, staged, self._everywhere(), (True,))
        return {**state, "sums": sums}


def _apply(part: Part, known: Mapping[Var, Any]) -> Values:
    return part([known[var] for var in part.inputs])


def _slot(buffer: Any, index: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(buffer, index, keepdims=False)


def _filled(buffer: Any, value: Any, index: Any) -> Any:
    return jax.lax.dynamic_update_index_in_dim(buffer, value, index, 0)


def _wide(dtype: Any) -> Any:
    """The type in which values of a type are added up."""
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4 else dtype


def _wide_zeros(x: Any) -> Any:
    return jnp.zeros(x.shape, _wide(x.dtype))
