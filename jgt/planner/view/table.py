"""A plan for a person, in the terminal: the step and its speed, tables, findings, advice, and the largest costs.

The text goes from the whole to the detail, and ends with what is wrong and what would help. Rows that are too small to matter are left out,
but totals count them.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.table import Table
from rich.text import Text

from jgt.command.console import Console, amount, axes_text, two_digits
from jgt.planner.plan import Plan
from jgt.planner.signals import SignalRow, folded
from jgt.planner.view.costs import largest_costs

_NUM_SPECS, _NUM_AXES = 1, 2
"""The specs, and the mesh axes, that one line shows."""
_BAR = 40
"""The cells of the longest bar."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_SMALLEST = 1e-3
"""The share of the step below which a part of its time is left out."""
_LEAST_WANTED = ("spec", "sent over", "GFLOP", "parameters")
"""The columns of the signals that are left out, in this order, if the terminal is too narrow for them."""
_WIDEST = 1_000
"""The width of output that does not go to a terminal: as wide as the tables need."""


def print_plan(plan: Plan, file: TextIO | None = None) -> None:
    """Writes a plan to stdout, or to another file."""
    console = Console(file=file, width=None if file is None and sys.stdout.isatty() else _WIDEST)
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    title = f"Plan for {plan.target}: {mesh} = {plan.devices} devices, compiled in {plan.seconds:.1f} s with jax {plan.versions['jax']}"
    console.print(Text(title, style="bold"))
    # Findings and costs are not wrapped, so that each stays one line for `grep`.
    for line in summary(plan):
        console.print(Text(line), soft_wrap=True)
    for table in (_time(plan), _memory(plan), _axes(plan), _signals(plan, console.width)):
        if table.row_count:
            console.print(table)
    lists = {
        f"Findings: {len(plan.findings)}": [f"! {finding.text}" for finding in plan.findings],
        "What would help": [f"{number}. {advice.text}" for number, advice in enumerate(plan.advice, 1)],
        "Largest costs": largest_costs(plan),
    }
    for name, lines in lists.items():
        for text in [Text(name, style="bold"), *(Text(f"  {line}") for line in lines)] if lines else ():
            console.print(text, soft_wrap=True)
    for line in plan.assumptions:
        console.print(Text(line, style="dim"), soft_wrap=True)


def summary(plan: Plan) -> list[str]:
    """The step in a few lines: its time and speed, its cost, its FLOPs, and its schedule."""
    lines: list[str] = []
    if plan.step_time_ms is not None and plan.step_time_caveat:
        lines.append(f"step: the time of {amount(plan.step_time_ms / 1e3, 's')} has no meaning: {plan.step_time_caveat}")
    elif plan.step_time_ms is not None:
        lines.append(f"step: {step_text(plan)}{''.join(f', {text}' for text in speed_texts(plan))}")
    if plan.schedule is not None:
        lines.append(f"pipeline: {plan.schedule.text}")
    useful, executed = (amount(count / 1e12) for count in (plan.model_flops_per_device, plan.flops_per_device))
    lines.append(f"FLOPs of one device: {useful} TFLOP of the model, {executed} TFLOP with recompute and bubbles")
    return lines


def step_text(plan: Plan) -> str:
    """The time of the step with its error: `1.3 s ± 12%`."""
    error = "" if plan.step_time_error is None else f" ± {plan.step_time_error:.0%}"
    return f"{amount((plan.step_time_ms or 0.0) / 1e3, 's')}{error}"


