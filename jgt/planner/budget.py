"""The `budget:` section of a run's file: the most that a plan may cost. Imports no JAX.

    budget:
      peak_gb: 70
      layers/attn: {all-gather: 0}

Invariant: a limit never passes by accident. A signal that the program does not have is a problem, not 0 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

from jgt.command.console import amount, axes_text
from jgt.document import Node, nearest
from jgt.planner.hlo.instruction import COLLECTIVES
from jgt.rules import matches, prefixes

# A plan needs JAX, and a budget is read before JAX is imported.
if TYPE_CHECKING:
    from jgt.planner.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The most that something may cost.

    key: the key within the section, such as `peak_gb` or `layers/attn.all-gather`. where: file:line. most: the cost in the key's unit, or
    in GB for a signal. signal, kind: a pattern of signals and a kind of collective; empty for a limit of the whole step.
    """

    key: str
    where: str
    most: float
    signal: str = ""
    kind: str = ""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The limits of a section. KEYS: the limits of the whole step; all other keys are signals."""

    KEYS: ClassVar = ("peak_gb", "step_ms", "sent_gb")

    limits: tuple[Limit, ...] = ()

    @classmethod
    def read(cls, node: Node, problems: list[str]) -> Budget:
        """Reads a section. Appends what is wrong with it to `problems`."""
        if isinstance(node.value, dict):
            return cls(limits=tuple(_limits(cast("Mapping[str, Node]", node.value), problems)))
        example = "{peak_gb: 70, layers/attn: {all-gather: 0}}"
        problems.append(node.problem(f"must be a mapping such as {example}, not {node.in_words()}"))
        return cls()

    def overruns(self, plan: Plan) -> list[str]:
        """A message for each limit that the plan exceeds, with the part of the plan that costs most."""
        texts = [(limit, _signal_overrun(plan, limit) if limit.signal else _step_overrun(plan, limit)) for limit in self.limits]
        return [f"{limit.where}: budget.{limit.key}: {text}" for limit, text in texts if text]


def _limits(entries: Mapping[str, Node], problems: list[str]) -> Iterator[Limit]:
    for name, child in entries.items():
        if isinstance(child.value, dict):
            for kind, most in cast("Mapping[str, Node]", child.value).items():
                if kind in COLLECTIVES:
                    yield from _limit(most, problems, f"{name}.{kind}", signal=name, kind=kind)
                else:
                    problems.append(most.problem(f"unknown kind of collective. {nearest(kind, COLLECTIVES)}"))
        elif name in Budget.KEYS:
            yield from _limit(child, problems, name)
        else:
            near = nearest(name, Budget.KEYS)
            problems.append(child.problem(f"unknown key. {near} A signal has a mapping: {{all-gather: 0}}, in GB"))


def _limit(node: Node, problems: list[str], key: str, *, signal: str = "", kind: str = "") -> Iterator[Limit]:
    # In Python `true` is an int. Infinity would be a limit that nothing exceeds.
    if isinstance(node.value, bool) or not isinstance(node.value, int | float) or not 0 <= node.value < math.inf:
        problems.append(node.problem(f"must be a number of at least 0, not {node.in_words()}"))
    else:
        yield Limit(key=key, where=node.where, most=float(node.value), signal=signal, kind=kind)


def _step_overrun(plan: Plan, limit: Limit) -> str:
    rows, memory = plan.signals, plan.memory
    # The rows have the full names of signals, which `memory.activations` may lack.
    stored = {**memory.groups, **{r.signal: r.activation_bytes for r in rows}}
    value, unit, parts = {
        "peak_gb": (memory.peak_bytes / 1e9, "GB on each device", stored),
        "sent_gb": (plan.sent_bytes / 1e9, "GB sent by each device in a step", {r.signal: sum(r.sent.values()) for r in rows}),
        "step_ms": (plan.step_time_ms, "ms per step", {r.signal: (r.compute_ms or 0) + (r.exposed_ms or 0) for r in rows}),
    }[limit.key]
    if value is None:
        return "a step's time is known only for a target"
    if value <= limit.most:
        return ""
    largest, cost = max(parts.items(), key=lambda part: part[1], default=("nothing", 0))
    size = f", {amount(cost, 'B')}" if limit.key == "peak_gb" else ""
    return f"the plan is over budget: {value:.3g} {unit}, but {limit.most:g} is allowed. The largest part: {largest}{size}"


def _signal_overrun(plan: Plan, limit: Limit) -> str:
    over = [c for c in plan.collectives if c.kind == limit.kind and _is_below(c.signal, limit.signal)]
    sent = sum(c.total_bytes for c in over)
    if sent <= limit.most * 1e9:
        # Zero bytes are within the limit, unless the signal's name is misspelt.
        known = sorted({row.signal for row in plan.signals})
        if not over and not any(_is_below(name, limit.signal) for name in known):
            return f"the program has no signal {limit.signal!r}. {nearest(limit.signal, known)}"
        return ""
    # A plan's collectives are sorted by their bytes.
    worst = over[0]
    return (
        f"the plan is over budget: {amount(sent, 'B')}, but {limit.most:g} GB is allowed. The largest: {worst.kind} {worst.dtype} over "
        f"{axes_text(worst.axes)}, {worst.count} x {amount(worst.bytes, 'B')}, {worst.phase}, {worst.source or 'no source'}"
    )


def _is_below(signal: str, pattern: str) -> bool:
    return any(matches(pattern, path) for path in prefixes(signal))
