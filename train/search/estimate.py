"""What a layout should take, before it is planned: closed forms whose constants come from the plans that a search has made.

The forms know no model. From the first plan they take what every training step has: parameters, FLOPs, and the input of a layer. From a
layout they take how these divide over the mesh:

    matmuls     the step's FLOPs over the devices
    memory      kernels between matmuls, by the bytes that they read and write
    recompute   what the backward pass computes again, as a share of the matmuls
    launch      the starts of kernels: as many as there are parts of the batch
    bubble      what the schedule's simulation says, of all of these
    gathers     weights that are gathered, and gradients that are scattered, for each part of the batch
    sums        gradients that are added up over the other axes of the batch
    tensor      rows around each matmul
    stage       rows between stages

Of the last four, kernels hide a share. A device holds state, gradients, weights that are whole for a while, what layers keep for each
microbatch in flight, and what one layer works with.

A plan has the same parts, and each corrects its own form (`parts.py`). What a device computes for a row of the batch is the same on any
mesh with the same tensor parallelism, and how long a link is busy follows from bytes, so a few plans correct thousands of estimates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from jgt.schedule.schedules import TRIED

from .columns import KEPT, Columns, bubble_of
from .forms import MEMORY, ROWS, TRAFFIC, held, moved, state
from .layout import Candidate
from .links import HIDDEN, LINKS, by_part, link_seconds
from .parts import Factor, Numbers, Portion, Sum
from .plans import Answer
from .step import SendTime, Step

_N = TypeVar("_N", float, Numbers)


@dataclass(frozen=True, kw_only=True)
class Again:
    """What the backward pass computes again, before a plan says so.

    matmuls, memory: shares of the matmuls and of the memory-bound kernels of forward and backward pass together.
    """

    matmuls: float
    memory: float

    def share(self, memory: _N) -> _N:
        """Seconds, over the seconds of matmuls. memory: the same for memory-bound kernels."""
        return self.matmuls + self.memory * memory


AGAIN = {
    "none": Again(matmuls=0.02, memory=0.0),
    "matmuls": Again(matmuls=0.04, memory=0.14),
    "attention": Again(matmuls=0.1, memory=0.1),
    "all": Again(matmuls=0.25, memory=0.15),
}
"""By what is recomputed: `block`, `layer` and `stage` recompute all."""
_NARROW = 0.009
"""By how much longer matmuls take for each further device that shares them, because each has less work at once: in plans of ten models
1 % with two devices, 3 % with four, 7 % with eight."""
_ROOMY = 0.7
"""The share of the memory below which XLA overlaps whatever it can."""
_SCHEDULES = tuple(dict.fromkeys(name for name, _ in TRIED))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds of a step, and bytes of a device; parts of the seconds by name."""

    seconds: float
    peak_bytes: float
    parts: dict[str, float]
    bubble: float


@dataclass(frozen=True, kw_only=True)
class _All:
    """The estimates of a space, [layouts] each."""

    seconds: Numbers
    peak_bytes: Numbers
    parts: dict[str, Numbers]


