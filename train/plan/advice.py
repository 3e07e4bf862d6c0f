"""Advice: which key of a run would make its step faster, or make it fit, and what that would save.

Each piece of advice is a calculation from the plan's own figures: the cost of a step with half of the bubble, or with gradients of half
the bytes. These are estimates: a plan of the changed run has the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jgt import Plan, amount
from jgt.document import InputError
from jgt.planner import Workload

_WORTHWHILE = 0.01
"""Advice that saves less than this share of the step is left out."""
_MOSTLY = 0.5
"""The share of launches from which on a step is mostly launches."""
_MAX_ADVICE, _MAX_PARTS = 5, 64
"""The most pieces of advice, and the most parts of a batch that one asks for."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The value of a run's key. where: the file:line of the key, or of the nearest section around it."""

    value: object
    where: str


class Advice(NamedTuple):
    """A change of a key, and what it saves: milliseconds of the step, or bytes of the peak. where: the file:line of the key."""

    key: str
    where: str
    saves_ms: float
    saves_bytes: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Adviser:
    """Computes the advice for one plan.

    settings: the run's keys that advice may change, dotted. rows: the rows of the batch that a device computes at once, such as those in
    one microbatch. work: the step's workload, whose pipeline has other schedules. is_gpu: whether bf16 is faster than f32 there.
    """

    plan: Plan
    settings: Mapping[str, Setting]
    rows: int
    work: Workload
    is_gpu: bool = True

    def advise(self) -> tuple[Advice, ...]:
        """The advice, the most useful first. A step that does not fit gets only advice that makes it fit."""
        if self.plan.memory.fits is False:
            return tuple(sorted(self._to_fit(), key=lambda a: -a.saves_bytes))
        step_ms = self.plan.step_time_ms
        if step_ms is None:
            return ()
        kinds = [self._recompute(), self._precision(), self._gradients(), self._attention()]
        kinds += [self._parts_of_batch(), self._overlap()] if self.plan.schedule is None else [self._bubble()]
        useful = [a for advice in kinds for a in advice if a.saves_ms > _WORTHWHILE * step_ms]
        return (*self._too_small(step_ms), *sorted(useful, key=lambda a: -a.saves_ms)[:_MAX_ADVICE])

    def _too_small(self, step_ms: float) -> Iterator[Advice]:
        """More devices share the work of kernels, but each launches all of them."""
        launches, waits = self.plan.parts_ms.get("launch", 0.0), sum(self.plan.exposed_ms.values())
        many = math.prod(self.plan.mesh.values())
        alone = launches + many * (step_ms - launches - waits)
        if self.is_gpu and many > 1 and launches > _MOSTLY * step_ms:
            times = [amount(ms / 1e3, "s") for ms in (alone, step_ms)]
            why = f"the model is too small for {many} devices: {launches / step_ms:.0%} of the step are launches of kernels"
            text = f"{why}. One device takes about {times[0]} instead of {times[1]}, for 1/{many} of the price of an hour"
            yield self._saving("mesh", text, ms=max(0.0, step_ms - alone))

    def _value(self, key: str) -> object:
        return self.settings[key].value if key in self.settings else None

    def _saving(self, key: str, text: str, *, ms: float = 0.0, num_bytes: int = 0, where: str = "") -> Advice:
        where = where or (self.settings[key].where if key in self.settings else "")
        share = f" ({ms / self.plan.step_time_ms:.0%} of the step)" if ms and self.plan.step_time_ms else ""
        return Advice(key, where, ms, num_bytes, f"{f'{where}: ' if where else ''}{key}: {text}{share}")

    def _to_fit(self) -> Iterator[Advice]:
        missing, memory = -self.plan.memory.free_bytes, self.plan.memory
        state = memory.groups.get("optimizer state", 0)
        if self._value("optimizer.offload") == "none" and state:
            text = f"host moves {amount(state, 'B')} of optimizer state to the host's memory, {_verdict(missing - state)}"
            yield self._saving("optimizer.offload", text, num_bytes=state)
        kept = sum(memory.activations.values())
        key = "train.accumulate" if self.plan.schedule is None else "pipeline.microbatches"
        before = self._value(key)
        if not isinstance(before, int) or not kept:
            return
        # The forward pass keeps memory in proportion to the rows that run at once. The rest of the memory does not depend on them.
        for times in (2**n for n in range(1, _MAX_PARTS.bit_length())):
            saved = round(kept * (1 - 1 / times))
            if self.rows % times == 0 and (missing <= saved or self.rows % (2 * times)):
                less = f"{before * times} instead of {before} keeps {amount(saved, 'B')} less for the backward pass"
                yield self._saving(key, f"{less}, {_verdict(missing - saved)}", num_bytes=saved)
                return

    def _bubble(self) -> Iterator[Advice]:
        schedule, lost = self.plan.schedule, self.plan.parts_ms.get("bubble", 0.0)
        if schedule is None or not lost or not schedule.bubble:
            return
        candidates: list[tuple[str, str, dict[str, int | str]]] = []
        if self.rows % 2 == 0:
            more = 2 * schedule.microbatches
            candidates.append(("pipeline.microbatches", f"{more} instead of {schedule.microbatches}", {"microbatches": more}))
        layers, chunked = self._value("model.layers"), None if self.work.pipeline is None else self.work.pipeline.chunked
        if chunked is not None and isinstance(layers, int) and layers % (2 * schedule.stages) == 0:
            text = f"{chunked} with pipeline.virtual: 2 instead of {schedule.name}"
            candidates.append(("pipeline.schedule", text, {"schedule": chunked, "virtual": 2}))
        for key, change, fields in candidates:
            try:
                other = self.work.schedule(self.plan.mesh, **fields)
            except InputError:
                # The schedule does not exist for these numbers.
                continue
            assert other is not None
            # Useful work takes the same time in both, and a bubble is a share of the whole.
            before, after = (share / (1 - share) for share in (schedule.bubble, other.bubble))
            saved = lost * (1 - after / before)
            text = f"{change}: the bubble falls from {schedule.bubble:.1%} to {other.bubble:.1%}, which saves {amount(saved / 1e3, 's')}"
            yield self._saving(key, text, ms=saved)

    def _recompute(self) -> Iterator[Advice]:
        lost, free = self.plan.parts_ms.get("recompute", 0.0), self.plan.memory.free_bytes
        key = "train.remat" if self.plan.schedule is None else "pipeline.remat"
        setting = self._value(key)
        if setting not in (None, "none") and free > 0:
            again = f"{setting} computes {amount(lost / 1e3, 's')} of work again, and {amount(free, 'B')} of memory are free"
            yield self._saving(key, f"{again}. Less recompute saves up to that", ms=lost)

    def _precision(self) -> Iterator[Advice]:
        if self.is_gpu and self._value("model.dtype") == "f32":
            saved = sum(self.plan.parts_ms.get(part, 0.0) for part in ("matmul", "memory", "exposed")) / 2
            text = "bf16 halves the bytes of activations and of what devices send, and doubles the rate of matmuls, which saves up to "
            yield self._saving("model.dtype", text + amount(saved / 1e3, "s"), ms=saved)

    def _gradients(self) -> Iterator[Advice]:
        if "optimizer.gradients" not in self.settings or self._value("optimizer.gradients") == "bf16":
            return
        # The gradients of matmuls in f32 are f32.
        if self._value("model.dtype") == "f32":
            return
        sums = ("all-reduce", "reduce-scatter")
        wide = [c for c in self.plan.collectives if c.dtype == "f32" and c.phase == "backward" and c.kind in sums]
        saved, num_bytes = self.plan.waiting_ms(wide) / 2, sum(c.total_bytes for c in wide) // 2
        text = f"bf16 halves the {amount(2 * num_bytes, 'B')} of gradients in f32, which saves up to {amount(saved / 1e3, 's')} of waiting"
        yield self._saving("optimizer.gradients", text, ms=saved)

    def _parts_of_batch(self) -> Iterator[Advice]:
        """Fewer parts of the batch, each of which gathers all parameters again."""
        parts, kept = self._value("train.accumulate"), sum(self.plan.memory.activations.values())
        if not isinstance(parts, int) or parts % 2 or self.plan.memory.free_bytes < kept:
            return
        saved = self.plan.waiting_ms(c for c in self.plan.collectives if c.kind == "all-gather" and c.count % parts == 0) / 2
        text = f"{parts // 2} instead of {parts} gathers the parameters half as often, which saves {amount(saved / 1e3, 's')} of waiting"
        yield self._saving("train.accumulate", f"{text} and needs about {amount(kept, 'B')} more memory", ms=saved)

    def _attention(self) -> Iterator[Advice]:
        # Fused kernels need sixteen bits.
        if self._value("model.attention") == "xla" and self._value("model.dtype") == "bf16":
            attention = [row.roofline_ms for row in self.plan.signals if "attn" in row.signal]
            saved = sum(max(parts.get("memory", 0) - parts.get("matmul", 0), 0) for parts in attention)
            text = "auto takes cuDNN's kernel, where it is available, which keeps scores out of memory and saves up to "
            yield self._saving("model.attention", text + amount(saved / 1e3, "s"), ms=saved)

    def _overlap(self) -> Iterator[Advice]:
        for row in self.plan.signals:
            over = [c for c in self.plan.collectives if c.signal == row.signal and c.axes == ("tensor",)]
            saved = min(self.plan.waiting_ms(over), row.roofline_ms.get("matmul", 0.0))
            if row.rule and any(c.kind == "reduce-scatter" for c in over):
                text = f"tensor for {row.signal} runs its collectives beside its matmuls, which saves up to {amount(saved / 1e3, 's')}"
                yield self._saving("overlap", text, ms=saved, where=row.rule)


def _verdict(missing: int) -> str:
    return "so the step would fit" if missing <= 0 else f"of the {amount(missing, 'B')} that would still be missing"
