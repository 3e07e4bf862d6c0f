"""What ticks leave for each other: the carry of the loop over a table's ticks, and the view of it that one stage has.

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

Every dataclass here lists its fields in alphabetical order: they are operands of the compiled loops in this order.
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
    """Gradients added up over microbatches: of a stage's stacked weights, and of the common values that its layers read.

    Only weights and common values that are floats have an entry. The common values are summed over the stage's layers; the
    sum over the stages follows after the loop.
    """

    weights: Arrays = field(default_factory=Arrays)
    common: Arrays = field(default_factory=Arrays)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StageBuffers:
    """The buffers of the stages, or some of them: an empty list is a buffer that does not exist or is not passed."""

    inbox: Arrays = field(default_factory=Arrays)
    inbox_back: Arrays = field(default_factory=Arrays)
    saved: Arrays = field(default_factory=Arrays)
    stashed: Arrays = field(default_factory=Arrays)
    sums: GradientSums = field(default_factory=GradientSums)

    def updated(self, changed: StageBuffers) -> StageBuffers:
        """These buffers, with those that `changed` has in the place of their old values."""
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
    """What each stage has of its own in a tick: outside of the shard_map with a leading dim of stages, inside without it.

    ids: the numbers of the stage's layers, [layers of a stage]. weights: [layers of a stage, ...]. item: the stage's work.
    """

    buffers: StageBuffers
    ids: jax.Array
    item: _T
    weights: Arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Everywhere:
    """What all stages read in a tick.

    ends: what enters from the embedding, or cotangents from the head. is_read: whether this tick reads what stages show; None: it is not
    worth a branch.
    """

    batch: Batch
    common: Arrays
    ends: Arrays
    is_read: Flags | None