class Estimator:
    """Estimates all layouts of a space, and learns from plans."""

    def __init__(self, step: Step, collective: SendTime, space: Sequence[Candidate]):
        self.step, self.space = step, space
        c = self._columns = Columns(space, step.model.layers)
        form = c.form
        kernels = np.column_stack([form, np.log2(c.tensor) / 4, np.log2(c.rows) / 8, np.log2(c.expert) / 4])
        launched = np.column_stack([form, c.remats, c.tensor > 1, np.log2(c.virtual)]).astype(float)
        self._state = state(step, c)
        # The other stages wait for the deepest one.
        self._bubble = 1 - (1 - np.array([bubble_of(one) for one in space])) / c.uneven
        schedules = [[float(one.stages is not None and one.stages.schedule == name) for name in _SCHEDULES] for one in space]
        self._matmuls = Factor(kernels, step.flops / c.devices / step.peak * (1 + _NARROW * (c.tensor - 1)))
        # About a hundred kernels for a layer and a part of the batch, at a few microseconds each.
        self._launch = Factor(launched, 5e-4 * step.layers * c.parts / c.stages)
        self._again = {name: Portion(kernels) for name in AGAIN}
        self._again_of = [name if name in AGAIN else "all" if KEPT.get(name) == 0 else "attention" for name in c.names]
        self._idle = Factor(np.array(schedules), np.ones(len(space)))
        self._traffic = Sum(moved(step, c), TRAFFIC, ROWS)
        self._memory = Sum(held(step, c), MEMORY)
        looped = (c.stages == 1) & (c.parts > 1)
        hidden = np.column_stack([form, c.remats / 2, np.log2(c.tensor) / 4, looped]).astype(float)
        # Plans without a pipeline say little of one with it. So no factor is common to all layouts.
        linked = {name: np.column_stack([form, c.remats, c.stages == 1]) for name in LINKS}
        # Whether gradients are added up once a step, or for each part of the batch.
        linked["sums"] = np.column_stack([linked["sums"], np.where(looped, np.log2(c.parts), 0)])
        linked["stage"] = np.column_stack([linked["stage"], np.log2(c.virtual), np.log2(c.stages) / 4])
        links = link_seconds(step, collective, space, c, self._bubble)
        self._links = {name: Factor(linked[name], links[name], 0.5, 10.0) for name in LINKS}
        self._hidden = {name: Portion(hidden) for name in LINKS}
        self._all: _All | None = None

    @property
    def seconds(self) -> Numbers:
        """Of a step with each layout, in the order of the space, corrected by all plans so far."""
        return self._estimates().seconds

    @property
    def peak_bytes(self) -> Numbers:
        """Of a device with each layout, in the order of the space, corrected by all plans so far."""
        return self._estimates().peak_bytes

    def estimate(self, index: int) -> Estimate:
        """The estimate of a layout by its index, corrected by all plans so far."""
        found = self._estimates()
        return Estimate(
            seconds=float(found.seconds[index]),
            peak_bytes=float(found.peak_bytes[index]),
            parts={name: float(values[index]) for name, values in found.parts.items()},
            bubble=float(self._bubble[index]),
        )

    def learn(self, index: int, plan: Answer) -> None:
        """Takes a plan of this layout into account."""
        self._all = None
        self._memory.learn(index, plan.peak_bytes - float(self._state[index]))
        if parts := plan.parts:
            self._learn_kernels(index, parts)
            busy = sum(seconds for name, seconds in parts.items() if name not in ("bubble", "exposed"))
            links, exposed = (by_part(found or {}, self.space[index]) for found in (plan.links, plan.exposed))
            for name, found in links.items():
                self._links[name].learn(index, found)
                if found > 0 and busy > 0:
                    hidden = (found - exposed.get(name, 0.0)) / min(found, busy)
                    expected = HIDDEN[name].share(self._columns, found / busy, self._full(plan.peak_bytes))[index]
                    # A short time says little about what is hidden of a long one.
                    self._hidden[name].learn(index, hidden, expected, min(1.0, 10 * found / plan.seconds))

    def _learn_kernels(self, index: int, parts: Mapping[str, float]) -> None:
        matmuls = parts.get("matmul", 0.0) + parts.get("attention", 0.0)
        memory, launch, again = (parts.get(name, 0.0) for name in ("memory", "launch", "recompute"))
        self._matmuls.learn(index, matmuls)
        self._launch.learn(index, launch)
        self._traffic.learn(index, memory * self.step.hbm)
        if matmuls > 0:
            name = self._again_of[self._columns.remat[index]]
            self._again[name].learn(index, again / matmuls, AGAIN[name].share(memory / matmuls))
        if bubble := float(self._bubble[index]):
            self._idle.learn(index, parts.get("bubble", 0.0) / ((matmuls + memory + launch + again) * bubble / (1 - bubble)))

    def _estimates(self) -> _All:
        """The estimates, from the forms as they are now."""
        if self._all is not None:
            return self._all
        matmuls, c = self._matmuls.values(), self._columns
        memory = self._traffic.values() / self.step.hbm
        shares = [self._again[name].values(AGAIN[name].share(memory / matmuls)) for name in self._again_of]
        again = np.choose(c.remat, shares)
        parts = {"matmuls": matmuls, "memory": memory, "recompute": matmuls * again, "launch": self._launch.values()}
        busy = sum(parts.values(), np.zeros(len(self.space)))
        parts["bubble"] = busy * self._bubble / (1 - self._bubble) * self._idle.values()
        peak_bytes = self._state + self._memory.values()
        full = self._full(peak_bytes)
        for name, links in self._links.items():
            taken = links.values()
            hidden = self._hidden[name].values(HIDDEN[name].share(c, taken / busy, full))
            parts[name] = taken - np.minimum(taken, busy) * hidden
        self._all = _All(seconds=sum(parts.values(), np.zeros(len(self.space))), peak_bytes=peak_bytes, parts=parts)
        return self._all

    def _full(self, peak_bytes: Numbers | float) -> Numbers | float:
        """How near to the limit of the memory a step is. There XLA gives up overlap to save memory."""
        if self.step.memory is None:
            return 0.0 * peak_bytes
        return 2 * np.clip((peak_bytes / self.step.memory - _ROOMY) / (1 - _ROOMY), 0, 1)
