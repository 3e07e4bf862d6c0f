"""Two plans side by side: what changes in collectives, memory and time."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

from jgt.plan.plan import Plan
from jgt.plan.table import make_console, make_table
from jgt.plan.units import axes_text, count_text, size_text

Row = tuple[str, float | None, float | None]


def differences(a: Plan, b: Plan) -> dict[str, Any]:
    """Totals of both plans, and the collectives that are not the same, as plain values."""
    return {
        "totals": {name: {"a": x, "b": y} for name, x, y in _totals(a, b)},
        "collectives": [{"signal": s, "kind": k, "axes": axes, "a": x, "b": y} for (s, k, axes), x, y in _sent(a, b)],
        "warnings": {"a": a.warnings, "b": b.warnings},
    }


def print_differences(a: Plan, b: Plan, name_a: str, name_b: str) -> None:
    """Writes the comparison to stdout."""
    console = make_console()
    table = make_table(f"Of one device in a step, on {a.target}" + (f" and {b.target}" if b.target != a.target else ""), ["", name_a, name_b, "change"], 1)
    for name, x, y in _totals(a, b):
        show = _milliseconds if name == "step_time_ms" else _tera if name.startswith("flops") else _size
        table.add_row(name, show(x), show(y), _change(x, y))
    console.print(table)
    rows = list(_sent(a, b))
    if rows:
        table = make_table("Sent, where it differs", ["signal", "kind", "axes", name_a, name_b, "change"], 3)
        for (signal, kind, axes), x, y in rows:
            table.add_row(signal, kind, axes, _size(x), _size(y), _change(x, y))
        console.print(table)
    else:
        console.print("The collectives are the same.")
    for name, own, other in ((name_a, a, b), (name_b, b, a)):
        for text in own.warnings:
            if text not in other.warnings:
                console.print(f"only {name}: {text}", soft_wrap=True)


def _totals(a: Plan, b: Plan) -> Iterator[Row]:
    yield "step_time_ms", a.step_time_ms, b.step_time_ms
    yield "peak_bytes", a.memory.peak_bytes, b.memory.peak_bytes
    yield "args_bytes", a.memory.args_bytes, b.memory.args_bytes
    yield "temp_bytes", a.memory.temp_bytes, b.memory.temp_bytes
    yield "sent_bytes", a.sent_bytes, b.sent_bytes
    yield "flops_per_device", a.flops_per_device, b.flops_per_device


def _sent(a: Plan, b: Plan) -> Iterator[tuple[tuple[str, str, str], int, int]]:
    counts: list[collections.Counter[tuple[str, str, str]]] = []
    for plan in (a, b):
        found: collections.Counter[tuple[str, str, str]] = collections.Counter()
        for one in plan.collectives:
            found[one.signal, one.kind, axes_text(one.axes)] += one.total_bytes
        counts.append(found)
    old, new = counts
    keys = [key for key in {**old, **new} if old[key] != new[key]]
    for key in sorted(keys, key=lambda key: (-abs(new[key] - old[key]), key)):
        yield key, old[key], new[key]


def _change(x: float | None, y: float | None) -> str:
    if x is None or y is None or x == y:
        return ""
    return f"{(y - x) / x:+.1%}" if x else "new"


def _size(x: float | None) -> str:
    return "" if x is None else size_text(x)


def _milliseconds(x: float | None) -> str:
    return "" if x is None else f"{x:,.1f} ms"


def _tera(x: float | None) -> str:
    return "" if x is None else f"{count_text(x / 1e12)} TFLOP"
