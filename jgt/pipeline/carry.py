"""The carry of the loop over a table's ticks, and the part of it that a stage sees.

Whatever one tick computes and a later tick reads must be in the carry of the scan, at a fixed shape. Activations,
residuals and cotangents wait in buffers with as many slots as the table ever needs at once (`jgt.schedule.buffers` assigns
the slots), so memory does not grow with the number of microbatches unless the schedule itself does, as gpipe. Everything
else that is carried is a sum: totals of the loss, and gradients.

Buffers have a leading dim of stages, which the shard_map over the stage axis splits. Shapes with 2 stages, 3 layers each
in one chunk, an activation f32[4, seq, embed] and weights f32[6, embed, ffn]:

    inbox       [2, slots, 4, seq, embed]         activations that arrived from another stage
    inbox_back  [2, slots, 4, seq, embed]         cotangents that arrived, from another stage or from the head
    saved       [2, slots, 3, 4, seq, embed]      residuals, one list entry for each residual of a layer
    stashed     [2, slots, 3, ...]                inputs of weight gradients that are not residuals
    sums        [2, 3, embed, ffn]                gradients of the weights, in f32 at least

The order of the fields of these dataclasses is the order of the operands of the compiled loops.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import jax

from jgt.pipeline.arrays import Arrays, Flags
from jgt.pipeline.ends import Batch

_T = TypeVar("_T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class GradientSums:
    """The gradients of a stage's stacked weights and of the common values that its layers read, added up over microbatches.

    Only weights and common values that are floats have an entry. The common values are summed over the stage's layers; the
    sum over the stages follows after the loop.
    """

    weights: Arrays = field(default_factory=Arrays)
    common: Arrays = field(default_factory=Arrays)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StageBuffers:
    """The buffers of the stages, or some of them. An empty list is a buffer that does not exist or is not passed."""

    inbox: Arrays = field(default_factory=Arrays)
    inbox_back: Arrays = field(default_factory=Arrays)
    saved: Arrays = field(default_factory=Arrays)
    stashed: Arrays = field(default_factory=Arrays)
    sums: GradientSums = field(default_factory=GradientSums)

    def updated(self, changed: StageBuffers) -> StageBuffers:
        """These buffers, with the ones in `changed` in place of their old values."""
        # An item gets and returns only the buffers that it touches. Its other lists are empty.
        return replace(self, **{name: buffer for name, buffer in vars(changed).items() if jax.tree.leaves(buffer)})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Carry:
    """The state between two ticks. common: sums of gradients from embedding and head, empty without gradients."""

    common: Arrays
    staged: StageBuffers
    totals: Arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class OnStage(Generic[_T]):
    """The values of one stage in a tick. Outside of the shard_map they have a leading dim of stages.

    ids: the numbers of the stage's layers, [layers of a stage]. weights: [layers of a stage, ...]. item: the stage's work.
    """

    buffers: StageBuffers
    ids: jax.Array
    item: _T
    weights: Arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Everywhere:
    """The values that all stages read in a tick.

    ends: the values that enter from the embedding, or cotangents from the head. is_read: whether this tick reads the values that stages
    show; None if that is not worth a branch.
    """

    batch: Batch
    common: Arrays
    ends: Arrays
    is_read: Flags | None
