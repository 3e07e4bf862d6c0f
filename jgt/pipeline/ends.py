"""The two ends of the pipeline, for one microbatch: embedding and the values that enter the layers; head, loss and totals.

The ends run outside of the stages' shard_map, on all stages together: to them the stage axis is an axis like any other, so a vocabulary may
be sharded over it and no stage waits while another one computes logits. `embed` maps one microbatch to what travels, and `totals` maps what
the last chunk returns to sums over the microbatch; `embed_back` and `head` are their derivatives.

With a batch of 16 rows over 2 data shards and 4 microbatches, tokens [16, seq] are [8, seq] on a shard and [4, 2, seq] here, so that a tick
can select its microbatch by an index that is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import jax

from jgt.pipeline.arrays import Arrays, Floats, Integers, call, fold_key, from_raw, raw, raw_shape, row, vjp, zeros
from jgt.pipeline.links.moves import Moves
from jgt.pipeline.split import Split
from jgt.program import jaxpr as jx
from jgt.program.jaxpr import Program, Var
from jgt.program.lookups import with_whole_positions
from jgt.program.places import Place

Rewrite = Callable[[Program, Place], Program]
"""Adds sharding constraints to a program whose equations are at a place in the user's program."""


InputKind = Literal["rows", "key", "whole"]
"""An argument of the loss that is not a parameter.

rows: split into microbatches along its first dim. key: a random key, or several, from which each part of the batch derives its own.
whole: the same for all microbatches.
"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Batch:
    """The inputs of one data shard, those with rows as [microbatches, rows of one, ...].

    statistics: sums over the whole batch that microbatches read. shard: which of `num_shards` parts of the batch this is. first: the number
    of the first microbatch. It is not 0 if these are only some of the shard's microbatches.
    """

    kinds: tuple[InputKind, ...] = field(metadata={"static": True})
    values: Arrays
    statistics: Arrays
    shard: jax.Array
    num_shards: int = field(metadata={"static": True})
    first: Integers

    def known(self, split: Split, microbatch: Integers) -> dict[Var, jax.Array]:
        """The values of one microbatch's program that are known before it runs: its inputs, and statistics of the whole batch."""

        def select(kind: InputKind, x: jax.Array) -> jax.Array:
            if kind == "rows":
                return row(x, microbatch)
            # Each part of the batch has its own number, and so its own key. The data shard counts too, or all shards would draw
            # the same numbers.
            return fold_key(x, (self.first + microbatch) * self.num_shards + self.shard) if kind == "key" else x

        values = [select(kind, x) for kind, x in zip(self.kinds, self.values, strict=True)]
        return dict(zip([*split.inputs, *split.statistics], [*values, *self.statistics], strict=True))


