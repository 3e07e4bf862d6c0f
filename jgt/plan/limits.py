"""The `budget:` section: what a plan may cost at most. Free of JAX."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from jgt.document import Node, describe, nearest
from jgt.plan.hlo import KINDS

LIMITS = ("peak_gb", "step_ms", "sent_gb")


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The most that something may be. key: its place in the section; where: file:line."""

    key: str
    where: str
    most: float
    signal: str = ""
    kind: str = ""


def read_budget(node: Node, problems: list[str]) -> tuple[Limit, ...]:
    """The limits of a section: peak_gb, step_ms, sent_gb, and GB by kind of collective for a signal (a glob) and all below it."""
    if not isinstance(node.value, dict):
        problems.append(node.problem(f"must be a mapping such as {{peak_gb: 70, layers/attn: {{all-gather: 0}}}}, not {describe(node.value)}"))
        return ()
    return tuple(_limits(node, problems))


def _limits(node: Node, problems: list[str]) -> Iterator[Limit]:
    for name, child in node.value.items():
        if isinstance(child.value, dict):
            for kind, most in child.value.items():
                if kind not in KINDS:
                    problems.append(most.problem(f"there is no such collective. {nearest(kind, KINDS)}"))
                elif number := _number(most, problems):
                    yield Limit(key=f"{name}.{kind}", where=most.where, most=number[0], signal=name, kind=kind)
        elif name not in LIMITS:
            problems.append(child.problem(f"unknown key. {nearest(name, LIMITS)} A signal has a mapping: {{all-gather: 0}}, in GB"))
        elif number := _number(child, problems):
            yield Limit(key=name, where=child.where, most=number[0])


def _number(node: Node, problems: list[str]) -> tuple[float] | None:
    if isinstance(node.value, bool) or not isinstance(node.value, int | float) or not 0 <= node.value < math.inf:
        problems.append(node.problem(f"must be a number of at least 0, not {describe(node.value)}"))
        return None
    return (float(node.value),)
