"""Advice: which key of the run would make the step faster, or make it fit, and what that would give.

A plan knows more than what the step costs. It knows what the cost consists of, so it can say what a step without a part of it would cost:
with half of the bubble, with gradients of half the bytes. Each piece of advice is such a calculation from the plan's own figures. It names
one key, its new value, and the milliseconds or bytes that this saves. These are estimates: a plan of the changed run has the answer.

Invariant: what cannot be computed is not advised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jgt.console import axes_text, size_text, time_text
from jgt.document import InputError
from jgt.hlo.collectives import Collective
from jgt.planner.memory import USABLE, Memory
from jgt.planner.signals import SignalRow
from jgt.planner.step.speed import PipelineSchedule, Workload, schedule_of
from jgt.schedule.schedules import CHUNKED

_WORTHWHILE = 0.01
"""Advice that saves less than this share of the step is left out."""
_MAX_ADVICE = 5
_MAX_PARTS = 64
"""The most parts of a batch that advice about memory asks for."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One key to change. where: its file:line, or of the section that would have it. saves_ms: of the step; saves_bytes: of the peak."""

    key: str
    where: str
    saves_ms: float
    saves_bytes: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What advice is computed from; see `Plan`."""

    work: Workload
    mesh: Mapping[str, int]
    memory: Memory
    schedule: PipelineSchedule | None
    step_ms: float | None
    parts_ms: Mapping[str, float]
    exposed_ms: Mapping[str, float]
    rows: Sequence[SignalRow]
    sent: Sequence[Collective]

    @property
    def free_bytes(self) -> int:
        """The memory of a device that the step leaves."""
        return 0 if self.memory.hbm_bytes is None else int(USABLE * self.memory.hbm_bytes) - self.memory.peak_bytes


def advice(facts: Facts) -> tuple[Advice, ...]:
    """The advice, the most useful first. Of a step that does not fit, only what would make it fit."""
    if facts.memory.fits is False:
        return tuple(sorted(_to_fit(facts), key=lambda a: -a.saves_bytes))
    if facts.step_ms is None:
        return ()
    found = [*_bubble(facts), *_recompute(facts), *_gradients(facts), *_parts_of_batch(facts), *_attention(facts), *_overlap(facts)]
    useful = [a for a in found if a.saves_ms > _WORTHWHILE * facts.step_ms]
    return tuple(sorted(useful, key=lambda a: -a.saves_ms)[:_MAX_ADVICE])


def _advice(facts: Facts, key: str, text: str, *, ms: float = 0.0, num_bytes: int = 0) -> Advice:
    setting = facts.work.settings.get(key)
    where = "" if setting is None else setting.where
    share = f" ({ms / facts.step_ms:.0%} of the step)" if ms and facts.step_ms else ""
    begin = f"{where}: {key}" if where else key
    return Advice(key=key, where=where, saves_ms=ms, saves_bytes=num_bytes, text=f"{begin}: {text}{share}")


# -- a step that does not fit ----------------------------------------------------------------------------------------


def _to_fit(facts: Facts) -> Iterator[Advice]:
    missing, memory = -facts.free_bytes, facts.memory
    state = memory.groups.get("optimizer state", 0)
    if facts.work.value("optimizer.offload") == "none" and state:
        text = f"host moves {size_text(state)} of optimizer state to the host's memory, {_verdict(missing - state)}"
        yield _advice(facts, "optimizer.offload", text, num_bytes=state)
    kept = sum(memory.activations.values())
    key = "train.accumulate" if facts.schedule is None else "pipeline.microbatches"
    before, rows = facts.work.value(key), facts.work.rows
    if not isinstance(before, int) or rows is None or not kept:
        return
    # What the forward pass keeps is in proportion to the rows that run at once. The rest of the memory does not depend on them.
    for times in (2**n for n in range(1, _MAX_PARTS.bit_length())):
        saved = round(kept * (1 - 1 / times))
        if rows % times == 0 and (missing <= saved or rows % (2 * times)):
            text = f"{before * times} instead of {before} keeps {size_text(saved)} less for the backward pass, {_verdict(missing - saved)}"
            yield _advice(facts, key, text, num_bytes=saved)
            return


def _verdict(missing: int) -> str:
    return "so the step would fit" if missing <= 0 else f"of the {size_text(missing)} that would still be missing"


# -- a step that fits ------------------------------------------------------------------------------------------------


def _bubble(facts: Facts) -> Iterator[Advice]:
    """More microbatches, or more chunks of layers on a stage."""
    schedule, pipeline, lost = facts.schedule, facts.work.pipeline, facts.parts_ms.get("bubble", 0.0)
    if schedule is None or pipeline is None or not lost:
        return
    candidates: list[tuple[str, str, dict[str, int | str]]] = []
    if facts.work.rows is not None and facts.work.rows % 2 == 0:
        more = 2 * schedule.microbatches
        candidates.append(("pipeline.microbatches", f"{more} instead of {schedule.microbatches}", {"microbatches": more}))
    layers = facts.work.value("model.layers")
    chunked = CHUNKED.get(schedule.name)
    if chunked is not None and isinstance(layers, int) and layers % (2 * schedule.stages) == 0:
        options: dict[str, int | str] = {"schedule": chunked, "virtual": 2}
        candidates.append(("pipeline.schedule", f"{chunked} with pipeline.virtual: 2 instead of {schedule.name}", options))
    for key, change, options in candidates:
        try:
            bubble = schedule_of(pipeline, facts.mesh, **options).bubble
        except InputError:
            # The schedule does not exist for these numbers.
            continue
        # Useful work takes the same time in both, and a bubble is a share of the whole.
        saved = lost * (1 - (bubble / (1 - bubble)) / (schedule.bubble / (1 - schedule.bubble))) if schedule.bubble else 0.0
        text = f"{change}: the bubble falls from {schedule.bubble:.1%} to {bubble:.1%}, which saves {time_text(saved / 1e3)}"
        yield _advice(facts, key, text, ms=saved)


def _recompute(facts: Facts) -> Iterator[Advice]:
    lost = facts.parts_ms.get("recompute", 0.0)
    key = "train.remat" if facts.schedule is None else "pipeline.remat"
    setting = facts.work.value(key)
    if lost and setting not in (None, "none") and facts.free_bytes > 0:
        free = f"{size_text(facts.free_bytes)} of memory are free"
        text = f"{setting} computes {time_text(lost / 1e3)} of work again, and {free}. Less recompute saves up to that"
        yield _advice(facts, key, text, ms=lost)


def _gradients(facts: Facts) -> Iterator[Advice]:
    """Gradients in half of the bytes."""
    if "optimizer.gradients" not in facts.work.settings or facts.work.value("optimizer.gradients") == "bf16":
        return
    wide = [c for c in facts.sent if c.dtype == "f32" and c.phase == "backward" and c.kind in ("all-reduce", "reduce-scatter")]
    saved = sum(_waiting(facts, c) for c in wide) / 2
    num_bytes = sum(c.total_bytes for c in wide) // 2
    text = f"bf16 halves the {size_text(2 * num_bytes)} of gradients in f32, which saves up to {time_text(saved / 1e3)} of waiting"
    yield _advice(facts, "optimizer.gradients", text, ms=saved)


def _parts_of_batch(facts: Facts) -> Iterator[Advice]:
    """Fewer parts of the batch: each gathers all parameters again."""
    parts, kept = facts.work.value("train.accumulate"), sum(facts.memory.activations.values())
    if facts.schedule is not None or not isinstance(parts, int) or parts % 2 or facts.free_bytes < kept:
        return
    gathers = [c for c in facts.sent if c.kind == "all-gather" and c.count % parts == 0]
    saved = sum(_waiting(facts, c) for c in gathers) / 2
    text = f"{parts // 2} instead of {parts} gathers the parameters half as often, which saves {time_text(saved / 1e3)} of waiting"
    yield _advice(facts, "train.accumulate", f"{text} and needs about {size_text(kept)} more memory", ms=saved)


def _attention(facts: Facts) -> Iterator[Advice]:
    """Scores that travel to memory and back."""
    if facts.work.value("model.attention") != "xla":
        return
    saved = sum(max(row.roofline_ms.get("memory", 0) - row.roofline_ms.get("matmul", 0), 0) for row in facts.rows if "attn" in row.signal)
    text = f"auto takes cuDNN's kernel, where it is available, which keeps scores out of memory and saves up to {time_text(saved / 1e3)}"
    yield _advice(facts, "model.attention", text, ms=saved)


def _overlap(facts: Facts) -> Iterator[Advice]:
    """Collectives of tensor parallelism beside matmuls."""
    if facts.schedule is not None or "tensor" not in facts.mesh:
        return
    for row in facts.rows:
        waiting = sum(_waiting(facts, c) for c in facts.sent if c.signal == row.signal and c.axes == ("tensor",))
        is_split = any(c.kind == "reduce-scatter" for c in facts.sent if c.signal == row.signal and c.axes == ("tensor",))
        saved = min(waiting, row.roofline_ms.get("matmul", 0.0))
        if row.rule and saved and is_split:
            change = f"{row.rule}: overlap: tensor for {row.signal} runs its collectives beside its matmuls"
            text = f"{change}, which saves up to {time_text(saved / 1e3)}"
            share = f" ({saved / facts.step_ms:.0%} of the step)" if facts.step_ms else ""
            yield Advice(key="overlap", where=row.rule, saves_ms=saved, saves_bytes=0, text=text + share)


def _waiting(facts: Facts, collective: Collective) -> float:
    """The milliseconds of waiting for a collective: its share of the bytes over its axes."""
    over = sum(c.total_bytes for c in facts.sent if c.axes == collective.axes)
    return facts.exposed_ms.get(axes_text(collective.axes), 0.0) * collective.total_bytes / over if over else 0.0
