"""Plans of what `sync:` sends: the exchange at the end of a phase, and a table of policies to choose by.

A step and an exchange are two programs with two plans. The cost of an exchange is spread over the steps of a phase. The
table compiles the run's step with gradients summed in each type, the step of a replica, and an exchange in each type, and computes from
these what each policy costs in a step on average.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jgt import Console, Plan, amount

from ..config import Config

_SCALES = 1 + 4 / 256
"""Bytes of a number in int8 with its share of the scale of its block."""
WIRES: Mapping[str, float] = {"f32": 4.0, "bf16": 2.0, "int8": _SCALES}
"""The bytes of a number on the wire."""
PHASES = (10, 50, 500)
"""The numbers of steps between exchanges that the table compares."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The plan of an exchange, and the bytes that it should send by its formula: those of 2 (R-1)/R times the numbers on a device.

    fragments: the number of parts in which a phase exchanges the parameters. plan: the plan for the largest part.
    """

    plan: Plan
    every: int
    fragments: int
    formula_bytes: int

    @property
    def ms_a_step(self) -> float | None:
        """The time of the exchanges of a phase, spread over its steps; None without a target."""
        return None if self.plan.step_time_ms is None else self.plan.step_time_ms * self.fragments / self.every

    def to_json(self) -> dict[str, object]:
        """Plain values, for `json.dumps`."""
        return {
            "every": self.every,
            "fragments": self.fragments,
            "formula_bytes": self.formula_bytes,
            "ms_a_step": self.ms_a_step,
            **self.plan.to_json(),
        }


def formula_bytes(numbers: int, replicas: int, wire: str) -> int:
    """The bytes that a device sends in an exchange of this many numbers."""
    return round(2 * (replicas - 1) / replicas * numbers * WIRES[wire])


def print_exchange(step: Plan, exchange: Exchange) -> None:
    """Writes the plan of an exchange to stdout, for a person."""
    console = Console()
    parts = f", in {exchange.fragments} fragments" if exchange.fragments > 1 else ""
    console.print(f"Exchange, every {exchange.every} steps{parts}", style="bold", markup=False, highlight=False)
    title = "What one device sends in an exchange" + (" of a fragment" if parts else "")
    table = Console.table(title, ["collective", "sent over", "sent"], 2)
    for row in exchange.plan.collectives:
        table.add_row(f"{row.kind} {row.dtype}", "+".join(row.axes) or "(none)", amount(row.total_bytes, "B"))
    table.add_row("formula", "", amount(exchange.formula_bytes, "B"))
    console.print(table)
    if step.step_time_ms is not None and exchange.ms_a_step is not None:
        whole = step.step_time_ms + exchange.ms_a_step
        took = f"An exchange takes {exchange.plan.step_time_ms:.2f} ms, or {exchange.ms_a_step:.3f} ms a step"
        console.print(f"{took}: {exchange.ms_a_step / whole:.1%} of {whole:.2f} ms", markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class SyncPolicy:
    """A `sync:` section whose step, and with `every` above 1 whose exchange, the table needs."""

    axis: str
    wire: str
    every: int = 1
    late: int = 0
    fragments: int = 1

    @property
    def override(self) -> str:
        """As an argument of the command line."""
        more = f", late: {self.late}" if self.every == 1 else f", every: {self.every}, fragments: {self.fragments}"
        return f"sync={{axis: {self.axis}, wire: {self.wire}{more}}}"


def policies(config: Config) -> list[SyncPolicy]:
    """The policies in the table: gradients in each step or one step late, and exchanges in as many fragments as the run has."""
    sync = config.sync
    assert sync is not None
    # A run that skips spikes cannot have late gradients.
    lates = (0, 1) if config.train.skip_spikes is None else (0,)
    of_gradients = [SyncPolicy(axis=sync.axis, wire=wire, late=late) for late in lates for wire in WIRES]
    every = max(2, sync.fragments)
    return [*of_gradients, *(SyncPolicy(axis=sync.axis, wire=wire, every=every, fragments=sync.fragments) for wire in WIRES)]


def policy_rows(plans: Sequence[tuple[SyncPolicy, Plan, Plan | None]]) -> list[dict[str, object]]:
    """The table: by policy the bytes over the axis and the time in a step, on average. plans: plans of `policies`, step and exchange.

    largest: the bytes of one exchange.
    """

    def sent(plan: Plan, axis: str) -> int:
        return sum(row.total_bytes for row in plan.collectives if axis in row.axes)

    rows: list[dict[str, object]] = []
    for policy, step, exchange in plans:
        for every in (1,) if exchange is None else PHASES:
            if every < policy.fragments:
                continue
            count, ms, largest = float(sent(step, policy.axis)), step.step_time_ms, sent(exchange or step, policy.axis)
            if exchange is not None:
                share = policy.fragments / every
                count += largest * share
                ms = None if ms is None or exchange.step_time_ms is None else ms + exchange.step_time_ms * share
            of = {"every": every, "late": policy.late, "fragments": policy.fragments, "wire": policy.wire}
            rows.append({**of, "largest": largest, "bytes_a_step": round(count), "ms_a_step": ms})
    return sorted(rows, key=lambda row: (row["every"], row["late"]))


def print_policies(axis: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Writes the table to stdout, for a person."""
    timed = any(row["ms_a_step"] is not None for row in rows)
    names = ["every", "late", "fragments", "wire"]
    table = Console.table(f"sync over {axis}, for one device and step", [*names, "largest", "sent", *(["ms"] if timed else [])], 4)
    for row in rows:
        count, largest, ms = row["bytes_a_step"], row["largest"], row["ms_a_step"]
        assert isinstance(count, int) and isinstance(largest, int)
        sizes = (amount(largest, "B"), amount(count, "B"))
        table.add_row(*(str(row[name]) for name in names), *sizes, *([f"{ms:.2f}"] if timed else []))
    console = Console()
    console.print(table)
    note = "largest: one exchange. sent: exchanges spread over the steps between them. The losses of policies differ (docs/sync.md)"
    console.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)
