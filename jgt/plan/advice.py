"""The largest costs of a plan, and the rule that would change each."""

from __future__ import annotations

from collections.abc import Iterator

from jgt.plan.collectives import Collective
from jgt.plan.plan import Plan
from jgt.plan.signals import SignalRow
from jgt.plan.units import axes_text, size_text

_NUMBER = 3


def largest_costs(plan: Plan) -> list[str]:
    """What costs most: time where it is predicted, else bytes sent; a line each."""
    lines = list(_by_time(plan)) if plan.step_time_ms is not None else list(_by_bytes(plan))
    return [f"{number}. {text}" for number, text in enumerate(lines[:_NUMBER], 1)]


def _by_time(plan: Plan) -> Iterator[str]:
    assert plan.step_time_ms is not None
    costs: list[tuple[float, str]] = []
    for row in plan.signals:
        compute, exposed = row.compute_ms or 0.0, row.exposed_ms or 0.0
        rule = f" (the rule: {row.rule})" if row.rule else ""
        costs.append((compute, f"{row.signal}: {compute:,.1f} ms of kernels ({compute / plan.step_time_ms:.0%}), {_of_kernels(row)}{rule}"))
        worst = next((c for c in plan.collectives if c.signal == row.signal), None)
        if worst is not None:
            costs.append((exposed, f"{row.signal}: {exposed:,.1f} ms waiting ({exposed / plan.step_time_ms:.0%}), most for {_of_collective(worst)}{rule}"))
    for _, text in sorted(costs, key=lambda cost: -cost[0]):
        yield text


def _of_kernels(row: SignalRow) -> str:
    if row.flops_share and row.flops > 1.2 * row.flops_share:
        return f"{row.flops / row.flops_share:.1f} times its part of the FLOPs: shard a tensor there over one more axis (tensors: NAME: [...])"
    if row.signal == "optimizer":
        return f"{size_text(row.hbm_bytes)} to and from memory: shard the optimizer state (optimizer: '**': [...])"
    if row.roofline_ms.get("memory", 0.0) > row.roofline_ms.get("matmul", 0.0):
        return f"{size_text(row.hbm_bytes)} to and from memory for {row.flops / 1e12:.3g} TFLOP: memory-bound. Keep less (save:, train.remat), or use a fused kernel there"
    return f"{row.flops / 1e12:.3g} TFLOP: compute-bound. Only recomputing less (train.remat, save:) or more devices help"


def _by_bytes(plan: Plan) -> Iterator[str]:
    lines = {row.signal: row.rule for row in plan.signals if row.rule}
    for one in plan.collectives:
        rule = f" (the rule: {lines[one.signal]})" if one.signal in lines else ""
        yield f"{one.signal}: {size_text(one.total_bytes)} sent by {_of_collective(one)}{rule}"


def _of_collective(one: Collective) -> str:
    where = f" at {one.source}" if one.source else ""
    what = f"{one.kind} {one.dtype} over {axes_text(one.axes)} ({one.count} x {size_text(one.bytes)}, {one.phase}){where}"
    if one.signal == "pipeline":
        return f"{what}: fewer, larger microbatches or fewer stages (pipeline:)"
    rule = {
        "all-gather": "what is gathered there: its params: or tensors: spec",
        "reduce-scatter": "the optimizer: or backward: spec of what is scattered there",
        "all-reduce": "its out: spec (sharding another dim makes it a reduce-scatter), or the axis' size",
        "all-to-all": "two specs that follow each other with other dims sharded",
        "collective-permute": "two specs that follow each other with axes in another order",
    }.get(one.kind, "its spec")
    return f"{what}; the rule to change is {rule}"
