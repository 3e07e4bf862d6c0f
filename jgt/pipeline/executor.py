"""The executor: runs any table in one SPMD program, with two shard_maps, one inside the other.

The outer shard_map makes the axes that split the batch manual. Each data shard then runs the whole loop over ticks on its own rows, and
gradients are reduced over these axes once, after the loop. With automatic axes, the partitioner would reduce them after every microbatch.
The inner shard_map makes the stage axis manual, too, for the items of the layers only: there each stage does its own work and sends
activations with `ppermute`. All remaining axes (tensor, expert) stay with the partitioner in both regions, so the layers' rules apply
inside a pipeline as outside. `links/layout.py` shows the shapes of a weight in each region.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jgt.pipeline.arrays import Arrays, Integers, row
from jgt.pipeline.chunks import Chunks
from jgt.pipeline.config import PipelineConfig
from jgt.pipeline.ends import Batch, EmbedAndHead, InputKind, Rewrite
from jgt.pipeline.links.moves import Moves
from jgt.pipeline.loop import Loop
from jgt.pipeline.split import Split
from jgt.pipeline.ticks import Carry, arrays_of
from jgt.program.heads import split_heads_in_stages
from jgt.program.jaxpr import Program, Var
from jgt.schedule.table import Table

WHOLE = PartitionSpec()


@dataclass(frozen=True, kw_only=True)
class Executor:
    """A split program on a mesh with a table, ready to run.

    inputs: the kind of each argument besides the parameters. rewrite_shared: as `rewrite`, for the program of `Split.shared`.
    """

    split: Split
    table: Table
    chunks: Chunks
    pipeline: PipelineConfig
    moves: Moves
    inputs: tuple[InputKind, ...]
    rewrite: Rewrite
    rewrite_shared: Callable[[Program], Program]

    @property
    def _skips(self) -> bool:
        """Whether idle stages skip their layers, which must not contain collectives then: each stage branches on its own."""
        if self.pipeline.idle:
            return self.pipeline.idle == "skip"
        # Virtual devices of one host share its cores: there an idle stage takes time from the others by computing. Where stages have
        # chosen numbers of layers, the one with few slow layers must not compute padding until the others are done.
        mesh = self.moves.mesh
        on_cpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"
        return (on_cpu or (self.pipeline.has_sizes and self.chunks.is_padded)) and not self.moves.axes_inside

    def run(
        self, shared: Arrays, inputs: Arrays, statistics: Arrays, seeds: Arrays | None = None
    ) -> tuple[Arrays, list[tuple[Var, jax.Array]]]:
        """The totals of a batch and, with seeds, the gradients of Σ seed · total.

        shared: the weights and common values, in the order of `Split.shared`; a gradient is laid out like its value. A value that is
        in both lists has two gradients, to be added. seeds: one for each total; seeds of totals that are not floats are ignored.
        """
        split, moves = self.split, self.moves
        split_heads_in_stages()
        values = dict(zip(split.shared.outputs, shared, strict=True))
        # Common values are few (the embedding, norms) and read in every tick: they are gathered once in any case.
        stored = [moves.narrow(v, values[v], split.narrow[v]) if v in split.narrow else values[v] for v in split.weights]
        weights = stored if moves.by_layer else [moves.gather(v, x) for v, x in zip(split.weights, stored, strict=True)]
        common = [moves.gather(v, values[v]) for v in split.common]
        # Specs name manual axes only; how a value is split over the other axes goes with the value, unseen.
        rows = [PartitionSpec(moves.batch_axes or None) if kind == "rows" else WHOLE for kind in self.inputs]
        weight_specs = [moves.spec(v) if moves.by_layer else moves.whole_spec(v) for v in split.weights]
        float_weights, float_common = self._float_variables(seeds)
        of_weights = [moves.spec(v) if moves.by_layer else moves.parts_spec(v) for v in float_weights]
        out_specs = (WHOLE, of_weights, [moves.parts_spec(v) for v in float_common])
        run = moves.on_every_shard(self._run_on_shard, (weight_specs, WHOLE, rows, WHOLE, WHOLE), out_specs)
        totals, of_weights, of_common = run(weights, common, inputs, statistics, seeds)
        gradients = [(v, g if moves.by_layer else moves.reduce(v, g)) for v, g in zip(float_weights, of_weights, strict=True)]
        return totals, gradients + [(v, moves.reduce(v, g)) for v, g in zip(float_common, of_common, strict=True)]

    def _run_on_shard(
        self, weights: Arrays, common: Arrays, inputs: Arrays, statistics: Arrays, seeds: Arrays | None
    ) -> tuple[Arrays, Arrays, Arrays]:
        """The totals of the batch, and the data shard's gradients of weights and of common values."""
        split, moves = self.split, self.moves
        # Where nobody needs backward ticks they are left out, but the chunks stay where the full table has them.
        table = self.table if seeds is not None and split.goes_back else self.table.forward_only()
        # The parts of the batch whose totals are added up: the microbatches of all data shards.
        num_parts = self.pipeline.parts * table.num_microbatches * moves.num_shards
        common = [moves.pin(v, c) for v, c in zip(split.common, common, strict=True)]
        staged = [moves.on_stages(v, self._arranged(v, w)) for v, w in zip(split.weights, weights, strict=True)]
        ticks = arrays_of(table, skips=self._skips, embeds_back=split.trains_embedding)

        def loop_of(batch: Batch) -> tuple[EmbedAndHead, Loop]:
            ends = EmbedAndHead(split, moves, self.rewrite, batch, common)
            part_seeds = None if seeds is None else ends.seeds(seeds, num_parts)
            return ends, Loop(ends, moves, ticks, self.chunks, self.pipeline.remat, staged, part_seeds)

        batch_of = partial(self._batch_of_part, inputs, statistics, table.num_microbatches)
        ends, loop = loop_of(batch_of(jnp.int32(0)))
        carry = loop.first_carry()
        if self.pipeline.parts == 1:
            carry = loop.run(carry)
        else:
            # The values that a part leaves in the buffers are overwritten before they are read, and the sums continue.
            def run(carry: Carry, part: jax.Array) -> tuple[Carry, None]:
                return loop_of(batch_of(part))[1].run(carry), None

            carry, _ = jax.lax.scan(run, carry, jnp.arange(self.pipeline.parts))
        # Weights went to their stages above; here their gradients come back, in the order of the model.
        sums, (float_weights, float_common) = carry.staged.sums, self._float_variables(seeds)
        # Not strict: those of common values follow.
        staged_sums = zip(float_weights, sums, strict=False)
        of_weights = [moves.pin(v, self._restored(v, moves.on_stages(v, g))) for v, g in staged_sums]
        of_common = self._common_gradients(carry.common, sums[len(float_weights) :]) if seeds is not None else []
        # If weights are gathered by layer, their gradients were scattered over the weight's own axes in each tick already.
        summed = moves.sum_rest if moves.by_layer else moves.parts
        return (
            ends.finished([moves.sum_shards(t) for t in carry.totals], num_parts),
            [summed(v, g) for v, g in zip(float_weights, of_weights, strict=True)],
            [moves.parts(v, g) for v, g in zip(float_common, of_common, strict=True)],
        )

    def _batch_of_part(self, inputs: Arrays, statistics: Arrays, num_microbatches: int, part: Integers) -> Batch:

        # [rows of the shard, ...] → [parts, microbatches, rows of one, ...] → [microbatches, rows of one, ...]: a microbatch is
        # neighbouring rows, which `jgt.pipeline.batch` relies on.
        def select(kind: InputKind, x: jax.Array) -> jax.Array:
            if kind != "rows":
                return x
            parts = self.pipeline.parts
            x = x.reshape(parts, num_microbatches, -1, *x.shape[1:])
            return x[0] if parts == 1 else row(x, part)

        moves = self.moves
        return Batch(
            shard=jax.lax.axis_index(moves.batch_axes) if moves.batch_axes else jnp.int32(0),
            num_shards=moves.num_shards,
            kinds=self.inputs,
            values=[select(kind, x) for kind, x in zip(self.inputs, inputs, strict=True)],
            statistics=statistics,
            first=part * num_microbatches,
        )

    def _arranged(self, var: Var, weight: jax.Array) -> jax.Array:
        """A weight as it is stored → [stages, layers of a stage, ...]."""
        chunks, moves = self.chunks, self.moves
        return chunks.staged(weight) if moves.is_stored else moves.as_stored(var, chunks.arrange(weight))

    def _restored(self, var: Var, gradient: jax.Array) -> jax.Array:
        """The inverse, for its gradient."""
        chunks, moves = self.chunks, self.moves
        return chunks.rows(gradient) if moves.is_stored else chunks.restore(moves.as_stored(var, gradient))

    def _float_variables(self, seeds: Arrays | None) -> tuple[list[Var], list[Var]]:
        """The weights and common values that get gradients in a run with these seeds."""
        split = self.split
        return ([], []) if seeds is None else (split.differentiated(split.weights), split.differentiated(split.common))

    def _common_gradients(self, of_ends: Arrays, of_layers: Arrays) -> Arrays:
        """The gradients of common values: from embedding and head, and from the layers of all stages [stages, ...]."""
        # Each stage adds up its own layers only, so the sum over stages is due here; embedding and head run on all stages together.
        in_layers = dict(zip(self.split.differentiated(self.split.in_layers), of_layers, strict=True))
        return [
            self.moves.pin(v, g + jnp.sum(in_layers[v], axis=0) if v in in_layers else g)
            for v, g in zip(self.split.differentiated(self.split.common), of_ends, strict=True)
        ]
