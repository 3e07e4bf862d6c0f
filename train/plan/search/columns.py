"""A space of layouts as arrays, one number for each layout, and what a pipeline's schedule says of each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from jgt import PipelineConfig

from .layout import Candidate, Roles

Numbers = npt.NDArray[np.float64]
KEPT = {"block": 0.0, "layer": 0.0, "stage": 0.0, "matmuls": 9.0, "attention": 14.0, "none": 20.0}
"""The memory of a layer beside its input, in arrays of the input's size, by what is recomputed."""
_AGAIN = {"matmuls": 0.03, "attention": 0.1, "none": 0.0}
"""The share of the matmuls that the backward pass repeats; a third where it repeats the whole forward pass."""
_WEIGHTS_PASS = 14.0
"""The memory that a layer needs in addition until the pass of its own for the gradients of weights, in arrays of the input's size."""


class Columns:
    """A space as arrays, [layouts] each.

    context: the devices that share a row. rows: the rows of a device at once, a part of one where devices share it.
    copies: the devices over which gradients are added up. model_split, split: the devices that share a weight where it is multiplied, and
    where it is stored. whole: whether weights are whole for a step. layered: whether a pipeline gathers them layer by layer. bubble: the
    share of a pipeline's time in which a stage idles. in_flight: the microbatches, each of a whole stage, whose activations a stage keeps.
    uneven: the layers of the deepest stage over their mean, 1 if the number of layers is not known. kept: what layers keep beside their
    input. again: the share of the matmuls that is computed again.
    """

    def __init__(self, space: Sequence[Candidate], layers: int | None):
        def column(value: Callable[[Candidate], float]) -> Numbers:
            return np.array([value(one) for one in space], float)

        def size(axes: Callable[[Roles], tuple[str, ...]]) -> Numbers:
            return column(lambda one: one.size(axes(one.roles)))

        self.tensor, self.weights = size(lambda roles: roles.tensor), size(lambda roles: roles.weights)
        self.state, self.copies = size(lambda roles: roles.state), size(lambda roles: roles.copies)
        self.stages, self.rows, self.parts = (column(lambda one, name=name: getattr(one, name)) for name in ("num_stages", "rows", "parts"))
        self.context = size(lambda roles: roles.context)
        self.rows = self.rows / self.context
        self.virtual = column(lambda one: 1 if one.stages is None else one.stages.virtual or 1)
        self.devices = column(lambda one: one.size(axis for axis, _ in one.mesh))
        self.model_split = self.devices / self.copies / self.weights
        self.split = self.model_split * self.weights
        self.layered = column(lambda one: one.stages is not None and one.stages.gather == "layer") > 0
        # ZeRO-1 stores parameters like their state, and makes them whole for a step.
        self.whole = (self.state > 1) | ((self.stages > 1) & ~self.layered)
        self.sequence = column(lambda one: one.roles.sequence) > 0
        chunks = self.stages * self.virtual
        self.uneven = np.ones(len(space)) if layers is None else np.ceil(layers / chunks) * chunks / layers
        # The other stages wait for the deepest one.
        self.bubble = 1 - (1 - column(lambda one: _schedule_of(one)[0])) / self.uneven
        self.in_flight = column(lambda one: _schedule_of(one)[1])
        own_pass = column(lambda one: _schedule_of(one)[2]) > 0
        kept = column(lambda one: KEPT[_remat_of(one)])
        self.kept = np.where(own_pass, np.maximum(kept + _WEIGHTS_PASS, KEPT["none"]), kept)
        self.again = column(lambda one: _AGAIN.get(_remat_of(one), 1 / 3))


def _remat_of(candidate: Candidate) -> str:
    """The setting that decides what is computed again; `block` if the run's file has it."""
    stages = candidate.stages
    return (candidate.remat or "block") if stages is None or stages.remat == "none" else stages.remat


def _schedule_of(candidate: Candidate) -> tuple[float, float, bool]:
    """The bubble, the peak of activations, and whether the gradients of weights are a pass of their own."""
    stages, num_stages = candidate.stages, candidate.num_stages
    if stages is None:
        return 0.0, 1.0, False
    # A table of thousands of microbatches takes long to simulate, and its idle time is the same.
    microbatches = min(stages.microbatches, 4 * num_stages)
    bubble, peak, own_pass = _simulated(stages.schedule, num_stages, microbatches, stages.virtual)
    idle = bubble / (1 - bubble) * microbatches
    return idle / (idle + stages.microbatches), peak, own_pass


@functools.cache
def _simulated(schedule: str, num_stages: int, microbatches: int, virtual: int | None) -> tuple[float, float, bool]:
    options = PipelineConfig(signal="layers", schedule=schedule, microbatches=microbatches, virtual=virtual)
    simulation = options.simulate(num_stages)
    return simulation.bubble, simulation.peak, simulation.table.weight is not None
