"""What every training step of a model has, on any mesh: what a search takes from its first plan."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from jgt.hardware.chip import Target
from jgt.mesh.sizes import group_of
from jgt.planner.timeline import Network

from ..models.config import ModelConfig, OwnModel
from .layout import STAGE, Candidate
from .plans import Answer


class SendTime(Protocol):
    """Seconds of a collective over axes of a mesh, outermost first, in which each device sends some bytes.

    is_ring: each device sends to its neighbour along the axis.
    """

    def __call__(self, mesh: Mapping[str, int], axes: Sequence[str], sent: float, *, is_ring: bool = False) -> float: ...


_LAYERS = 32


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a run's file says of its model. layers: None if it does not say. logits_bytes: of one row of the batch, in f32."""

    layers: int | None = None
    logits_bytes: float = 0.0

    @classmethod
    def of(cls, model: ModelConfig | OwnModel) -> Shape:
        """What the section `model:` says."""
        return cls(layers=getattr(model, "layers", None), logits_bytes=4.0 * (model.seq or 1) * (model.vocab or 1))


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
    model: Shape

    @property
    def layers(self) -> int:
        """Their number, or a guess. It only divides what plans correct."""
        return self.model.layers or _LAYERS

    @classmethod
    def of(cls, candidate: Candidate, plan: Answer, target: Target, model: Shape) -> Step:
        """What a first plan says about the model's step. plan: of one part of the batch, if the layout has several."""
        sizes, chip = candidate.sizes, target.chip
        devices = math.prod(sizes.values())
        # Without their number: parameters are f32, as the trainer stores them, and split over all axes but those of copies.
        split = math.prod(size for axis, size in candidate.mesh if axis not in ("data", "replica"))
        parameters = plan.parameters or plan.parameter_bytes * split / 4
        return cls(
            flops=plan.model_flops * devices * candidate.accumulate,
            parameters=parameters,
            state_bytes=plan.args_bytes / plan.parameter_bytes * parameters * 4,
            layer_bytes=plan.activations / candidate.rows * sizes.get(STAGE, 1),
            batch=rows_at_once(candidate) * candidate.parts,
            peak=chip.peak_flops("bf16") * 0.6,
            hbm=chip.hbm_gbs * 1e9,
            memory=0.95 * chip.hbm_gb * 1e9,
            model=model,
        )


def rows_at_once(candidate: Candidate) -> int:
    """The rows of the batch that all devices compute at once."""
    return math.prod(candidate.sizes[axis] for axis in candidate.batch_axes) * candidate.rows


def send_time(target: Target) -> SendTime:
    """Seconds of a collective over axes of a mesh."""
    known = dict[tuple[object, ...], tuple[tuple[int, ...], ...]]()
    network = Network(target=target, hosts=[device // target.per_host for device in range(target.num_devices)])

    def seconds(mesh: Mapping[str, int], axes: Sequence[str], sent: float, *, is_ring: bool = False) -> float:
        key = (tuple(mesh.items()), tuple(axes), is_ring)
        if key not in known:
            group = group_of(mesh, axes, target.per_host)
            known[key] = tuple(itertools.pairwise([*group, group[0]])) if is_ring else (group,)
        return network.seconds(known[key], round(sent))

    return seconds
