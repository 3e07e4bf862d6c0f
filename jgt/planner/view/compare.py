"""Two plans side by side: their layouts, their speed, what their time is spent on, and what they send.

What the user changed comes first: mesh, schedule and specs. Changes are computed from all digits, and shown beside figures with fewer.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jgt.command.console import Console, amount, axes_text, two_digits
from jgt.planner.plan import Plan
from jgt.planner.view.table import time_rows


@dataclass(frozen=True)
class Differences:
    """Two plans to compare."""

    a: Plan
    b: Plan

    def to_json(self) -> dict[str, object]:
        """The layouts and totals of both plans, and the collectives that differ, as plain values."""
        return {
            "layouts": {name: {"a": x, "b": y} for name, x, y in self._layouts()},
            "totals": {name: {"a": x, "b": y} for name, x, y in self._totals()},
            "collectives": [{"signal": s, "kind": k, "axes": axes, "a": x, "b": y} for (s, k, axes), x, y in self._sent()],
            "warnings": {"a": self.a.warnings, "b": self.b.warnings},
        }

    def print(self, *names: str) -> None:
        """Writes the comparison to stdout. names: how the two plans are called."""
        console, a, b = Console(), self.a, self.b
        targets = a.target + (f" and {b.target}" if b.target != a.target else "")
        layouts = ((name, x, y) for name, x, y in self._layouts() if x != y)
        _print(console, "What differs", ["", *names], 3, layouts)
        known = ((name, x, y) for name, x, y in self._totals() if x is not None or y is not None)
        totals = ((name, _shown(name, x), _shown(name, y), _change(x, y)) for name, x, y in known)
        _print(console, f"Totals of one device in a step, on {targets}", ["total", *names, "change"], 1, totals)
        _print(console, "Time of the step", ["spent on", *names, "change"], 1, self._times())
        rows = [(*key, amount(x, "B"), amount(y, "B"), _change(x, y)) for key, x, y in self._sent()]
        _print(console, "Collectives that differ", ["signal", "kind", "axes", *names, "change"], 3, rows)
        if not rows:
            console.print("The collectives are the same.")
        # The findings that both plans share are left out.
        for name, plan, other in zip(names, (a, b), (b, a), strict=True):
            for text in plan.warnings:
                if text not in other.warnings:
                    console.print(f"only {name}: {text}", soft_wrap=True)

    def _times(self) -> Iterator[tuple[str, ...]]:
        # Without a target no time is known.
        old, new = (dict(time_rows(plan)) if plan.step_time_ms is not None else {} for plan in (self.a, self.b))
        for name in dict.fromkeys([*old, *new]):
            x, y = old.get(name, 0.0), new.get(name, 0.0)
            yield name, amount(x / 1e3, "s"), amount(y / 1e3, "s"), _change(x, y)

    def _layouts(self) -> Iterator[tuple[str, str, str]]:
        """The user's decisions as text: the mesh, the pipeline and the specs of each signal's parameters."""
        old, new = (_layout(plan) for plan in (self.a, self.b))
        for name in dict.fromkeys([*old, *new]):
            yield name, old.get(name, ""), new.get(name, "")

    def _totals(self) -> Iterator[tuple[str, float | None, float | None]]:
        a, b = self.a, self.b
        yield "step_time_ms", a.step_time_ms, b.step_time_ms
        for name in ("tokens_per_s", "mfu", "dollars_per_million_tokens"):
            x, y = (None if plan.speed is None else getattr(plan.speed, name) for plan in (a, b))
            if x is not None or y is not None:
                yield name, x, y
        for name in ("peak_bytes", "args_bytes", "temp_bytes"):
            yield name, getattr(a.memory, name), getattr(b.memory, name)
        yield "sent_bytes", a.sent_bytes, b.sent_bytes
        yield "flops_per_device", a.flops_per_device, b.flops_per_device

    def _sent(self) -> Iterator[tuple[tuple[str, str, str], int, int]]:
        """Bytes by signal, kind and axes where the plans differ, the largest difference first."""
        old, new = (_sent_bytes(plan) for plan in (self.a, self.b))
        # A Counter answers 0 for a key that only the other plan has.
        keys = [key for key in {**old, **new} if old[key] != new[key]]
        for key in sorted(keys, key=lambda key: (-abs(new[key] - old[key]), key)):
            yield key, old[key], new[key]


def _print(console: Console, title: str, columns: list[str], texts: int, rows: Iterable[tuple[str, ...]]) -> None:
    table = Console.table(title, columns, texts, rows)
    if table.row_count:
        console.print(table)


def _layout(plan: Plan) -> dict[str, str]:
    fits = plan.memory.fits
    return {
        "mesh": " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items() if size > 1) or "one device",
        "pipeline": "" if plan.schedule is None else plan.schedule.text,
        "fits": "" if fits is None else "yes" if fits else "no: its time has no meaning",
        **{row.signal: ", ".join(row.specs) for row in plan.signals if row.specs},
    }


def _sent_bytes(plan: Plan) -> collections.Counter[tuple[str, str, str]]:
    sent: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for c in plan.collectives:
        sent[c.signal, c.kind, axes_text(c.axes)] += c.total_bytes
    return sent


def _change(x: float | None, y: float | None) -> str:
    if x is None or y is None or x == y:
        return ""
    text = f"{(y - x) / x:+.1%}" if x else "new"
    return "" if text in ("+0.0%", "-0.0%") else text


def _shown(name: str, x: float | None) -> str:
    if x is None:
        return ""
    if name == "step_time_ms":
        return amount(x / 1e3, "s")
    if name == "mfu":
        return f"{x:.1%}"
    if name in ("tokens_per_s", "dollars_per_million_tokens"):
        return two_digits(x)
    return f"{amount(x / 1e12)} TFLOP" if name == "flops_per_device" else amount(x, "B")
