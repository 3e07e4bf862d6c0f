"""Estimates of layouts before they are planned: one closed form for the time of a step, and one for its memory.

The forms know no model. From a first plan they take what every training step has: parameters, FLOPs, and the input of a layer. From a
layout they take how these divide over the mesh. A step takes the time of its matmuls, of the bytes that other kernels move, of launches and
of a pipeline's bubble, and of collectives, part of which compute hides: weights gathered and gradients scattered, gradients added up, rows
around each matmul, rows between stages. A device holds state, gradients, weights that are whole for a while, what layers keep for each
microbatch in flight, and what one layer works with.

The constants are round numbers. Exact ones would not help: a plan's own time is known to about 35 %, and the answer of a search is always
the fastest of the layouts that were compiled. So a plan corrects nothing but the scale: the medians of planned over estimated seconds and
bytes.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jgt import MeshSizes
from jgt.planner import Target

from ...config import Config
from ...models.config import ModelConfig
from .columns import Columns, Numbers
from .layout import Candidate
from .plans import PlanFigures

BYTES, WIDE = 2, 4
"""The bytes of a weight where it is multiplied, and where it is stored."""
_FROZEN_BYTES = {"f32": WIDE, "bf16": BYTES, "int8": 66 / 64, "nf4": 34 / 64}
"""The bytes of a frozen weight by `model.base_dtype`."""
_HIDDEN = {"gathers": 0.6, "sums": 0.3, "tensor": 0.3, "context": 0.9, "stage": 0.0}
"""The share of the collectives of each kind that kernels hide, as far as kernels take as long."""
_READS = 300
"""Reads and writes, by memory-bound kernels of a step, of an array of the size of a layer's input, for each layer and part of the batch."""
_KEPT_READS = 100
"""Further ones in a layer that keeps something for the backward pass."""
_WEIGHT_READS = 15
"""Reads and writes of all weights, for each part of the batch."""
_LAUNCHES = 5e-4
"""Seconds to launch the kernels of a layer for a part of the batch: about a hundred, at a few microseconds each."""
_WORK, _LOGITS = 30, 3
"""Arrays of the size of a layer's input that one layer works with, and of the logits that their loss does."""
_LAYERS = 32
"""The number of layers of a model that does not say it. It only divides what is known of all layers together."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Figures of a model's step that no mesh changes.

    flops: the FLOPs of all devices. parameters: the number of parameters. trained: the share of them that has gradients. state_bytes: the
    bytes of parameters and optimizer state. layer_bytes: the bytes that `block` keeps of one row of the batch. layers: the number of
    layers; None if the model does not say it. logits_bytes: the f32 bytes of the logits of one row. keys: the width of a layer's keys over
    that of its input.
    """

    flops: float
    parameters: float
    trained: float = 1.0
    state_bytes: float
    layer_bytes: float
    layers: int | None
    logits_bytes: float
    keys: float = 1.0

    @classmethod
    def of(cls, candidate: Candidate, plan: PlanFigures, config: Config) -> Step:
        """The figures that a plan shows, of one of the candidate's parts of the batch."""
        model, parts = config.model, candidate.accumulate
        devices = candidate.size(axis for axis, _ in candidate.mesh)
        # Without their number: parameters are f32, as the trainer stores them, and split over all axes that do not hold copies.
        parameters = plan.parameters or plan.parameter_bytes * devices / candidate.size(candidate.roles.copies) / WIDE
        trained = (plan.trained or parameters) / parameters
        width = WIDE * trained + _FROZEN_BYTES[model.base_dtype] * (1 - trained)
        return cls(
            flops=plan.model_flops * devices * parts,
            parameters=parameters,
            trained=trained,
            state_bytes=plan.args_bytes / plan.parameter_bytes * parameters * width,
            layer_bytes=plan.activations / candidate.rows * candidate.num_stages * candidate.size(candidate.roles.context),
            layers=getattr(model, "layers", None),
            logits_bytes=WIDE * (model.seq or 1) * (model.vocab or 1),
            keys=model.num_kv_heads * model.head_size / model.embed if isinstance(model, ModelConfig) else 1.0,
        )


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The seconds of a step, the bytes of a device, and the share of a pipeline's time that is idle."""

    seconds: float
    peak_bytes: float
    bubble: float


