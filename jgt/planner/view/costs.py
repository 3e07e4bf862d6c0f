"""The largest costs of a plan: what each is bound by, and the rules file's key that would change it.

A cost is the time of a signal's kernels, or of waiting for its collectives; without times, the bytes of a collective.
"""

from __future__ import annotations

from collections.abc import Iterator

from jgt.command.console import amount, axes_text
from jgt.planner.findings import REPEATED
from jgt.planner.hlo.collectives import Collective
from jgt.planner.layouts import OPTIMIZER
from jgt.planner.plan import Plan
from jgt.planner.signals import PIPELINE_SIGNAL, SignalRow

_NUM_COSTS = 3


def largest_costs(plan: Plan) -> list[str]:
    """The three largest costs, a numbered line each: by time if it is predicted, otherwise by bytes sent."""
    costs = _by_bytes(plan) if plan.step_time_ms is None else _by_time(plan, plan.step_time_ms)
    return [f"{number}. {text}" for number, text in zip(range(1, _NUM_COSTS + 1), costs, strict=False)]


def _by_time(plan: Plan, step_ms: float) -> Iterator[str]:
    costs: list[tuple[float, str]] = []
    for row in plan.signals:
        compute, exposed = row.compute_ms or 0.0, row.exposed_ms or 0.0
        rule = f" (rule: {row.rule})" if row.rule else ""
        costs.append(
            (compute, f"{row.signal}: {amount(compute / 1e3, 's')} in kernels ({compute / step_ms:.0%} of the step), {_advice(row)}{rule}")
        )
        # The largest one: a plan's collectives are sorted by bytes.
        worst = next((c for c in plan.collectives if c.signal == row.signal), None)
        if worst is not None:
            waiting = f"{amount(exposed / 1e3, 's')} waiting ({exposed / step_ms:.0%} of the step), mostly for {_collective_advice(worst)}"
            costs.append((exposed, f"{row.signal}: {waiting}{rule}"))
    yield from (text for _, text in sorted(costs, key=lambda cost: -cost[0]))


def _by_bytes(plan: Plan) -> Iterator[str]:
    rules = {row.signal: row.rule for row in plan.signals if row.rule}
    for c in plan.collectives:
        rule = f" (rule: {rules[c.signal]})" if c.signal in rules else ""
        yield f"{c.signal}: {amount(c.total_bytes, 'B')} sent by {_collective_advice(c)}{rule}"


def _advice(row: SignalRow) -> str:
    """The bound of a signal's kernels, and how to change it."""
    if row.repeats > REPEATED:
        return f"{row.repeats:.1f} times its share of the FLOPs. Shard a tensor there over one more axis (tensors: NAME: [...])"
    # An update does a few operations for each byte that it reads, on any hardware.
    if row.signal == OPTIMIZER:
        return f"{amount(row.hbm_bytes, 'B')} to and from memory. Shard the optimizer state (optimizer: '**': [...])"
    if row.signal == PIPELINE_SIGNAL:
        return f"{amount(row.hbm_bytes, 'B')} to and from memory for what stages keep and send. Use fewer, larger microbatches (pipeline:)"
    tflop = f"{amount(row.flops / 1e12)} TFLOP"
    if row.roofline_ms.get("memory", 0.0) > row.roofline_ms.get("matmul", 0.0):
        moved = f"{amount(row.hbm_bytes, 'B')} to and from memory for {tflop}: memory-bound"
        return f"{moved}. Keep fewer activations (save:), or use a fused kernel there"
    return f"{tflop}: compute-bound. Only less recompute (save:) or more devices would help"


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
    sent = f"{c.kind} {c.dtype} over {axes_text(c.axes)} ({c.count} x {amount(c.bytes, 'B')}, {c.phase}){where}"
    # Sends between the stages of a pipeline have no spec.
    if c.signal == PIPELINE_SIGNAL:
        return f"{sent}. Use fewer, larger microbatches or fewer stages (pipeline:)"
    return f"{sent}. To change it, edit {_TO_CHANGE.get(c.kind, 'its spec')}"
