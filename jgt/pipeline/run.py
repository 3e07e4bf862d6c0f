"""The executor: runs any table in one SPMD program.

Two shard_maps stand inside each other. The outer one makes the axes that split the batch manual, so that gradients are
reduced over them once, after the loop. In it, embedding and head see the stage axis as any other: their vocabulary may be
sharded over it. The inner one makes the stage axis manual for the slots of the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jgt.pipeline.ends import Batch, Ends, Input, Rewrite
from jgt.pipeline.floats import Values, float_variables
from jgt.pipeline.layout import Layout
from jgt.pipeline.loop import Loop
from jgt.pipeline.schedule import Table
from jgt.pipeline.split import Split
from jgt.pipeline.stages import Stages
from jgt.pipeline.ticks import arrays_of

WHOLE = PartitionSpec()


@dataclass(frozen=True, kw_only=True)
class Results:
    """The totals of a step, and the gradients of those weights and common values that are floats."""

    totals: Values
    weights: Values
    common: Values


@dataclass(frozen=True, kw_only=True)
class Executor:
    """A split program on a mesh, ready to run by tables.

    remat: none saves what the layers' own derivative saves, layer each layer's input, stage each chunk's. gather: weights
    that are sharded over the batch's axes become whole once a step, or layer by layer. skips: stages without an item do not run
    their layers, which must not talk to other devices, for stages branch each for itself.
    """

    split: Split
    layout: Layout
    inputs: Sequence[Input]
    rewrite: Rewrite
    remat: Literal["none", "layer", "stage"] = "none"
    gather: Literal["step", "layer"] = "step"
    skips: bool = False

    def evaluate(self, table: Table, weights: Values, common: Values, inputs: Values, statistics: Values) -> Values:
        """The totals of a batch, forward only."""

        def run(weights: Values, common: Values, inputs: Values, statistics: Values) -> Values:
            ends, stages, staged = self._prepare(table, weights, common, inputs, statistics)
            loop = self._loop(ends, table.forward_only(), stages, staged, None)
            return self._finished(ends, table, loop.run()["totals"])

        return self._manual(run, (), WHOLE)(*self._gathered(weights, common), inputs, statistics)

    def train(self, table: Table, weights: Values, common: Values, inputs: Values, statistics: Values, seeds: Values) -> Results:
        """The totals, and the gradients of Σ seed · total, reduced and laid out like what they belong to.

        seeds: one for each total; those of totals that are no floats are ignored.
        """
        split, layout = self.split, self.layout
        by_step = self.gather == "step"

        def run(weights: Values, common: Values, inputs: Values, statistics: Values, seeds: Values) -> tuple[Values, Values, Values]:
            ends, stages, staged = self._prepare(table, weights, common, inputs, statistics)
            loop = self._loop(ends, table, stages, staged, ends.seeds(seeds, self._num_parts(table)))
            state = loop.run()
            sums = state["staged"]["sums"]
            of_weights = [layout.unstaged(v, g, stages) for v, g in zip(float_variables(split.weights), sums.weights, strict=True)]
            in_layers = dict(zip(float_variables(split.in_layers), sums.common, strict=True))
            of_common = [
                layout.pinned(v, g + jnp.sum(in_layers[v], axis=0) if v in in_layers else g)
                for v, g in zip(float_variables(split.common), state["common"], strict=True)
            ]
            leave = layout.parts if by_step else layout.rest_summed
            return (
                self._finished(ends, table, state["totals"]),
                [leave(v, g) for v, g in zip(float_variables(split.weights), of_weights, strict=True)],
                [layout.parts(v, g) for v, g in zip(float_variables(split.common), of_common, strict=True)],
            )

        spec = layout.parts_spec if by_step else layout.spec
        out = (WHOLE, [spec(v) for v in float_variables(split.weights)], [layout.parts_spec(v) for v in float_variables(split.common)])
        totals, of_weights, of_common = self._manual(run, (WHOLE,), out)(*self._gathered(weights, common), inputs, statistics, seeds)
        if by_step:
            of_weights = [layout.reduced(v, g) for v, g in zip(float_variables(split.weights), of_weights, strict=True)]
        return Results(
            totals=totals,
            weights=of_weights,
            common=[layout.reduced(v, g) for v, g in zip(float_variables(split.common), of_common, strict=True)],
        )

    def _gathered(self, weights: Values, common: Values) -> tuple[Values, Values]:
        split, gathered = self.split, self.layout.gathered
        if self.gather == "step":
            weights = [gathered(v, w) for v, w in zip(split.weights, weights, strict=True)]
        return weights, [gathered(v, c) for v, c in zip(split.common, common, strict=True)]

    def _manual(self, run: Any, more: tuple[PartitionSpec, ...], out: Any) -> Any:
        axes, outer = self.layout.batch_axes, self.layout.outer_axes
        rows = [PartitionSpec(axes or None) if i.kind == "rows" else WHOLE for i in self.inputs]
        weights = [WHOLE if self.gather == "step" else self.layout.spec(v) for v in self.split.weights]
        return self.layout.manual(run, outer, (weights, WHOLE, rows, WHOLE, *more), out)

    def _num_parts(self, table: Table) -> int:
        return table.num_microbatches * self.layout.num_shards

    def _prepare(self, table: Table, weights: Values, common: Values, inputs: Values, statistics: Values) -> tuple[Ends, Stages, Values]:
        layout, split = self.layout, self.split
        stages = Stages(num_layers=split.num_layers, num_stages=table.num_stages, stages=table.stages)
        batch = Batch.of(self.inputs, inputs, statistics, layout.shard_index(), layout.num_shards, table.num_microbatches)
        whole = [layout.pinned(v, c) for v, c in zip(split.common, common, strict=True)]
        return Ends(split, self.rewrite, batch, whole), stages, [layout.staged(v, w, stages) for v, w in zip(split.weights, weights, strict=True)]

    def _loop(self, ends: Ends, table: Table, stages: Stages, weights: Values, seeds: Values | None) -> Loop:
        ticks = arrays_of(table, skips=self.skips)
        return Loop(
            ends, self.layout, ticks, stages, weights, seeds, remat=self.remat, gather_layers=self.gather == "layer", skips=self.skips
        )

    def _finished(self, ends: Ends, table: Table, totals: Values) -> Values:
        return ends.finished([self.layout.summed(t) for t in totals], self._num_parts(table))
