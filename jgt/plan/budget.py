"""A plan held against its budget."""

from __future__ import annotations

from jgt.document import nearest
from jgt.plan.collectives import Collective
from jgt.plan.limits import Limit
from jgt.plan.plan import Plan
from jgt.plan.units import axes_text, size_text
from jgt.rules.match import matches, prefixes


def overruns(plan: Plan, limits: tuple[Limit, ...]) -> list[str]:
    """What costs more than it may, each with the offender."""
    return [text for limit in limits if (text := _overrun(plan, limit))]


def _overrun(plan: Plan, limit: Limit) -> str | None:
    if limit.signal:
        return _of_signal(plan, limit)
    value, unit = {
        "peak_gb": (plan.memory.peak_bytes / 1e9, "GB on a device"),
        "sent_gb": (plan.sent_bytes / 1e9, "GB sent by a device in a step"),
        "step_ms": (plan.step_time_ms, "ms a step"),
    }[limit.key]
    if value is None:
        return f"{limit.where}: budget.{limit.key}: there is no time without --target"
    return None if value <= limit.most else f"{limit.where}: budget.{limit.key}: {value:.3g} {unit} are planned, but {limit.most:g} allowed{_blame(plan, limit)}"


def _blame(plan: Plan, limit: Limit) -> str:
    if limit.key == "peak_gb":
        largest = max([*plan.memory.groups.items(), *plan.memory.activations.items()], key=lambda item: item[1], default=None)
        return "" if largest is None else f". The largest part: {largest[0]}, {size_text(largest[1])}"
    worst = max(plan.signals, key=lambda row: (row.compute_ms or 0) + (row.exposed_ms or 0) if limit.key == "step_ms" else sum(row.sent.values()), default=None)
    return "" if worst is None else f". The largest part: {worst.signal}"


def _of_signal(plan: Plan, limit: Limit) -> str | None:
    own = [c for c in plan.collectives if c.kind == limit.kind and _is_below(c.signal, limit.signal)]
    sent = sum(c.total_bytes for c in own)
    if sent <= limit.most * 1e9:
        known = sorted({row.signal for row in plan.signals})
        if not own and not any(_is_below(name, limit.signal) for name in known):
            return f"{limit.where}: budget.{limit.key}: the program has no signal {limit.signal!r}. {nearest(limit.signal, known)}"
        return None
    worst: Collective = own[0]
    return (
        f"{limit.where}: budget.{limit.key}: {size_text(sent)} are planned, but {limit.most:g} GB allowed. The largest: {worst.kind} {worst.dtype} over "
        f"{axes_text(worst.axes)}, {worst.count} x {size_text(worst.bytes)}, {worst.phase}, {worst.source or 'no source'}"
    )


def _is_below(signal: str, pattern: str) -> bool:
    return any(matches(pattern, path) for path in prefixes(signal))
