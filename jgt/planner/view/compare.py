"""Two plans side by side: their layouts, their speed, what their time is spent on, and what they send.

The two differ in what the user changed, so that comes first: mesh, schedule and specs. Then come the totals, and after them only what is
different. Changes are computed from all digits, and shown beside figures that have fewer.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from jgt.console import axes_text, count_text, make_console, make_table, size_text, time_text, two_digits
from jgt.planner.plan import Plan
from jgt.planner.view.table import time_rows


def differences(a: Plan, b: Plan) -> dict[str, object]:
    """The layouts and totals of both plans, and the collectives that differ, as plain values."""
    return {
        "layouts": {name: {"a": x, "b": y} for name, x, y in _layouts(a, b)},
        "totals": {name: {"a": x, "b": y} for name, x, y in _totals(a, b)},
        "collectives": [{"signal": s, "kind": k, "axes": axes, "a": x, "b": y} for (s, k, axes), x, y in _sent(a, b)],
        "warnings": {"a": a.warnings, "b": b.warnings},
    }


def print_differences(a: Plan, b: Plan, name_a: str, name_b: str) -> None:
    """Writes the comparison to stdout."""
    console = make_console()
    for table in (_changed(a, b, name_a, name_b), _all_totals(a, b, name_a, name_b), _times(a, b, name_a, name_b)):
        if table.row_count:
            console.print(table)
    rows = list(_sent(a, b))
    if rows:
        table = make_table("Collectives that differ", ["signal", "kind", "axes", name_a, name_b, "change"], 3)
        for (signal, kind, axes), x, y in rows:
            table.add_row(signal, kind, axes, size_text(x), size_text(y), _change(x, y))
        console.print(table)
    else:
        console.print("The collectives are the same.")
    # The findings that both plans share are left out.
    for name, plan, other in ((name_a, a, b), (name_b, b, a)):
        for text in plan.warnings:
            if text not in other.warnings:
                console.print(f"only {name}: {text}", soft_wrap=True, markup=False)


def _changed(a: Plan, b: Plan, name_a: str, name_b: str) -> Table:
    table = make_table("What differs", ["", name_a, name_b], 3)
    for name, x, y in _layouts(a, b):
        if x != y:
            # rich would read the brackets of a spec as markup in a str.
            table.add_row(*map(Text, (name, x, y)))
    return table


def _all_totals(a: Plan, b: Plan, name_a: str, name_b: str) -> Table:
    targets = a.target + (f" and {b.target}" if b.target != a.target else "")
    table = make_table(f"Totals of one device in a step, on {targets}", ["total", name_a, name_b, "change"], 1)
    for name, x, y in _totals(a, b):
        if x is not None or y is not None:
            table.add_row(name, _show(name, x), _show(name, y), _change(x, y))
    return table


def _times(a: Plan, b: Plan, name_a: str, name_b: str) -> Table:
    # Without a target no time is known.
    old, new = (dict(time_rows(plan)) if plan.step_time_ms is not None else {} for plan in (a, b))
    table = make_table("Time of the step", ["spent on", name_a, name_b, "change"], 1)
    for name in dict.fromkeys([*old, *new]):
        table.add_row(
            name, *(time_text(times.get(name, 0.0) / 1e3) for times in (old, new)), _change(old.get(name, 0.0), new.get(name, 0.0))
        )
    return table


def _layouts(a: Plan, b: Plan) -> Iterator[tuple[str, str, str]]:
    """What a user decides on: the mesh, the pipeline and the specs of each signal's parameters, as text."""
    for name, text in (("mesh", _mesh_text), ("pipeline", _pipeline_text), ("fits", _fits_text)):
        yield name, text(a), text(b)
    old, new = ({row.signal: ", ".join(row.specs) for row in plan.signals if row.specs} for plan in (a, b))
    for signal in dict.fromkeys([*old, *new]):
        yield signal, old.get(signal, ""), new.get(signal, "")


def _mesh_text(plan: Plan) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items() if size > 1) or "one device"


def _pipeline_text(plan: Plan) -> str:
    return "" if plan.schedule is None else plan.schedule.text


def _fits_text(plan: Plan) -> str:
    return "" if plan.memory.fits is None else "yes" if plan.memory.fits else "no: its time has no meaning"


def _totals(a: Plan, b: Plan) -> Iterator[tuple[str, float | None, float | None]]:
    yield "step_time_ms", a.step_time_ms, b.step_time_ms
    for name in ("tokens_per_s", "mfu", "dollars_per_million_tokens"):
        x, y = (None if plan.speed is None else getattr(plan.speed, name) for plan in (a, b))
        if x is not None or y is not None:
            yield name, x, y
    yield "peak_bytes", a.memory.peak_bytes, b.memory.peak_bytes
    yield "args_bytes", a.memory.args_bytes, b.memory.args_bytes
    yield "temp_bytes", a.memory.temp_bytes, b.memory.temp_bytes
    yield "sent_bytes", a.sent_bytes, b.sent_bytes
    yield "flops_per_device", a.flops_per_device, b.flops_per_device


def _sent(a: Plan, b: Plan) -> Iterator[tuple[tuple[str, str, str], int, int]]:
    """Bytes by signal, kind and axes where the plans differ, the largest difference first."""
    old, new = _sent_bytes(a), _sent_bytes(b)
    # A Counter answers 0 for a key that only the other plan has.
    keys = [key for key in {**old, **new} if old[key] != new[key]]
    for key in sorted(keys, key=lambda key: (-abs(new[key] - old[key]), key)):
        yield key, old[key], new[key]


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


def _show(name: str, x: float | None) -> str:
    """A total in the unit of its name."""
    if x is None:
        return ""
    if name == "step_time_ms":
        return time_text(x / 1e3)
    if name == "mfu":
        return f"{x:.1%}"
    if name in ("tokens_per_s", "dollars_per_million_tokens"):
        return two_digits(x)
    return f"{count_text(x / 1e12)} TFLOP" if name == "flops_per_device" else size_text(x)
