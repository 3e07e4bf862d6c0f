"""A plan for a person: tables in the terminal, the findings, and the largest costs with the rule that would change each.

A plan is long, and its reader has one question: what should I change? So the text goes from the whole to the detail. One line for each
signal, then totals, then what travels over each axis beside what the formulas say; after that the findings, and the three largest costs.
A cost names its bound (matmuls, memory, or links) and the rules file's key that moves it, because that is what its reader can edit.

Invariant: rows that are too small to matter are left out, but totals count them.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from jgt.console import axes_text, count_text, make_console, make_table, size_text
from jgt.hlo.collectives import Collective
from jgt.planner.findings import REPEATED
from jgt.planner.plan import Plan
from jgt.planner.signals import SignalRow

_NUM_COSTS = 3
_NUM_SPECS = 3
"""The specs, and the mesh axes, that one line shows."""


def print_plan(plan: Plan) -> None:
    """Writes a plan to stdout."""
    console = make_console()
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    title = f"Plan for {plan.target}: {mesh} = {plan.devices} devices, compiled in {plan.seconds:.1f} s with jax {plan.versions['jax']}"
    console.print(Text(title, style="bold"))
    # Findings and costs are not wrapped, so that each stays one line for `grep`.
    for table in (_signals(plan), _memory(plan), _compute(plan), _axes(plan)):
        console.print(table)
    if plan.findings:
        console.print(Text(f"Findings: {len(plan.findings)}", style="bold"))
        for finding in plan.findings:
            console.print(Text(f"  ! {finding.text}"), soft_wrap=True)
    console.print(Text("Largest costs", style="bold"))
    for line in largest_costs(plan):
        console.print(Text(f"  {line}"), soft_wrap=True)
    for line in plan.assumptions:
        console.print(Text(line, style="dim"), soft_wrap=True)


def _signals(plan: Plan) -> Table:
    times = ["ms", "exposed ms"] if plan.step_time_ms is not None else []
    columns = ["signal", "spec", "sent over", "parameters", "activations", "sent", "GFLOP", *times]
    table = make_table("Signals, for one device and step", columns, 3)
    for row in plan.signals:
        if not _is_notable(plan, row):
            continue
        over = ", ".join(f"{axes} {size_text(count)}" for axes, count in sorted(row.sent.items(), key=lambda i: -i[1])[:_NUM_SPECS])
        sizes = [size_text(n) if n else "" for n in (row.parameter_bytes, row.activation_bytes, sum(row.sent.values()))]
        flops = count_text(row.flops / 1e9) if row.flops else ""
        values = [f"{row.compute_ms:.2f}", f"{row.exposed_ms:.2f}"] if times else []
        # rich would read the brackets of a spec as markup in a str.
        table.add_row(*map(Text, [row.signal, _specs(row), over, *sizes, flops, *values]))
    return table


def _is_notable(plan: Plan, row: SignalRow) -> bool:
    """Whether a signal has parameters or matmuls, or a thousandth of the bytes sent or of the time."""
    total = sum((r.compute_ms or 0) + (r.exposed_ms or 0) for r in plan.signals)
    time = (row.compute_ms or 0) + (row.exposed_ms or 0)
    # Without a target all times are 0, and then none of them is notable.
    return bool(row.parameter_bytes or row.flops or sum(row.sent.values()) > 1e-3 * plan.sent_bytes or time > 1e-3 * total > 0)


def _specs(row: SignalRow) -> str:
    # Replicated parameters, such as scales of norms, are shown only where there is nothing else.
    shown = [s for s in row.specs if not s.endswith(" []")] or list(row.specs)
    return ", ".join(shown[:_NUM_SPECS]) + (f" and {len(shown) - _NUM_SPECS} more" if len(shown) > _NUM_SPECS else "")


def _memory(plan: Plan) -> Table:
    memory = plan.memory
    table = make_table("Memory of one device", ["memory", "size"], 1)
    for name, count in memory.groups.items():
        table.add_row(name, size_text(count))
    table.add_row("temporary: activations, gradients, buffers", size_text(memory.temp_bytes))
    if memory.gradient_bytes:
        table.add_row("  including gradients", size_text(memory.gradient_bytes))
    if memory.activations:
        table.add_row("  including activations for the backward pass", size_text(sum(memory.activations.values())))
    if memory.host_bytes:
        table.add_row("in the host's memory", size_text(memory.host_bytes))
    limit = ""
    if memory.hbm_bytes is not None:
        free = f"{1 - memory.peak_bytes / memory.hbm_bytes:.0%} free"
        limit = f" of {size_text(memory.hbm_bytes)}: {'fits' if memory.fits else 'DOES NOT FIT'}, {free}"
    table.add_row("peak", size_text(memory.peak_bytes) + limit)
    return table


def _compute(plan: Plan) -> Table:
    table = make_table("Computation of one device in a step", ["computation", "amount"], 1)
    table.add_row("FLOPs, with recompute and bubbles", f"{count_text(plan.flops_per_device / 1e12)} TFLOP")
    table.add_row("FLOPs of the model", f"{count_text(plan.model_flops_per_device / 1e12)} TFLOP")
    if plan.step_time_ms is not None:
        rate = plan.model_flops_per_device / plan.step_time_ms / 1e9
        table.add_row("predicted step", f"{plan.step_time_ms:,.1f} ms, {count_text(rate)} TFLOP/s of the model")
    return table


def _axes(plan: Plan) -> Table:
    """The bytes sent over each mesh axis, beside the formulas' figure."""
    timed = bool(plan.links_ms) and plan.step_time_ms is not None
    table = make_table("Sent over each axis, by one device in a step", ["axes", "formula", "compiled", *(["ms"] if timed else [])], 1)
    sent: collections.Counter[str] = collections.Counter()
    formulas: collections.Counter[str] = collections.Counter()
    for c in plan.collectives:
        sent[axes_text(c.axes)] += c.total_bytes
    for e in plan.expected:
        formulas[axes_text(e.axes)] += e.bytes
    for axes in sorted({*sent, *formulas}, key=lambda a: -sent[a]):
        if sent[axes] >= 1e-4 * plan.sent_bytes or axes in formulas:
            times = [f"{plan.links_ms.get(axes, 0):.2f}"] if timed else []
            table.add_row(axes, size_text(formulas[axes]), size_text(sent[axes]), *times)
    table.add_row("total", size_text(formulas.total()), size_text(plan.sent_bytes), *([""] if timed else []))
    return table