class EmbedAndHead:
    """Embedding and head of a split program on one data shard.

    common_floats, where a function has it: the values to use for the common values with gradients, to differentiate by them.
    """

    def __init__(self, split: Split, moves: Moves, rewrite: Rewrite, batch: Batch, common: Arrays):
        self.split, self.rewrite, self.batch, self.common = split, rewrite, batch, common
        # Equations keep the signals in their name stacks, so the part itself lies at the top of the program.
        embed = split.embed.changed(lambda p: rewrite(p, Place()))
        variables = zip(jx.body(embed.program).invars, embed.inputs, strict=False)
        known = ((var, moves.other_dims(like)) for var, like in variables)
        tables = {var: tuple(axes or () for axes in dims) for var, dims in known if dims is not None}
        self._embed = embed.changed(lambda p: with_whole_positions(p, tables, moves.sharding))
        self._head = split.head.changed(lambda p: rewrite(p, Place()))
        self._floats = split.floats(split.common)
        self._total_floats = Floats.among([jx.struct_of(t.var) for t in split.totals])
        self.travel_shapes = [raw_shape(jx.struct_of(a)) for a in [*split.travel, *split.ys]]
        travel = Floats.among(self.travel_shapes)
        self.travel_floats = travel if split.goes_back else Floats((False,) * len(travel.which))

    def no_travel(self) -> Arrays:
        """Zeros of the shapes that travel."""
        return zeros(self.travel_shapes)

    def embed(self, microbatch: Integers, common_floats: Arrays | None = None) -> Arrays:
        """The values that enter the first chunk: the embedding's, then zeros for what the layers are yet to write (`ys`)."""
        entering = call(self._embed, self._known(microbatch, common_floats))
        # The scan's stacked outputs travel from the first chunk on, because shapes must be the same in every tick.
        return [*map(raw, entering), *self.no_travel()[len(entering) :]]

    def embed_back(self, microbatch: Integers, cotangents: Arrays) -> Arrays:
        """The gradients of common values, from the cotangents of what entered the first chunk."""

        def embed(floats: Arrays) -> tuple[Arrays, None]:
            return self.travel_floats.select(self.embed(microbatch, floats)), None

        # This runs the embedding again. Its residuals are not kept between the two ticks.
        _, derivative, _ = vjp(embed, self._floats.select(self.common))
        return derivative(cotangents)[0]

    def totals(self, microbatch: Integers, travel: Arrays, common_floats: Arrays | None = None) -> Arrays:
        """The totals of one microbatch, from the outputs of the last chunk."""
        split = self.split
        # The head reads what the scan returns; values that the layers only pass along keep the names they entered with.
        num_carry = len(split.travel) - split.num_extras
        results = [*split.scan.outvars[:num_carry], *split.travel[num_carry:], *split.ys]
        known = self._known(microbatch, common_floats)
        known |= {v: from_raw(x, jx.struct_of(v)) for v, x in zip(results, travel, strict=True) if jx.is_var(v)}
        return call(self._head, known)

    def head(self, microbatch: Integers, travel: Arrays, seeds: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        """The totals of one microbatch, the cotangents of the last chunk's outputs, and the gradients of common values.

        seeds: the derivative of the loss by each total that is a float.
        """
        floats, others = self.travel_floats.select(travel), self.travel_floats.others(travel)

        def head(floats: Arrays, common: Arrays) -> tuple[Arrays, Arrays]:
            totals = self.totals(microbatch, self.travel_floats.merge(floats, others), common)
            return self._total_floats.select(totals), self._total_floats.others(totals)

        totals, derivative, counts = vjp(head, floats, self._floats.select(self.common))
        # jax.vjp takes cotangents of exactly the types of the results.
        cotangents, gradients = derivative([s.astype(t.dtype) for s, t in zip(seeds, totals, strict=True)])
        return self._total_floats.merge(totals, counts), cotangents, gradients

    def finished(self, totals: Arrays, num_parts: int) -> Arrays:
        """The totals of the whole batch, from their sums over `num_parts` parts of equal size: sums stay, means are divided."""
        # All parts have the same number of rows, so the mean over the batch is the mean of their means.
        done = [t / num_parts if total.is_mean else t for t, total in zip(totals, self.split.totals, strict=True)]
        return [d.astype(jx.dtype_of(total.var)) for d, total in zip(done, self.split.totals, strict=True)]

    def seeds(self, seeds: Arrays, num_parts: int) -> Arrays:
        """The derivative of the loss by one part's totals, from its derivative by the totals of the whole batch."""
        by_part = [s / num_parts if total.is_mean else s for s, total in zip(seeds, self.split.totals, strict=True)]
        return self._total_floats.select(by_part)

    def _known(self, microbatch: Integers, common_floats: Arrays | None) -> dict[Var, jax.Array]:
        """The values that embedding and head read besides what travels."""
        common = self.common if common_floats is None else self._floats.merge(common_floats, self._floats.others(self.common))
        return self.batch.known(self.split, microbatch) | dict(zip(self.split.common, common, strict=True))