def speed_texts(plan: Plan) -> list[str]:
    """Tokens/s, MFU and cost; none if the step has no time."""
    speed = plan.speed
    if speed is None or plan.step_time_caveat:
        return []
    texts: list[str] = []
    if speed.tokens_per_s is not None:
        texts.append(f"{two_digits(speed.tokens_per_s)} tokens/s ({two_digits(speed.tokens_per_s / plan.devices)} each)")
    texts.append(f"MFU {speed.mfu:.0%} ({two_digits(speed.model_tflops_per_device)} TFLOP/s each)")
    if speed.dollars_per_million_tokens is not None:
        texts.append(f"${two_digits(speed.dollars_per_million_tokens)} for a million tokens")
    if speed.dollars_per_hour is not None:
        texts.append(f"${two_digits(speed.dollars_per_hour)} an hour")
        texts.append(f"${two_digits(speed.dollars_per_hour * (plan.step_time_ms or 0.0) / 3600)} for 1,000 steps")
    return texts


def time_rows(plan: Plan) -> list[tuple[str, float]]:
    """The parts of the step's time in milliseconds, with the waiting by mesh axes."""
    waiting = sum(plan.exposed_ms.values()) or 1.0
    rows: list[tuple[str, float]] = []
    for part, ms in plan.parts_ms.items():
        if part == "exposed":
            # Waiting in a bubble counts as waiting here.
            axes = sorted(plan.exposed_ms.items(), key=lambda item: -item[1])
            rows += [(f"waiting for {name}", ms * exposed / waiting) for name, exposed in axes]
        else:
            rows.append((PART_NAMES.get(part, part), ms))
    return rows


PART_NAMES = {
    "matmul": "matmuls",
    "attention": "fused attention",
    "memory": "memory-bound kernels",
    "launch": "launches of kernels",
    "recompute": "recompute",
    "bubble": "bubble of the pipeline",
}
"""The parts of a step's time as a person reads them."""


def _time(plan: Plan) -> Table:
    table = Console.table("Time of the step", ["spent on", "time", "share", ""], 1)
    table.columns[-1].justify = "left"
    step = plan.step_time_ms or 1.0
    for name, ms in time_rows(plan) if plan.step_time_ms is not None and not plan.step_time_caveat else ():
        if ms >= _SMALLEST * step:
            table.add_row(name, amount(ms / 1e3, "s"), f"{ms / step:.1%}", _bar(ms / step))
    return table


def _signals(plan: Plan, width: int) -> Table:
    rows = [row for row in folded(plan.signals) if _is_notable(plan, row)]
    over = [[f"{axes} {amount(count, 'B')}" for axes, count in sorted(row.sent.items(), key=lambda i: -i[1])] for row in rows]

    def sizes(count: Callable[[SignalRow], int]) -> list[str]:
        return [amount(count(row), "B") if count(row) else "" for row in rows]

    columns = {
        "signal": [row.signal for row in rows],
        "spec": list(map(_specs, rows)),
        "sent over": [_first(texts, _NUM_AXES) for texts in over],
        "parameters": sizes(lambda row: row.parameter_bytes),
        "activations": sizes(lambda row: row.activation_bytes),
        "sent": sizes(lambda row: sum(row.sent.values())),
        "GFLOP": [amount(row.flops / 1e9) if row.flops else "" for row in rows],
    }
    if plan.step_time_ms is not None:
        columns["ms"] = [two_digits(row.compute_ms or 0.0) for row in rows]
        columns["exposed ms"] = [two_digits(row.exposed_ms or 0.0) for row in rows]
    shown = Console.fitted(columns, width, _LEAST_WANTED)
    texts = sum(name in shown for name in ("signal", "spec", "sent over"))
    return Console.table("Signals, for one device and step", list(shown), texts, zip(*shown.values(), strict=True))


def _is_notable(plan: Plan, row: SignalRow) -> bool:
    """Whether a signal has parameters or matmuls, or a thousandth of the bytes sent or of the time."""
    total = sum((r.compute_ms or 0) + (r.exposed_ms or 0) for r in plan.signals)
    time = (row.compute_ms or 0) + (row.exposed_ms or 0)
    # Without a target all times are 0, and then none of them is notable.
    return bool(row.parameter_bytes or row.flops or sum(row.sent.values()) > 1e-3 * plan.sent_bytes or time > 1e-3 * total > 0)


