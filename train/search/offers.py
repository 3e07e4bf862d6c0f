"""Several machines to choose from: the best layout on each, what a number of tokens costs there, and how long it takes.

A search answers for one target. Here its answers are put side by side. Speed is tokens in a second, and money is dollars for an hour of one
GPU, from a file such as

    h100: 2.5
    h200: 3.1

A deadline asks how many GPUs are needed. That number follows from the speed of one GPU in the layout that was found, as if more GPUs were
as fast each. A larger machine spends more of its time on the network, so the number is a lower limit, to be checked by another search.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jgt.console import make_console, make_table
from jgt.hardware.chip import Target

from .layout import layout_text
from .search import LayoutSearch, Try

_HOURS, _SECONDS = 24, 86_400
"""Of a day."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be trained. batch_tokens: in a step. tokens: in all. days: until the deadline. prices: dollars for an hour, by chip."""

    batch_tokens: int
    tokens: float | None = None
    days: float | None = None
    prices: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A machine for a job. best: its fastest layout; None if none was found, and `problem` says why.

    per_hour: dollars for an hour of all devices, None without a price. needed: devices that meet the deadline, in whole hosts.
    """

    target: Target
    best: Try | None
    problem: str
    tokens_per_s: float
    per_hour: float | None
    days: float | None
    needed: int | None

    @property
    def per_million(self) -> float | None:
        """Dollars for a million tokens."""
        return None if self.per_hour is None or not self.tokens_per_s else self.per_hour / 3600 / self.tokens_per_s * 1e6

    @property
    def cost(self) -> float | None:
        """Dollars for all tokens."""
        return None if self.per_hour is None or self.days is None else self.per_hour * _HOURS * self.days

    def meets(self, job: Job) -> bool:
        """Whether it is done in time; true without a deadline."""
        return self.days is None or job.days is None or self.days <= job.days

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        layout = None if self.best is None else layout_text(self.best.candidate)
        found = {"target": self.target.text, "layout": layout, "seconds": None if self.best is None else self.best.plan.seconds}
        found |= {"tokens_per_s": self.tokens_per_s or None, "dollars_per_hour": self.per_hour, "days": self.days, "dollars": self.cost}
        return {**found, "dollars_per_million_tokens": self.per_million, "devices_needed": self.needed, "problem": self.problem or None}


def offer_of(target: Target, found: LayoutSearch | None, problem: str, job: Job) -> Offer:
    """What a search found for a job. problem: why there was no search, or why it found nothing."""
    best = None if found is None else found.best
    speed = 0.0 if best is None else job.batch_tokens / best.plan.seconds
    price = None if job.prices is None else job.prices.get(chip_of(target))
    days = None if job.tokens is None or not speed else job.tokens / speed / _SECONDS
    needed = None
    if days is not None and job.days is not None:
        needed = math.ceil(target.num_hosts * days / job.days) * target.per_host
    return Offer(
        target=target,
        best=best,
        problem="" if best is not None else problem,
        tokens_per_s=speed,
        per_hour=None if price is None else price * target.num_devices,
        days=days,
        needed=needed,
    )


def ranked(offers: Sequence[Offer], job: Job) -> list[Offer]:
    """The best offer first: those in time, by the price of a token if all have one, or else by speed. Those without a layout are last."""
    by_price = all(offer.per_hour is not None for offer in offers if offer.best is not None)

    def order(offer: Offer) -> tuple[object, ...]:
        return (offer.best is None, not offer.meets(job), offer.per_million or 0.0 if by_price else -offer.tokens_per_s)

    return sorted(offers, key=order)


def print_offers(offers: Sequence[Offer], job: Job) -> None:
    """A table of ranked offers."""
    console = make_console()
    columns = ["target", "layout", "s", "tokens/s", "GB"]
    columns += ["$/hour", "$/M tokens"] if job.prices is not None else []
    columns += ["days"] if job.tokens is not None else []
    columns += ["$"] if job.prices is not None and job.tokens is not None else []
    columns += [f"GPUs for {job.days:g} days"] if job.days is not None else []
    table = make_table("Machines", columns, 2)
    for offer in offers:
        table.add_row(*_cells(offer, job))
    console.print(table)
    if job.days is not None:
        console.print("GPUs for the deadline: as if more GPUs were as fast each. Search again with so many to see what they do")


def _cells(offer: Offer, job: Job) -> Iterator[str]:
    yield offer.target.text
    yield offer.problem if offer.best is None else layout_text(offer.best.candidate)
    yield "" if offer.best is None else f"{offer.best.plan.seconds:.3g}"
    yield f"{offer.tokens_per_s:,.0f}" if offer.tokens_per_s else ""
    yield "" if offer.best is None else f"{offer.best.plan.peak_bytes / 1e9:.1f}"
    if job.prices is not None:
        yield _number(offer.per_hour)
        yield "" if offer.per_million is None else f"{offer.per_million:.3g}"
    if job.tokens is not None:
        yield "" if offer.days is None else f"{offer.days:,.3g}" + ("" if offer.meets(job) else ", too late")
    if job.prices is not None and job.tokens is not None:
        yield _number(offer.cost)
    if job.days is not None:
        yield "" if offer.needed is None else f"{offer.needed:,}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def chip_of(target: Target) -> str:
    """The name of a target's chip, as in its file."""
    return target.text.partition(":")[0]