def largest_costs(plan: Plan) -> list[str]:
    """The three largest costs, a numbered line each: by time if it is predicted, otherwise by bytes sent."""
    costs = _by_bytes(plan) if plan.step_time_ms is None else _by_time(plan, plan.step_time_ms)
    return [f"{number}. {text}" for number, text in zip(range(1, _NUM_COSTS + 1), costs, strict=False)]


def _by_time(plan: Plan, step_ms: float) -> Iterator[str]:
    costs: list[tuple[float, str]] = []
    for row in plan.signals:
        compute, exposed = row.compute_ms or 0.0, row.exposed_ms or 0.0
        rule = f" (rule: {row.rule})" if row.rule else ""
        costs.append((compute, f"{row.signal}: {compute:,.1f} ms in kernels ({compute / step_ms:.0%} of the step), {_advice(row)}{rule}"))
        # The largest one: a plan's collectives are sorted by bytes.
        worst = next((c for c in plan.collectives if c.signal == row.signal), None)
        if worst is not None:
            waiting = f"{exposed:,.1f} ms waiting ({exposed / step_ms:.0%} of the step), mostly for {_collective_advice(worst)}"
            costs.append((exposed, f"{row.signal}: {waiting}{rule}"))
    yield from (text for _, text in sorted(costs, key=lambda cost: -cost[0]))


def _by_bytes(plan: Plan) -> Iterator[str]:
    rules = {row.signal: row.rule for row in plan.signals if row.rule}
    for c in plan.collectives:
        rule = f" (rule: {rules[c.signal]})" if c.signal in rules else ""
        yield f"{c.signal}: {size_text(c.total_bytes)} sent by {_collective_advice(c)}{rule}"


def _advice(row: SignalRow) -> str:
    """What a signal's kernels are bound by, and what would change that."""
    if row.flops_share and row.flops > REPEATED * row.flops_share:
        times = row.flops / row.flops_share
        return f"{times:.1f} times its share of the FLOPs. Shard a tensor there over one more axis (tensors: NAME: [...])"
    # An update does a few operations for each byte that it reads, on any hardware.
    if row.signal == "optimizer":
        return f"{size_text(row.hbm_bytes)} to and from memory. Shard the optimizer state (optimizer: '**': [...])"
    tflop = f"{row.flops / 1e12:.3g} TFLOP"
    if row.roofline_ms.get("memory", 0.0) > row.roofline_ms.get("matmul", 0.0):
        moved = f"{size_text(row.hbm_bytes)} to and from memory for {tflop}: memory-bound"
        return f"{moved}. Keep fewer activations (save:, train.remat), or use a fused kernel there"
    return f"{tflop}: compute-bound. Only less recompute (train.remat, save:) or more devices would help"


_TO_CHANGE = {
    "all-gather": "the params: or tensors: spec of what is gathered",
    "reduce-scatter": "the optimizer: or backward: spec of what is scattered",
    "all-reduce": "the out: spec (sharding another dim makes it a reduce-scatter), or the size of the axis",
    "all-to-all": "one of two consecutive specs that shard different dims",
    "collective-permute": "one of two consecutive specs that list their axes in different orders",
}


def _collective_advice(c: Collective) -> str:
    """A collective, and which spec would change it."""
    where = f" at {c.source}" if c.source else ""
    sent = f"{c.kind} {c.dtype} over {axes_text(c.axes)} ({c.count} x {size_text(c.bytes)}, {c.phase}){where}"
    # What a pipeline sends between stages has no spec.
    if c.signal == "pipeline":
        return f"{sent}. Use fewer, larger microbatches or fewer stages (pipeline:)"
    return f"{sent}. To change it, edit {_TO_CHANGE.get(c.kind, 'its spec')}"
