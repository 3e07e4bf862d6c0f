"""The costs of a run on its target: hours and dollars of the run itself, of tokens, samples and an epoch, from the time of one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jgt import Console, Plan
from jgt.document import InputError

from ..config import Run
from ..data.config import OwnData
from ..data.own import open_own


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of some steps. of: what they are. dollars: None without a price."""

    of: str
    steps: float
    hours: float
    dollars: float | None


def costs_of(run: Run, plan: Plan, tokens: float | None) -> list[Cost]:
    """The costs of a run by its plan. tokens: how many are asked for; None: a billion. Empty where the time of a step means nothing."""
    if plan.step_time_ms is None or plan.step_time_caveat or plan.speed is None:
        return []
    hours, per_hour = plan.step_time_ms / 3.6e6, plan.speed.dollars_per_hour
    return [
        Cost(of=of, steps=steps, hours=steps * hours, dollars=None if per_hour is None else steps * hours * per_hour)
        for of, steps in _amounts(run, plan, tokens)
    ]


def _amounts(run: Run, plan: Plan, tokens: float | None) -> Iterator[tuple[str, float]]:
    """The names of what is priced, with its steps."""
    batch, epochs = run.config.train.batch, run.config.train.epochs
    assert plan.speed is not None and plan.step_time_ms is not None
    samples = _samples(run)
    if epochs is None:
        yield f"this run, {run.steps:,} steps", run.steps
    elif samples is not None:
        yield f"this run, {epochs:g} epochs", epochs * samples / batch
    if samples is not None:
        yield f"an epoch, {samples:,} samples", samples / batch
    yield "1,000 samples", 1000 / batch
    if plan.speed.tokens_per_s is not None:
        yield f"{tokens or 1e9:,.3g} tokens", (tokens or 1e9) / (plan.speed.tokens_per_s * plan.step_time_ms / 1e3)
    elif tokens is not None:
        raise InputError(
            ["command line: --tokens: the inputs of this model are not tokens. Without --tokens, a plan has the cost of samples"]
        )


def _samples(run: Run) -> int | None:
    """The samples of an epoch of the user's own data; None where they are not known before the data is encoded, or have no end."""
    if not isinstance(run.config.data, OwnData):
        return None
    model = run.config.model
    found = open_own(run.config.data, run.code, run.where, seq=model.seq, vocab=model.vocab).fingerprint.get("train_samples")
    return found if isinstance(found, int) else None


def print_costs(costs: Sequence[Cost]) -> None:
    """A table of the costs."""
    table = Console.table("Cost", ["of", "steps", "hours", *(["$"] if costs and costs[0].dollars is not None else [])], 1)
    for cost in costs:
        table.add_row(cost.of, *(f"{value:,.3g}" for value in (cost.steps, cost.hours, cost.dollars) if value is not None))
    if costs:
        Console().print(table)
