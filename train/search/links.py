"""How long the collectives of a layout take, and how much of that kernels hide, before it is planned.

There are four kinds: weights that are gathered and gradients that are scattered, gradients that are added up over the other axes of the
batch, rows around each matmul of tensor parallelism, and rows between stages. Bytes and links give their time. The share that kernels
hide is what plans of many models have shown.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .columns import BYTES, WIDE, Columns, others_of
from .layout import STAGE, Candidate
from .parts import Numbers
from .step import SendTime, Step

LINKS = ("gathers", "sums", "tensor", "stage")
"""The kinds of collectives."""


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """Of the time of collectives of one kind, the share that kernels hide, before a plan says so.

    plain, looped, piped, layered: where links are busy for as long as kernels, without a loop over parts, with one, in a pipeline, and in a
    pipeline that gathers layer by layer. overlap, longer, full: what the rules of overlap.yaml, each doubling of the time of links, and a
    full memory add.
    """

    plain: float = 0.0
    looped: float = 0.0
    piped: float
    layered: float
    overlap: float = 0.0
    longer: float
    full: float

    def share(self, c: Columns, ratio: Numbers | float, full: Numbers | float) -> Numbers:
        """[layouts]. ratio: the seconds of links over those of kernels. full: how near to its limit the memory is, from 0 to 2."""
        base = np.where(c.stages > 1, np.where(c.layered, self.layered, self.piped), np.where(c.parts > 1, self.looped, self.plain))
        return base + self.overlap * c.overlap + self.longer * np.log2(np.maximum(ratio, 1e-9)) + self.full * full


HIDDEN = {
    "gathers": Hidden(plain=0.7, looped=0.35, piped=-0.8, layered=0.05, overlap=0.05, longer=-0.08, full=-0.34),
    "sums": Hidden(plain=0.15, looped=0.4, piped=0.0, layered=0.25, overlap=-0.25, longer=-0.02, full=0.23),
    "tensor": Hidden(plain=0.3, looped=0.3, piped=0.28, layered=0.1, overlap=0.21, longer=-0.15, full=-0.55),
    "stage": Hidden(piped=-0.15, layered=0.07, longer=-0.06, full=-0.06),
}
"""Fitted to plans of twelve models on 8 to 768 GPUs (`benchmarks/fit.py`)."""


def link_seconds(step: Step, collective: SendTime, space: Sequence[Candidate], c: Columns, bubble: Numbers) -> dict[str, Numbers]:
    """Seconds of the collectives of each layout, hidden ones included, by what they are for. bubble: the share of idle time."""
    weights = step.parameters * BYTES / c.model_split
    rows = step.layer_bytes * c.rows * c.parts / c.stages
    passes = np.where(c.whole, 1, c.parts * c.uneven)
    # In a pipeline gradients are f32: they are summed over microbatches first.
    wide = np.where(c.stages > 1, WIDE / BYTES, 1)
    # Gathered for the forward and the backward pass, and the gradients scattered.
    copies = np.where(c.layered | ((c.stages == 1) & (c.parts == 1)), 4, 3)
    sent = {"gathers": copies * passes * weights * (c.fsdp - 1) / c.fsdp}
    sent["sums"] = 2 * wide * weights / c.fsdp * (c.others - 1) / c.others
    # Two matmul pairs of a layer, each with a gather and a scatter, forward and backward, and what is computed again.
    sent["tensor"] = 12 * rows * c.uneven * (c.tensor - 1) / c.tensor
    # Both directions in each tick, also in those of the bubble.
    ticks = c.parts * c.virtual / (1 - bubble)
    sent["stage"] = np.where(c.virtual > 1, 5, 10) * ticks * step.layer_bytes / step.layers * c.rows / c.tensor
    layers = step.layers / c.stages
    counts = {"gathers": copies * np.where(c.whole, 1, layers * passes), "sums": 1, "tensor": 12 * layers * c.parts, "stage": 2 * ticks}
    found: dict[str, Numbers] = {}
    # The time of a collective is a start and a rate, which few meshes share.
    for name in LINKS:
        rates = np.array([_start_and_rate(collective, one, name) for one in space])
        found[name] = rates[:, 0] * counts[name] + rates[:, 1] * sent[name]
    return found


def _start_and_rate(collective: SendTime, candidate: Candidate, name: str) -> tuple[float, float]:
    """The seconds of a collective of a layout without any bytes, and for each byte; 0 if the layout has none."""
    axes = {"gathers": ["fsdp"], "sums": others_of(candidate), "tensor": ["tensor"], "stage": [STAGE]}[name]
    axes = [axis for axis in axes if candidate.sizes.get(axis, 1) > 1]
    # With the rules of overlap.yaml rows go around a ring.
    is_ring = name == "stage" or (name == "tensor" and "overlap" in (candidate.rules or ""))
    return _rate(collective, candidate.mesh, tuple(axes), is_ring) if axes else (0.0, 0.0)


@functools.cache
def _rate(collective: SendTime, mesh: tuple[tuple[str, int], ...], axes: tuple[str, ...], is_ring: bool) -> tuple[float, float]:
    start = collective(dict(mesh), axes, 0.0, is_ring=is_ring)
    return start, (collective(dict(mesh), axes, 1e9, is_ring=is_ring) - start) / 1e9


def by_part(seconds: Mapping[str, float], candidate: Candidate) -> dict[str, float]:
    """Seconds by what they are for, of seconds by axes (`data+fsdp`). Small ones of several axes are left out."""
    found: dict[str, float] = defaultdict(float)
    for text, value in seconds.items():
        axes = text.split("+")
        if STAGE in axes:
            found["stage"] += value
        elif axes == ["tensor"]:
            found["tensor"] += value
        elif set(axes) <= set(candidate.batch_axes) and "expert" not in axes:
            found["gathers" if "fsdp" in axes else "sums"] += value
    return found
