"""A space of layouts as arrays, one number for each layout, and what a pipeline's schedule says of each."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from jgt.schedule.find import find_table
from jgt.schedule.schedules import SCHEDULES
from jgt.schedule.simulate import Simulation, simulate

from .layout import STAGE, Candidate
from .parts import Numbers

KEPT = {"block": 0.0, "layer": 0.0, "stage": 0.0, "matmuls": 7.0, "attention": 14.0, "none": 20.0}
"""What a layer keeps beside its input, in arrays of the input's size."""
BYTES, WIDE = 2, 4
"""Of a weight where it is multiplied, and where it is stored."""


class Columns:
    """A space as arrays, [layouts] each.

    others: the devices over which gradients are added up. model_split, split: the devices that share a weight where it is multiplied, and
    where it is stored. whole: whether weights are whole for a step. zb: whether gradients of weights have a pass of their own. uneven: the
    layers of the deepest stage over their mean, 1 if the number of layers is not known. names: kinds of recompute; remat: the index of a
    layout's.
    """

    def __init__(self, space: Sequence[Candidate], layers: int | None):
        def axis(name: str) -> Numbers:
            return np.array([one.sizes.get(name, 1) for one in space], float)

        self.tensor, self.fsdp, self.stages, self.expert = axis("tensor"), axis("fsdp"), axis(STAGE), axis("expert")
        self.rows, self.parts = (np.array([getattr(one, name) for one in space], float) for name in ("rows", "parts"))
        self.virtual = np.array([one.stages.virtual or 1 if one.stages else 1 for one in space], float)
        self.devices = np.array([math.prod(one.sizes.values()) for one in space], float)
        self.others = np.array([math.prod(one.sizes[name] for name in others_of(one)) for one in space], float)
        outside = [[size for name, size in one.mesh if name not in one.batch_axes or name == "expert"] for one in space]
        self.model_split = np.array([math.prod(sizes) for sizes in outside], float)
        self.split = self.model_split * self.fsdp
        # With ZeRO-1 parameters are stored like their state, and become whole for a step.
        zero1 = np.array([one.rules == "jgt:zero1" for one in space])
        self.zero1 = np.where(zero1, axis("data"), 1)
        layered = np.array([one.stages is not None and one.stages.gather == "layer" for one in space])
        self.layered = layered
        self.whole = zero1 | ((self.stages > 1) & ~layered)
        self.overlap = np.array(["overlap" in (one.rules or "") for one in space])
        # overlap.yaml extends the rules that split the sequence.
        self.sequence = self.overlap | np.array(["sequence" in (one.rules or "") for one in space])
        self.names = sorted({remat_of(one) for one in space})
        self.remat = np.array([self.names.index(remat_of(one)) for one in space])
        self.remats = np.column_stack([self.remat == index for index in range(len(self.names))]).astype(float)
        self.keeps = np.array([KEPT.get(name, 1.0) > 0 for name in self.names])[self.remat]
        self.all_kept = np.array([KEPT.get(name) == KEPT["none"] for name in self.names])[self.remat]
        self.in_flight = np.array([_in_flight(one) for one in space])
        self.zb = np.array([one.stages is not None and SCHEDULES[one.stages.schedule].splits_weights for one in space])
        chunks = self.stages * self.virtual
        self.uneven = np.ones(len(space)) if layers is None else np.ceil(layers / chunks) * chunks / layers
        self.form = np.column_stack([self.sequence & ~self.overlap, self.overlap, self.stages > 1, layered / 2, self.zb]).astype(float)


def remat_of(candidate: Candidate) -> str:
    """What decides what is computed again."""
    if candidate.stages is not None and candidate.stages.remat != "none":
        return candidate.stages.remat
    return candidate.remat or "as set"


def others_of(candidate: Candidate) -> list[str]:
    """The axes over which gradients are added up."""
    return [axis for axis in candidate.batch_axes if axis not in ("fsdp", "expert") and candidate.sizes[axis] > 1]


def _table_of(candidate: Candidate) -> tuple[str, int, int, int | None]:
    assert candidate.stages is not None
    s = candidate.stages
    # A table of thousands of microbatches takes long to simulate, and its idle time is the same.
    return s.schedule, candidate.sizes[STAGE], min(s.microbatches, 4 * candidate.sizes[STAGE]), s.virtual


def _in_flight(candidate: Candidate) -> float:
    """The microbatches, each of a whole stage, whose activations a stage keeps at once."""
    return 1.0 if candidate.stages is None else _simulated(*_table_of(candidate)).peak


def bubble_of(candidate: Candidate) -> float:
    """The share of a pipeline's time in which a stage does nothing useful."""
    if candidate.stages is None:
        return 0.0
    simulated, bubble = _table_of(candidate)[2], _simulated(*_table_of(candidate)).bubble
    idle = bubble / (1 - bubble) * simulated
    return idle / (idle + candidate.stages.microbatches)


@functools.cache
def _simulated(schedule: str, num_stages: int, microbatches: int, virtual: int | None) -> Simulation:
    return simulate(find_table(schedule, num_stages, microbatches, virtual, "search"))
