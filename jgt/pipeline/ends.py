"""What happens to one microbatch outside of the layers: its inputs, the embedding before them, the head and its loss after."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jgt.jaxpr import Place, Program, Var
from jgt.parts import Part
from jgt.pipeline.floats import Floats, Values, raw, raw_shape, whole_like, wide_zeros
from jgt.pipeline.split import Split

Rewrite = Callable[[Program, Place], Program]
"""Puts constraints into a program that stands at a place, for where the call is made."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """An argument that is no parameter: split into microbatches by rows, a random key of which each part gets its own, or whole."""

    kind: Literal["rows", "key", "whole"]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The inputs of one data shard, rows as [microbatches, rows of one, ...], and what is known of the whole batch.

    shard: which of `num_shards` parts of the batch this is.
    """

    kinds: Sequence[Input]
    values: Values
    statistics: Values
    shard: Any
    num_shards: int

    @classmethod
    def of(cls, kinds: Sequence[Input], values: Values, statistics: Values, shard: Any, num_shards: int, num_microbatches: int) -> Batch:
        """From the shard's arrays."""
        split = [x.reshape(num_microbatches, -1, *x.shape[1:]) if k.kind == "rows" else x for k, x in zip(kinds, values, strict=True)]
        return cls(kinds=kinds, values=split, statistics=statistics, shard=shard, num_shards=num_shards)

    @property
    def arrays(self) -> tuple[Values, Values, Any]:
        """All arrays, to carry them into a shard_map."""
        return self.values, self.statistics, self.shard

    def with_arrays(self, arrays: tuple[Values, Values, Any]) -> Batch:
        """The same batch seen from inside."""
        values, statistics, shard = arrays
        return Batch(kinds=self.kinds, values=values, statistics=statistics, shard=shard, num_shards=self.num_shards)

    def known(self, split: Split, microbatch: Any) -> dict[Var, Any]:
        """What the micro program knows of one microbatch: its inputs, and statistics of the whole batch."""

        def one(kind: str, x: Any) -> Any:
            if kind == "rows":
                return jax.lax.dynamic_index_in_dim(x, microbatch, keepdims=False)
            return jax.random.fold_in(x, microbatch * self.num_shards + self.shard) if kind == "key" else x

        values = [one(k.kind, x) for k, x in zip(self.kinds, self.values, strict=True)]
        return dict(zip([*split.inputs, *split.statistics], [*values, *self.statistics], strict=True))


class Ends:
    """Embedding and head of a split program on one data shard."""

    def __init__(self, split: Split, rewrite: Rewrite, batch: Batch, common: Values):
        self.split, self.rewrite, self.batch, self.common = split, rewrite, batch, common
        self._embed = split.embed.changed(lambda p: rewrite(p, Place()))
        self._head = split.head.changed(lambda p: rewrite(p, Place()))
        self.floats = Floats.among(common)
        self.travel_shapes = [raw_shape(a.aval) for a in split.travel] + [raw_shape(v.aval) for v in split.ys]
        self.travel_floats = Floats.among(self.travel_shapes)
        self.total_floats = Floats.among([t.var.aval for t in split.totals])

    def no_travel(self) -> Values:
        """Zeros of the shapes that travel."""
        return [jnp.zeros(s.shape, s.dtype) for s in self.travel_shapes]

    def no_totals(self) -> Values:
        """Zeros to add totals to."""
        return [wide_zeros(t.var.aval) for t in self.split.totals]

    def embed(self, microbatch: Any, common: Values | None = None) -> Values:
        """What enters the first chunk."""
        moving = call(self._embed, self._known(microbatch, self.common if common is None else common))
        return [*map(raw, moving), *self.no_travel()[len(moving) :]]

    def embed_back(self, microbatch: Any, cotangents: Values) -> Values:
        """The gradients of common values, from the cotangents of what entered the first chunk."""

        def embed(floats: Values) -> Values:
            return self.travel_floats.take(self.embed(microbatch, self._with(floats)))

        _, derivative = jax.vjp(embed, self.floats.take(self.common))
        return derivative(cotangents)[0]

    def totals(self, microbatch: Any, travel: Values, common: Values | None = None) -> Values:
        """The totals of one microbatch, from what left the last chunk."""
        split, num = self.split, len(self.split.travel)
        known = self._known(microbatch, self.common if common is None else common)
        carry = num - split.num_extras
        names = [*split.scan.outvars[:carry], *split.travel[carry:], *split.ys]
        known |= {var: whole_like(x, var.aval) for var, x in zip(names, travel, strict=True)}
        return call(self._head, known)

    def head(self, microbatch: Any, travel: Values, seeds: Values) -> tuple[Values, Values, Values]:
        """The totals of one microbatch, the cotangents of what left the last chunk, the gradients of common values.

        seeds: the derivative of the loss by each total that is a float.
        """
        floats, others = self.travel_floats.take(travel), self.travel_floats.leave(travel)

        def head(floats: Values, common: Values) -> tuple[Values, Values]:
            found = self.totals(microbatch, self.travel_floats.merge(floats, others), self._with(common))
            return self.total_floats.take(found), self.total_floats.leave(found)

        found, derivative, counts = jax.vjp(head, floats, self.floats.take(self.common), has_aux=True)
        cotangents, gradients = derivative([s.astype(f.dtype) for s, f in zip(seeds, found, strict=True)])
        return self.total_floats.merge(found, counts), cotangents, gradients

    def finished(self, totals: Values, num_parts: int) -> Values:
        """Totals of all parts as the whole batch has them: sums, or means of as many."""
        done = [t / num_parts if one.is_mean else t for t, one in zip(totals, self.split.totals, strict=True)]
        return [d.astype(one.var.aval.dtype) for d, one in zip(done, self.split.totals, strict=True)]

    def seeds(self, seeds: Values, num_parts: int) -> Values:
        """The derivative of the loss by the totals of one part, from that by the totals of all."""
        return self.total_floats.take([s / num_parts if one.is_mean else s for s, one in zip(seeds, self.split.totals, strict=True)])

    def _with(self, floats: Values) -> Values:
        return self.floats.merge(floats, self.floats.leave(self.common))

    def _known(self, microbatch: Any, common: Values) -> dict[Var, Any]:
        return self.batch.known(self.split, microbatch) | dict(zip(self.split.common, common, strict=True))


def call(part: Part, known: Mapping[Var, Any]) -> Values:
    """A part's outputs in order, from known values by variable."""
    return part([known[var] for var in part.inputs])


