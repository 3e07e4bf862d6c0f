"""`jgt plan --search --targets A,B`: the best layout on each machine, what a number of tokens costs there, and how long it takes.

A search answers for one target. Here its answers are put side by side. Speed is tokens in a second, and money is dollars for an hour of one
GPU, from a file such as

    h100: 2.5
    h200: 3.1

For a deadline, the number of GPUs follows from the speed of one GPU in the layout that was found, as if a larger machine had the same speed
per GPU. It spends more time on the network, so the number is a lower limit. Another search with that number checks it.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from jgt import Console
from jgt.document import InputError
from jgt.planner import Target

from .search.search import PlannedLayout

_HOURS, _SECONDS = 24, 86_400
"""The hours and the seconds of a day."""
_SUFFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training to be priced.

    batch_tokens: the tokens of a step. tokens: the tokens of the whole run. days: the days until the deadline. prices: the dollars for an
    hour of one device, by chip.
    """

    batch_tokens: int = 0
    tokens: float | None = None
    days: float | None = None
    prices: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A machine for a job. best: its fastest layout; None if none was found, and `problem` says why."""

    job: Job
    target: Target
    best: PlannedLayout | None
    problem: str

    @property
    def tokens_per_s(self) -> float:
        """0 without a layout."""
        return 0.0 if self.best is None else self.job.batch_tokens / self.best.plan.seconds

    @property
    def per_hour(self) -> float | None:
        """Dollars for an hour of all devices; None without a price."""
        price = None if self.job.prices is None else self.job.prices.get(self.target.chip_name)
        return None if price is None else price * self.target.num_devices

    @property
    def per_million(self) -> float | None:
        """Dollars for a million tokens."""
        return None if self.per_hour is None or not self.tokens_per_s else self.per_hour / 3600 / self.tokens_per_s * 1e6

    @property
    def days(self) -> float | None:
        """Days for all tokens."""
        return None if self.job.tokens is None or not self.tokens_per_s else self.job.tokens / self.tokens_per_s / _SECONDS

    @property
    def cost(self) -> float | None:
        """Dollars for all tokens."""
        return None if self.per_hour is None or self.days is None else self.per_hour * _HOURS * self.days

    @property
    def needed(self) -> int | None:
        """The devices that meet the deadline, in whole hosts."""
        if self.days is None or self.job.days is None:
            return None
        return math.ceil(self.target.num_hosts * self.days / self.job.days) * self.target.per_host

    @property
    def is_in_time(self) -> bool:
        """True without a deadline."""
        return self.days is None or self.job.days is None or self.days <= self.job.days

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return {
            "target": self.target.text,
            "layout": None if self.best is None else self.best.candidate.text,
            "seconds": None if self.best is None else self.best.plan.seconds,
            "tokens_per_s": self.tokens_per_s or None,
            "dollars_per_hour": self.per_hour,
            "days": self.days,
            "dollars": self.cost,
            "dollars_per_million_tokens": self.per_million,
            "devices_needed": self.needed,
            "problem": self.problem or None,
        }


def ranked(offers: Sequence[tuple[Offer, _T]]) -> list[tuple[Offer, _T]]:
    """Offers and what belongs to each, the best first: those in time, by the price of a token if all have one, or else by speed.

    Offers without a layout are last.
    """
    by_price = all(offer.per_hour is not None for offer, _ in offers if offer.best is not None)

    def order(pair: tuple[Offer, _T]) -> tuple[object, ...]:
        offer = pair[0]
        return (offer.best is None, not offer.is_in_time, offer.per_million or 0.0 if by_price else -offer.tokens_per_s)

    return sorted(offers, key=order)


def print_offers(offers: Sequence[Offer]) -> None:
    """A table of ranked offers for one job."""
    console, rows = Console(), [_row(offer) for offer in offers]
    table = Console.table("Machines", list(rows[0]), 2)
    for row in rows:
        table.add_row(*row.values())
    console.print(table)
    if offers[0].job.days is not None:
        console.print("GPUs needed for the deadline: assumes the same speed per GPU. Search again with that number to check")


def _row(offer: Offer) -> dict[str, str]:
    """The cells by their columns."""
    job, best = offer.job, offer.best
    row = {
        "target": offer.target.text,
        "layout": offer.problem if best is None else best.candidate.text,
        "s": "" if best is None else f"{best.plan.seconds:.3g}",
        "tokens/s": f"{offer.tokens_per_s:,.0f}" if best is not None else "",
        "GB": "" if best is None else f"{best.plan.peak_bytes / 1e9:.1f}",
    }
    if job.prices is not None:
        row |= {"$/hour": _number(offer.per_hour), "$/M tokens": _number(offer.per_million, ".3g")}
    if job.tokens is not None:
        row["days"] = _number(offer.days, ",.3g") + ("" if offer.is_in_time else ", too late")
    if job.prices is not None and job.tokens is not None:
        row["$"] = _number(offer.cost)
    if job.days is not None:
        row[f"GPUs for {job.days:g} days"] = _number(offer.needed)
    return row


def _number(value: float | None, form: str = ",.0f") -> str:
    return "" if value is None else format(value, form)


# -- the command line -----------------------------------------------------------------------------------------------------


def is_choice(arguments: argparse.Namespace) -> bool:
    """Whether the command line asks for more than a layout: several targets, money or days."""
    return any(getattr(arguments, name) is not None for name in ("targets", "price", "tokens", "deadline"))


def read_job(arguments: argparse.Namespace, targets: Sequence[Target]) -> Job:
    """The training to be priced on the targets, without the tokens of a step. Raises InputError with every problem."""
    problems: list[str] = []
    tokens, days, prices = None, arguments.deadline, None
    if arguments.tokens is not None:
        with InputError.collect(problems):
            tokens = parse_tokens(arguments.tokens)
    if days is not None and not 0 < days < math.inf:
        problems.append(f"command line: --deadline: must be a number of days above 0, not {days:g}")
    if days is not None and arguments.tokens is None:
        problems.append("command line: --deadline needs --tokens, the tokens that have to be done by then")
    if arguments.price is not None:
        with InputError.collect(problems):
            prices = Target.read_prices(arguments.price, targets)
    if problems:
        raise InputError(problems)
    return Job(tokens=tokens, days=days, prices=prices)


def read_targets(arguments: argparse.Namespace) -> tuple[Target, ...]:
    """The target, or the targets of `h100:8x8,h200:8x8`. Raises InputError with every problem."""
    if arguments.targets is None and arguments.target is None:
        why = "Without a chip there are no times to compare"
        raise InputError([f"command line: --search needs --target h100:8x8, or several: --targets h100:8x8,h200:8x8. {why}"])
    if arguments.targets is None:
        return (Target.parse(arguments.target, arguments.chip, arguments.set),)
    problems = [
        f"command line: --{name} is about one chip. Write --target instead of --targets"
        for name in ("chip", "set")
        if getattr(arguments, name)
    ]
    if arguments.target is not None:
        problems.append("command line: --target and --targets exclude each other. Put all targets into --targets")
    targets: list[Target] = []
    for part in arguments.targets.split(","):
        with InputError.collect(problems):
            targets.append(Target.parse(part.strip()))
    names = [target.text for target in targets]
    problems += [f"command line: --targets: {name} is there twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    if problems:
        raise InputError(problems)
    return tuple(targets)


def parse_tokens(text: str) -> float:
    """A number of tokens: 15T, 300B, 2.5e9. Raises InputError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:[eE][+-]?\d{1,3})?)([KMBT]?)", text.strip())
    value = float(match[1]) * _SUFFIXES[match[2]] if match else math.nan
    if not 0 < value < math.inf:
        raise InputError([f"command line: --tokens: {text} is not a number of tokens, such as 15T, 300B or 2.5e9"])
    return value