class Estimator:
    """Estimates all layouts of a space on a target, in its order."""

    def __init__(self, step: Step, target: Target, space: Sequence[Candidate]):
        self.step = step
        columns = Columns(space, step.layers)
        self._seconds = _seconds(step, target, space, columns)
        self._peak_bytes = _peak_bytes(step, columns)
        self._bubble = columns.bubble
        self._ratios: list[tuple[float, float]] = []

    @property
    def seconds(self) -> Numbers:
        """The seconds of a step with each layout, on the scale of the plans."""
        return self._seconds * _scale([seconds for seconds, _ in self._ratios])

    @property
    def peak_bytes(self) -> Numbers:
        """The bytes of a device with each layout, on the scale of the plans."""
        return self._peak_bytes * _scale([peak for _, peak in self._ratios])

    def estimate(self, index: int) -> Estimate:
        """The estimate of a layout by its index."""
        return Estimate(seconds=float(self.seconds[index]), peak_bytes=float(self.peak_bytes[index]), bubble=float(self._bubble[index]))

    def learn(self, index: int, plan: PlanFigures) -> None:
        """Takes the scale of a layout's plan into account."""
        self._ratios.append((plan.seconds / float(self._seconds[index]), plan.peak_bytes / float(self._peak_bytes[index])))


def _scale(ratios: Sequence[float]) -> float:
    return statistics.median(ratios) if ratios else 1.0


def _seconds(step: Step, target: Target, space: Sequence[Candidate], c: Columns) -> Numbers:
    layers = step.layers or _LAYERS
    matmuls = (1 + c.again) * step.flops / c.devices / (0.6 * target.chip.peak_flops("bf16"))
    rows = step.layer_bytes * c.rows * c.parts / c.stages / c.tensor
    weights = np.where(c.parts > 1, step.parameters * BYTES / c.model_split * c.parts, 0)
    moved = (_READS + np.where(c.kept > 0, _KEPT_READS, 0)) * rows + _WEIGHT_READS * weights
    launches = _LAUNCHES * layers * c.parts / c.stages
    busy = matmuls + moved / (target.chip.hbm_gbs * 1e9) + launches
    seconds = busy / (1 - c.bubble)
    for name, links in link_seconds(step, target, space, c).items():
        seconds = seconds + links - _HIDDEN[name] * np.minimum(links, busy)
    return seconds


def _peak_bytes(step: Step, c: Columns) -> Numbers:
    layers = step.layers or _LAYERS
    local, whole = step.parameters / c.split, step.parameters / c.model_split
    inputs = step.layer_bytes * c.rows * c.in_flight / c.stages
    # Arrays between two blocks of matmuls are whole on each device, unless the rules split the sequence there: the input of a layer, and
    # of what it keeps, two more (Korthikanti et al., arXiv 2205.05198).
    between = np.where(c.sequence, c.tensor, 1)
    kept = c.kept * inputs / c.tensor + np.where(c.kept > 0, 2, 0) * inputs * (1 / between - 1 / c.tensor)
    # Sums over the parts of a batch are there beside the gradients of a part.
    gradients = step.trained * WIDE * np.where(c.whole, 2 * whole, local * np.where(c.parts > 1, 2, 1))
    read = np.where(c.whole, BYTES * whole, 0)
    state = step.state_bytes / c.split / c.state * c.uneven + 5e8
    one_layer = 4 * BYTES * whole * c.stages / layers + _WORK * step.layer_bytes / layers * c.rows / c.tensor
    # The trainer computes logits in as many parts as make one of them at most 1 GiB.
    logits = _LOGITS * np.minimum(step.logits_bytes * c.rows / c.tensor / c.stages, 2**30)
    return state + gradients + read + inputs / between + kept + one_layer + logits