def _specs(row: SignalRow) -> str:
    # Replicated parameters, such as scales of norms, are shown only where there is nothing else.
    shown = [s for s in row.specs if not s.endswith(" []")] or list(row.specs)
    # The parameter with the most dims is the one that matters: a matrix before its bias.
    return _first(sorted(shown, key=lambda spec: -spec.count(",")), _NUM_SPECS)


def _first(texts: Sequence[str], number: int) -> str:
    """The first texts of a list, and how many more there are. Each row is one line, so that the table stays short."""
    return ", ".join(texts[:number]) + (f" +{len(texts) - number}" if len(texts) > number else "")


def _memory(plan: Plan) -> Table:
    memory = plan.memory
    table = Console.table("Memory of one device", ["memory", "size", ""], 1)
    table.columns[-1].justify = "left"
    # Bars end at the limit; without one, the peak is the longest bar.
    most = memory.hbm_bytes or memory.peak_bytes or 1
    for name, count in memory_rows(plan):
        table.add_row(name, amount(count, "B"), _bar(count / most))
    limit, drawn = "", _bar(memory.peak_bytes / most)
    if memory.hbm_bytes is not None:
        free = f"{1 - memory.peak_bytes / memory.hbm_bytes:.0%} free" if memory.fits else "DOES NOT FIT"
        limit = f" of {amount(memory.hbm_bytes, 'B')}, {'fits, ' if memory.fits else ''}{free}"
        # A step that does not fit has a bar that crosses the limit.
        scale = max(memory.peak_bytes / memory.hbm_bytes, 1.0)
        drawn = _gauge(memory.peak_bytes / memory.hbm_bytes / scale, 1 / scale)
    table.add_row("peak", amount(memory.peak_bytes, "B"), drawn + limit)
    return table


def memory_rows(plan: Plan) -> list[tuple[str, int]]:
    """The memory of a device by kind, without the peak. Kinds without bytes are left out."""
    memory = plan.memory
    rows = [
        *memory.groups.items(),
        ("temporary: activations, gradients, buffers", memory.temp_bytes),
        ("  including gradients", memory.gradient_bytes),
        ("  including activations for the backward pass", sum(memory.activations.values())),
        ("in the host's memory", memory.host_bytes),
    ]
    return [(name, count) for name, count in rows if count]


def _axes(plan: Plan) -> Table:
    timed = bool(plan.links_ms) and plan.step_time_ms is not None
    table = Console.table(
        "Sent over each axis, by one device in a step", ["axes", "formula", "compiled", *(["time", "exposed"] if timed else [])], 1
    )
    sent: collections.Counter[str] = collections.Counter()
    formulas: collections.Counter[str] = collections.Counter()
    for c in plan.collectives:
        sent[axes_text(c.axes)] += c.total_bytes
    for e in plan.expected:
        formulas[axes_text(e.axes)] += e.bytes
    for axes in sorted({*sent, *formulas}, key=lambda a: -sent[a]):
        if sent[axes] >= 1e-4 * plan.sent_bytes or axes in formulas:
            times = [amount(plan.links_ms.get(axes, 0) / 1e3, "s"), amount(plan.exposed_ms.get(axes, 0) / 1e3, "s")] if timed else []
            table.add_row(axes, amount(formulas[axes], "B"), amount(sent[axes], "B"), *times)
    table.add_row("total", amount(formulas.total(), "B"), amount(plan.sent_bytes, "B"), *(["", ""] if timed else []))
    return table


def _bar(share: float) -> str:
    """A bar of eighths of a cell for a share of the width. Anything above 0 shows at least an eighth."""
    eighths = max(round(min(share, 1.0) * _BAR * 8), 1 if share > 0 else 0)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def _gauge(share: float, limit: float) -> str:
    """A bar with a mark `|` at a limit: dots fill what is left, and a bar that is too long crosses the mark."""
    filled, end = _bar(share), round(limit * _BAR)
    return f"{filled:·<{end}}|" if len(filled) <= end else f"{filled[:end]}|{filled[end:]}"
