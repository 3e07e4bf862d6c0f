"""What a layout should take, before it is planned: a short closed form whose constants come from the plans that a search has made.

The form knows no model. From the first plan it takes what every training step has: parameters, FLOPs, and the arrays that a layer leaves
for the backward pass. From a layout it takes how these divide over the mesh:

    compute     the step's FLOPs over the devices, with what is computed again, over the share of time that is not bubble
    gathers     parameters that are sharded over an axis of the batch, gathered for each part of the batch; what compute cannot hide
    sums        gradients, over the other axes of the batch
    tensor      the rows of a device, gathered and scattered around each matmul
    update      parameters and optimizer state, read and written once

It is wrong by tens of percent, in the same way for similar layouts. So the logarithm of its error is a linear function of what the layouts
have in common (an axis of the mesh, what is recomputed, the number of rows at once), and each plan improves that function: a ridge
regression (Hoerl and Kennard, Technometrics 12, 1970). Memory has a form and a regression of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jgt.schedule.find import find_table
from jgt.schedule.simulate import Simulation, simulate

from .plans import Answer
from .space import STAGE, Candidate

Numbers = npt.NDArray[np.float64]
SendTime = Callable[[dict[str, int], Sequence[str], float], float]
"""(mesh, axes, bytes that a device sends) → seconds of a collective over these axes."""

AGAIN = {"none": 0.05, "matmuls": 0.05, "attention": 0.1, "block": 1 / 3, "layer": 1 / 3, "stage": 1 / 3}
"""What is computed again, in shares of forward and backward pass together. Attention's kernels always recompute a little."""
KEPT = {"block": 1.0, "layer": 1.0, "stage": 0.5, "matmuls": 8.0, "attention": 14.0, "none": 16.0}
"""Arrays of a layer's size that a layer keeps, in the arrays that `block` keeps. A first guess; plans correct it."""
_RIDGE = 0.3
_BYTES = 2
"""Of a weight where it is multiplied."""
_HIDDEN = 0.8
"""The share of compute that can hide collectives."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a model's step has on any mesh. flops: of the model. parameters: their number. state_bytes: of parameters and optimizer state.

    layer_bytes: what `block` keeps of one row of the batch. batch: rows. peak: FLOP/s of a device in matmuls. hbm: bytes/s. memory: the
    bytes that a program may use.
    """

    flops: float
    parameters: float
    state_bytes: float
    layer_bytes: float
    batch: int
    peak: float
    hbm: float
    memory: float | None


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds of a step, and bytes of a device; parts of the seconds by name."""

    seconds: float
    peak_bytes: float
    parts: dict[str, float]
    bubble: float


class Estimator:
    """Estimates all layouts of a space, and learns from plans. seconds, peak_bytes: the estimates, in the order of the space."""

    def __init__(self, step: Step, collective: SendTime, space: Sequence[Candidate]):
        self.step, self._collective, self.space = step, collective, space
        features = [_features(candidate) for candidate in space]
        names = {name: column for column, name in enumerate(sorted({name for of in features for name in of}), 1)}
        # [layouts, 1 + features]: the first column is the constant.
        self._features = np.zeros((len(space), len(names) + 1))
        self._features[:, 0] = 1
        for row, of in enumerate(features):
            for name, value in of.items():
                self._features[row, names[name]] = value
        self._forms = [self._form(candidate) for candidate in space]
        self._seconds = np.array([form.seconds for form in self._forms])
        self._state = np.array([self._state_bytes(candidate) for candidate in space])
        self._rest = np.array([form.peak_bytes for form in self._forms]) - self._state
        self._times: list[tuple[int, float]] = []
        self._sizes: list[tuple[int, float]] = []
        self.seconds, self.peak_bytes = self._seconds, self._state + self._rest

    def estimate(self, index: int) -> Estimate:
        """The estimate of a layout by its index, corrected by all plans so far."""
        form, seconds = self._forms[index], float(self.seconds[index])
        parts = {name: part * seconds / form.seconds for name, part in form.parts.items()}
        return Estimate(seconds=seconds, peak_bytes=float(self.peak_bytes[index]), parts=parts, bubble=form.bubble)

    def learn(self, index: int, plan: Answer) -> None:
        """Takes a plan of this layout into account."""
        # A program that does not fit is scheduled for memory, so that its time says little.
        if plan.fits and plan.seconds:
            self._times.append((index, math.log(plan.seconds / self._seconds[index])))
        self._sizes.append((index, math.log(max(plan.peak_bytes - self._state[index], 1e6) / self._rest[index])))
        self.seconds = self._seconds * self._correction(self._times)
        self.peak_bytes = self._state + self._rest * self._correction(self._sizes)

    def _correction(self, found: Sequence[tuple[int, float]]) -> Numbers:
        """The factor for each layout, by a ridge regression of the logarithms that were found."""
        if not found:
            return np.ones(len(self.space))
        rows, values = self._features[[index for index, _ in found]], np.array([value for _, value in found])
        # The constant is not held back; a feature of few plans is.
        ridge = _RIDGE * np.eye(rows.shape[1])
        ridge[0, 0] = 1e-3
        return np.exp(self._features @ np.linalg.solve(rows.T @ rows + ridge, rows.T @ values))

    # -- the form ---------------------------------------------------------------------------------------------------------

    def _form(self, candidate: Candidate) -> Estimate:
        step, sizes = self.step, candidate.sizes
        devices, split = math.prod(sizes.values()), self._split(candidate)
        simulation = None if candidate.stages is None else _simulated(*_table_of(candidate))
        bubble = 0.0 if simulation is None else _bubble(candidate, simulation)
        again = max(AGAIN.get(candidate.remat or "none", 0.0), AGAIN[candidate.stages.remat] if candidate.stages else 0.0)
        compute = step.flops * (1 + again) / devices / step.peak / (1 - bubble)
        weights = step.parameters * _BYTES / self._model_split(candidate)
        passes = candidate.parts if candidate.stages is None or candidate.stages.gather == "layer" else 1
        gathers = self._gathers(candidate, weights, passes, compute)
        sums = self._sums(candidate, weights)
        tensor = self._tensor(candidate, again)
        update = 2 * step.state_bytes / split / step.hbm
        parts = {"compute": compute * (1 - bubble), "bubble": compute * bubble, "gathers": gathers, "sums": sums, "tensor": tensor}
        parts["update"] = update
        peak = self._state_bytes(candidate) + self._gradient_bytes(candidate) + self._kept(candidate, simulation)
        return Estimate(seconds=sum(parts.values()), peak_bytes=peak, parts=parts, bubble=bubble)

    def _gathers(self, candidate: Candidate, weights: float, passes: int, compute: float) -> float:
        axes = [axis for axis in candidate.batch_axes if axis == "fsdp" and candidate.sizes[axis] > 1]
        if not axes:
            return 0.0
        n = candidate.sizes["fsdp"]
        # Once forward, once backward, and the gradients scattered.
        seconds = self._collective(candidate.sizes, axes, 3 * passes * weights * (n - 1) / n)
        return max(seconds - _HIDDEN * compute, 0.02 * seconds)

    def _sums(self, candidate: Candidate, weights: float) -> float:
        axes = [axis for axis in candidate.batch_axes if axis != "fsdp" and candidate.sizes[axis] > 1]
        if not axes:
            return 0.0
        n, shards = math.prod(candidate.sizes[axis] for axis in axes), candidate.sizes.get("fsdp", 1)
        return 0.7 * self._collective(candidate.sizes, axes, 2 * weights / shards * (n - 1) / n)

    def _tensor(self, candidate: Candidate, again: float) -> float:
        n = candidate.sizes.get("tensor", 1)
        if n == 1:
            return 0.0
        rows = self.step.batch / math.prod(candidate.sizes[axis] for axis in candidate.batch_axes)
        # Two matmul pairs of a layer, each with a gather and a scatter, forward and backward.
        sent = (8 + 4 * (again > 0.2)) * self.step.layer_bytes * rows / candidate.sizes.get(STAGE, 1) * (n - 1) / n
        return self._collective(candidate.sizes, ["tensor"], sent)

    def _kept(self, candidate: Candidate, simulation: Simulation | None) -> float:
        """What the forward pass keeps, and as much again as one layer works with."""
        own = KEPT.get(candidate.remat or "block", 8.0)
        stages = candidate.stages
        if stages is not None and stages.remat != "none":
            own = KEPT[stages.remat]
        alive = 1.0 if simulation is None else simulation.peak
        tensor = candidate.sizes.get("tensor", 1)
        # What all of a layer keeps is split over tensor; a block's input is, if the sequence is.
        split = tensor if own > 2 or "sequence" in (candidate.rules or "") or "overlap" in (candidate.rules or "") else 1
        layers = self.step.layer_bytes * candidate.rows * alive / candidate.sizes.get(STAGE, 1)
        return layers * (own / split + 0.5 / tensor) + 3e8

    def _gradient_bytes(self, candidate: Candidate) -> float:
        """Gradients in f32, and the weights that a pipeline holds whole during its ticks, whose gradients are whole, too."""
        parameters, stages = self.step.parameters, candidate.stages
        if stages is not None and stages.gather == "step":
            return (4 + _BYTES) * parameters / self._model_split(candidate)
        # Sums over the parts of a batch are there beside the gradients of a part.
        return (4 if candidate.parts == 1 else 8) * parameters / self._split(candidate)

    def _split(self, candidate: Candidate) -> int:
        """The devices that share a parameter."""
        return self._model_split(candidate) * candidate.sizes.get("fsdp", 1)

    def _model_split(self, candidate: Candidate) -> int:
        return math.prod(size for axis, size in candidate.mesh if axis not in candidate.batch_axes or axis == "expert")

    def _state_bytes(self, candidate: Candidate) -> float:
        state, own = self.step.state_bytes, 4 * self.step.parameters
        # With ZeRO-1 each device has all parameters, in f32, and a part of the rest.
        more = candidate.sizes.get("data", 1) if candidate.rules == "jgt:zero1" else 1
        return (own + (state - own) / more) / self._split(candidate)


def _features(candidate: Candidate) -> dict[str, float]:
    """What a layout has in common with others, by name."""
    found = {f"remat {candidate.remat}": 1.0, f"rules {candidate.rules}": 1.0, "rows": math.log2(candidate.rows)}
    found |= {f"axis {axis}": math.log2(size) for axis, size in candidate.mesh if size > 1 and axis not in ("data", "replica")}
    if candidate.stages is None:
        found["parts"] = math.log2(candidate.accumulate)
    else:
        s = candidate.stages
        found |= {f"schedule {s.schedule}": 1.0, f"stages remat {s.remat}": 1.0, f"gather {s.gather}": 1.0}
        found["virtual"] = math.log2(s.virtual or 1)
    return found


def _table_of(candidate: Candidate) -> tuple[str, int, int, int | None]:
    assert candidate.stages is not None
    s = candidate.stages
    # A table of thousands of microbatches takes long to simulate, and its idle time is the same.
    return s.schedule, candidate.sizes[STAGE], min(s.microbatches, 4 * candidate.sizes[STAGE]), s.virtual


def _bubble(candidate: Candidate, simulation: Simulation) -> float:
    assert candidate.stages is not None
    simulated = _table_of(candidate)[2]
    idle = simulation.bubble / (1 - simulation.bubble) * simulated
    return idle / (idle + candidate.stages.microbatches)


@functools.cache
def _simulated(schedule: str, num_stages: int, microbatches: int, virtual: int | None) -> Simulation:
    return simulate(find_table(schedule, num_stages, microbatches, virtual, "search"))
