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

import numpy as np

from jgt.schedule.schedules import TRIED

from .columns import BYTES, KEPT, WIDE, Columns, bubble_of, in_flight
from .layout import Candidate
from .links import HIDDEN, LINKS, by_part, link_seconds
from .parts import Factor, Numbers, Portion, Sum
from .plans import Answer
from .step import SendTime, Step

AGAIN = {"none": 0.02, "matmuls": 0.05, "attention": 0.1, "block": 1 / 3, "layer": 1 / 3, "stage": 1 / 3}
"""What is computed again, in shares of forward and backward pass together, before a plan says so."""
MEMORY = {
    "constant": 2.0,
    "weights": 4.0,
    "gradients": 0.8,
    "added": 0.5,
    "whole weights": 0.75,
    "whole gradients": 1.2,
    "input": 1.2,
    "input of stages": 0.8,
    "work": 30.0,
    "logits": 3.0,
    "kept matmuls": 0.9,
    "kept for zb": 1.2,
    "kept whole": 0.75,
    "kept gathered": 0.25,
}
"""How often a device holds arrays of these sizes."""
TRAFFIC = {
    "rows": 200.0,
    "kept rows": 50.0,
    "all kept": 110.0,
    "zb rows": 100.0,
    "whole rows": 30.0,
    "gathered rows": 50.0,
    "weights": 6.0,
    "weights of stages": 7.0,
    "update": 20.0,
}
"""How often memory-bound kernels read or write them."""
_ROWS = {"rows", "kept rows", "all kept", "zb rows"}
"""What a model's kernels do with rows is the model's: attention without a fused kernel reads more of them than matmuls do."""
_WHOLE_ROWS = 2.0
"""Of what a layer keeps, arrays of the input's size that tensor parallelism alone does not split (Korthikanti et al., arXiv 2205.05198)."""
_LOGITS = 2**30
"""The trainer computes logits in as many parts as make one of them at most this large."""
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
        self._state = step.state_bytes / c.split / c.zero1 * c.uneven
        # The other stages wait for the deepest one.
        self._bubble = 1 - (1 - np.array([bubble_of(one) for one in space])) / c.uneven
        schedules = [[float(one.stages is not None and one.stages.schedule == name) for name in _SCHEDULES] for one in space]
        self._matmuls = Factor(kernels, step.flops / c.devices / step.peak)
        # About a hundred kernels for a layer and a part of the batch, at a few microseconds each.
        self._launch = Factor(launched, 5e-4 * step.layers * c.parts / c.stages)
        self._again = {name: Portion(kernels) for name in c.names}
        self._idle = Factor(np.array(schedules), np.ones(len(space)))
        self._traffic = Sum(self._moved(), TRAFFIC, _ROWS)
        self._memory = Sum(self._sizes(), MEMORY)
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
        self._rest, self._totals = Factor(np.column_stack([kernels, c.remats]), np.ones(len(space)), 0.3), list[tuple[int, float]]()
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
        # On a machine whose plans have no parts, the whole is all there is.
        if plan.seconds and not plan.parts:
            self._totals.append((index, plan.seconds))
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
            name = self._columns.names[self._columns.remat[index]]
            self._again[name].learn(index, again / matmuls, AGAIN.get(name, AGAIN["attention"]))
        if bubble := float(self._bubble[index]):
            self._idle.learn(index, parts.get("bubble", 0.0) / ((matmuls + memory + launch + again) * bubble / (1 - bubble)))

    def _estimates(self) -> _All:
        """The estimates, from the forms as they are now."""
        if self._all is not None:
            return self._all
        matmuls, c = self._matmuls.values(), self._columns
        again = np.choose(c.remat, [self._again[name].values(AGAIN.get(name, AGAIN["attention"])) for name in c.names])
        memory = self._traffic.values() / self.step.hbm
        parts = {"matmuls": matmuls, "memory": memory, "recompute": matmuls * again, "launch": self._launch.values()}
        busy = sum(parts.values(), np.zeros(len(self.space)))
        parts["bubble"] = busy * self._bubble / (1 - self._bubble) * self._idle.values()
        peak_bytes = self._state + self._memory.values()
        full = self._full(peak_bytes)
        for name, links in self._links.items():
            taken = links.values()
            hidden = self._hidden[name].values(HIDDEN[name].share(c, taken / busy, full))
            parts[name] = taken - np.minimum(taken, busy) * hidden
        total = sum(parts.values(), np.zeros(len(self.space)))
        # What no part explains.
        rest = self._rest.factors(self._totals, total) if self._totals else np.ones(len(self.space))
        parts = {name: values * rest for name, values in parts.items()}
        self._all = _All(seconds=total * rest, peak_bytes=peak_bytes, parts=parts)
        return self._all

    def _full(self, peak_bytes: Numbers | float) -> Numbers | float:
        """How near to the limit of the memory a step is. There XLA gives up overlap to save memory."""
        if self.step.memory is None:
            return 0.0 * peak_bytes
        return 2 * np.clip((peak_bytes / self.step.memory - _ROOMY) / (1 - _ROOMY), 0, 1)

    # -- the forms --------------------------------------------------------------------------------------------------------

    def _moved(self) -> dict[str, Numbers]:
        """Bytes that memory-bound kernels may read or write, a number of times."""
        c, step = self._columns, self.step
        rows = step.layer_bytes * c.rows * c.parts / c.stages
        weights = np.where(c.parts > 1, step.parameters * BYTES / c.model_split * c.parts, 0)
        all_kept = np.array([KEPT.get(name) == KEPT["none"] for name in c.names])[c.remat]
        found = {"rows": rows / c.tensor, "kept rows": np.where(c.keeps & ~all_kept, rows / c.tensor, 0)}
        found["all kept"] = np.where(all_kept, rows / c.tensor, 0)
        # A pass of its own for the gradients of weights reads again what the layer has kept.
        found["zb rows"] = np.where(c.zb, rows / c.tensor, 0)
        # Between blocks of matmuls rows are whole on each device with tensor parallelism, or gathered for the next block.
        rest = rows * (1 - 1 / c.tensor)
        found |= {"whole rows": np.where(c.sequence, 0, rest), "gathered rows": np.where(c.sequence, rest, 0)}
        found["update"] = self._state
        return found | {"weights": np.where(c.stages > 1, 0, weights), "weights of stages": np.where(c.stages > 1, weights, 0)}

    def _sizes(self) -> dict[str, Numbers]:
        """Bytes of the kinds of arrays that a step has beside its state."""
        c, step = self._columns, self.step
        local, whole = step.parameters / c.split, step.parameters / c.model_split
        alive = np.array([in_flight(one) for one in self.space])
        inputs = step.layer_bytes * c.rows * alive / c.stages
        # A pass of its own for the gradients of weights reads what the layer has kept, whatever is recomputed.
        kept = {"kept for zb": np.where(c.zb, KEPT["none"] * inputs / c.tensor, 0)}
        kept |= {f"kept {name}": np.where(c.remat == i, KEPT.get(name, 10.0) * inputs / c.tensor, 0) for i, name in enumerate(c.names)}
        # What is between two blocks of matmuls is whole on each device, unless the sequence is split, too. Then some of it is gathered.
        rest = np.where(c.keeps, _WHOLE_ROWS * inputs * (1 - 1 / c.tensor), 0)
        kept |= {"kept whole": np.where(c.sequence, 0, rest), "kept gathered": np.where(c.sequence, rest, 0)}
        inputs = np.where(c.sequence, inputs / c.tensor, inputs)
        return {
            "constant": np.full(len(self.space), 3e8),
            "weights": whole * c.stages / step.layers * BYTES,
            "gradients": np.where(c.whole, 0, local * WIDE),
            # Sums over the parts of a batch are there beside the gradients of a part.
            "added": np.where(c.whole | (c.parts == 1), 0, local * WIDE),
            "whole weights": np.where(c.whole, whole * BYTES, 0),
            "whole gradients": np.where(c.whole, whole * WIDE, 0),
            "input": np.where(c.stages == 1, inputs, 0),
            "input of stages": np.where(c.stages > 1, inputs, 0),
            "work": step.layer_bytes / step.layers * c.rows / c.tensor,
            "logits": np.minimum(step.model.logits_bytes * c.rows / c.tensor / c.stages, _LOGITS),
            **{name: sizes for name, sizes in kept.items() if sizes.any()},
        }
