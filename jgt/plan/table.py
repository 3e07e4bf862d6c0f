"""A plan for a person: a table by signal, totals, what to look at, and what costs most."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jgt.plan.advice import largest_costs
from jgt.plan.plan import Plan
from jgt.plan.signals import SignalRow
from jgt.plan.units import axes_text, count_text, size_text

_WIDTH_OF_FILES = 160
_SPECS = 3


def print_plan(plan: Plan) -> None:
    """Writes a plan to stdout."""
    console = make_console()
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    console.print(Text(f"Plan for {plan.target}: {mesh} = {plan.devices} devices, compiled in {plan.seconds:.1f} s with jax {plan.versions['jax']}", style="bold"))
    console.print(_signals(plan))
    console.print(_totals(plan))
    console.print(_axes(plan))
    if plan.findings:
        console.print(Text(f"{len(plan.findings)} to look at", style="bold"))
        for finding in plan.findings:
            console.print(Text(f"  ! {finding.text}"), soft_wrap=True)
    console.print(Text("The three largest costs", style="bold"))
    for line in largest_costs(plan):
        console.print(Text(f"  {line}"), soft_wrap=True)
    for line in plan.assumptions:
        console.print(Text(line, style="dim"), soft_wrap=True)


def make_console() -> Console:
    """Writes to stdout, wide where there is no terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH_OF_FILES)


def make_table(title: str, columns: Sequence[str], texts: int) -> Table:
    """A table whose first `texts` columns are text and whose others are numbers."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold", min_width=len(title))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < texts else "right", overflow="fold")
    return table


def _signals(plan: Plan) -> Table:
    timed = plan.step_time_ms is not None
    table = make_table("By signal, of one device in a step", ["signal", "spec", "sent over", "params", "kept", "sent", "GFLOP", *(["ms", "exposed ms"] if timed else [])], 3)
    for row in plan.signals:
        times = [f"{row.compute_ms:.2f}", f"{row.exposed_ms:.2f}"] if timed else []
        if not _is_notable(plan, row):
            continue
        sent = sum(row.sent.values())
        over = ", ".join(f"{axes} {size_text(count)}" for axes, count in sorted(row.sent.items(), key=lambda i: -i[1])[:_SPECS])
        sizes = [size_text(n) if n else "" for n in (row.parameter_bytes, row.activation_bytes, sent)]
        table.add_row(*map(Text, [row.signal, _specs(row), over, *sizes, count_text(row.flops / 1e9) if row.flops else "", *times]))
    return table


def _is_notable(plan: Plan, row: SignalRow) -> bool:
    """Whether a row is more than dust: a signal of its own, or a thousandth of anything."""
    total = sum((r.compute_ms or 0) + (r.exposed_ms or 0) for r in plan.signals)
    time = (row.compute_ms or 0) + (row.exposed_ms or 0)
    return bool(row.parameter_bytes or row.flops or sum(row.sent.values()) > 1e-3 * plan.sent_bytes or time > 1e-3 * total > 0)


def _specs(row: SignalRow) -> str:
    shown = [s for s in row.specs if not s.endswith(" []")] or list(row.specs)
    return ", ".join(shown[:_SPECS]) + (f" and {len(shown) - _SPECS} more" if len(shown) > _SPECS else "")


def _totals(plan: Plan) -> Table:
    memory = plan.memory
    table = make_table("Totals of one device", ["what", "much"], 1)
    for name, count in memory.groups.items():
        table.add_row(name, size_text(count))
    table.add_row("temporary: activations, gradients, buffers", size_text(memory.temp_bytes))
    if memory.gradient_bytes:
        table.add_row("  of which gradients", size_text(memory.gradient_bytes))
    if memory.activations:
        table.add_row("  of which the backward pass keeps", size_text(sum(memory.activations.values())))
    if memory.host_bytes:
        table.add_row("in the host's memory", size_text(memory.host_bytes))
    room = "" if memory.hbm_bytes is None else f" of {size_text(memory.hbm_bytes)}: {'fits' if memory.fits else 'DOES NOT FIT'}, {1 - memory.peak_bytes / memory.hbm_bytes:.0%} free"
    table.add_row("peak", size_text(memory.peak_bytes) + room)
    table.add_row("FLOPs, with recompute and bubbles", f"{count_text(plan.flops_per_device / 1e12)} TFLOP")
    table.add_row("FLOPs of the model", f"{count_text(plan.model_flops_per_device / 1e12)} TFLOP")
    if plan.step_time_ms is not None:
        rate = plan.model_flops_per_device / plan.step_time_ms / 1e9
        table.add_row("predicted step", f"{plan.step_time_ms:,.1f} ms, {count_text(rate)} TFLOP/s of the model")
    return table


def _axes(plan: Plan) -> Table:
    """What is sent by axes, beside what the formulas say."""
    table = make_table("Sent by axes, of one device in a step", ["axes", "formula", "compiled", *(["ms"] if plan.links_ms and plan.step_time_ms is not None else [])], 1)
    found: dict[str, int] = {}
    asked: dict[str, int] = {}
    for c in plan.collectives:
        found[axes_text(c.axes)] = found.get(axes_text(c.axes), 0) + c.total_bytes
    for e in plan.expected:
        asked[axes_text(e.axes)] = asked.get(axes_text(e.axes), 0) + e.bytes
    for axes in sorted({*found, *asked}, key=lambda a: -found.get(a, 0)):
        if found.get(axes, 0) < 1e-4 * plan.sent_bytes and axes not in asked:
            continue
        times = [f"{plan.links_ms.get(axes, 0):.2f}"] if plan.step_time_ms is not None and plan.links_ms else []
        table.add_row(axes, size_text(asked.get(axes, 0)), size_text(found.get(axes, 0)), *times)
    table.add_row("all", size_text(sum(asked.values())), size_text(plan.sent_bytes), *([""] if plan.step_time_ms is not None and plan.links_ms else []))
    return table