def link_seconds(step: Step, target: Target, space: Sequence[Candidate], c: Columns) -> dict[str, Numbers]:
    """Seconds of the collectives of each layout, hidden ones included, by what they are for."""
    layers = (step.layers or _LAYERS) / c.stages
    weights = step.parameters * BYTES / c.model_split
    rows = step.layer_bytes * c.rows * c.parts / c.stages
    passes = np.where(c.whole, 1, c.parts * c.uneven)
    # In a pipeline gradients are f32: they are summed over microbatches first.
    wide = np.where(c.stages > 1, WIDE / BYTES, 1)
    # Gathered for the forward and the backward pass, and the gradients scattered.
    gathers = np.where(c.whole, 1, 2)
    copies = gathers + step.trained * (np.where(c.layered | ((c.stages == 1) & (c.parts == 1)), 4, 3) - gathers)
    # Both directions in each tick, also where a stage idles.
    ticks = c.parts * c.virtual / (1 - c.bubble)
    kinds: dict[str, tuple[Callable[[Candidate], tuple[str, ...]], Numbers | float, Numbers]] = {
        "gathers": (
            lambda one: one.roles.weights,
            copies * np.where(c.whole, 1, layers * passes),
            copies * passes * weights * (c.weights - 1) / c.weights,
        ),
        "sums": (lambda one: one.roles.copies, 1.0, 2 * step.trained * wide * weights / c.weights * (c.copies - 1) / c.copies),
        # Two matmul pairs of a layer, each with a gather and a scatter, forward and backward, and what is computed again.
        "tensor": (lambda one: one.roles.tensor, 12 * layers * c.parts, 12 * rows * c.uneven * (c.tensor - 1) / c.tensor),
        # Keys and values around the ring, forward, again and backward, and their gradients in f32.
        "context": (
            lambda one: one.roles.context,
            4 * layers * c.parts * c.context,
            step.keys * rows * np.where(c.context > 1, 6 * (c.context - 1) + 4 * c.context, 0),
        ),
        "stage": (
            lambda one: () if one.stages is None else (one.stages.axis,),
            2 * ticks,
            np.where(c.virtual > 1, 5, 10) * ticks * step.layer_bytes / (step.layers or _LAYERS) * c.rows / c.tensor,
        ),
    }
    start_and_rate = _collectives(target)
    found: dict[str, Numbers] = {}
    for name, (axes, count, num_bytes) in kinds.items():
        is_ring = [name == "stage" or (name == "tensor" and one.roles.overlap) for one in space]
        rates = np.array([start_and_rate(one.mesh, axes(one), ring) for one, ring in zip(space, is_ring, strict=True)])
        found[name] = rates[:, 0] * count + rates[:, 1] * num_bytes
    return found


def _collectives(target: Target) -> Callable[[tuple[tuple[str, int], ...], tuple[str, ...], bool], tuple[float, float]]:
    """A function to the seconds of a collective along axes of a mesh without any bytes, and for each byte that a device sends.

    Its third argument says whether each device sends only to its neighbour along the axes.
    """
    network = target.network()

    # Few meshes share a space.
    @functools.cache
    def start_and_rate(mesh: tuple[tuple[str, int], ...], axes: tuple[str, ...], is_ring: bool) -> tuple[float, float]:
        sizes = dict(mesh)
        if math.prod(sizes.get(axis, 1) for axis in axes) == 1:
            return 0.0, 0.0
        group = MeshSizes(sizes).group_of(axes, target.per_host)
        groups = tuple(itertools.pairwise([*group, group[0]])) if is_ring else (group,)
        start, gigabyte = (network.seconds(groups, sent) for sent in (0, 10**9))
        return start, (gigabyte - start) / 1e9

    return start_and_rate
