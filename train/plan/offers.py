"""`jgt plan --search --targets A,B`: the best layout on each machine, what a number of tokens costs there, and how long it takes.

A search answers for one target. Here its answers are put side by side. Speed is tokens in a second, and money is dollars for an hour of one
GPU, from a file such as

    h100: 2.5
    h200: 3.1

A deadline asks how many GPUs are needed. That number follows from the speed of one GPU in the layout that was found, as if more GPUs were
as fast each. A larger machine spends more of its time on the network, so the number is a lower limit, to be checked by another search.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jgt.console import Console
from jgt.document import InputError
from jgt.planner import Target

from ..search.search import Try

_HOURS, _SECONDS = 24, 86_400
"""The hours and the seconds of a day."""
_SUFFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_OPTIONS = "targets", "price", "tokens", "deadline"
_OF_ONE = "chip", "set"
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training to be priced.

    batch_tokens: the tokens of a step. tokens: the tokens of the whole run. days: the days until the deadline. prices: the dollars for an
    hour of one device, by chip.
    """

    batch_tokens: int
    tokens: float | None = None
    days: float | None = None
    prices: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A machine for a job. best: its fastest layout; None if none was found, and `problem` says why.

    per_hour: the dollars for an hour of all devices, None without a price. needed: the devices that meet the deadline, in whole hosts.
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
        layout = None if self.best is None else self.best.candidate.text
        found = {"target": self.target.text, "layout": layout, "seconds": None if self.best is None else self.best.plan.seconds}
        found |= {"tokens_per_s": self.tokens_per_s or None, "dollars_per_hour": self.per_hour, "days": self.days, "dollars": self.cost}
        return {**found, "dollars_per_million_tokens": self.per_million, "devices_needed": self.needed, "problem": self.problem or None}


def offer_of(target: Target, best: Try | None, problem: str, job: Job) -> Offer:
    """The offer of a machine for a job. best: the fastest layout there. problem: why there is none."""
    speed = 0.0 if best is None else job.batch_tokens / best.plan.seconds
    price = None if job.prices is None else job.prices.get(target.chip_name)
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


def ranked(offers: Sequence[tuple[Offer, _T]], job: Job) -> list[tuple[Offer, _T]]:
    """Offers and what belongs to each, the best first: those in time, by the price of a token if all have one, or else by speed.

    Offers without a layout are last.
    """
    by_price = all(offer.per_hour is not None for offer, _ in offers if offer.best is not None)

    def order(pair: tuple[Offer, _T]) -> tuple[object, ...]:
        offer = pair[0]
        return (offer.best is None, not offer.meets(job), offer.per_million or 0.0 if by_price else -offer.tokens_per_s)

    return sorted(offers, key=order)


def print_offers(offers: Sequence[Offer], job: Job) -> None:
    """A table of ranked offers."""
    console = Console()
    columns = ["target", "layout", "s", "tokens/s", "GB"]
    columns += ["$/hour", "$/M tokens"] if job.prices is not None else []
    columns += ["days"] if job.tokens is not None else []
    columns += ["$"] if job.prices is not None and job.tokens is not None else []
    columns += [f"GPUs for {job.days:g} days"] if job.days is not None else []
    table = Console.table("Machines", columns, 2)
    for offer in offers:
        table.add_row(*_cells(offer, job))
    console.print(table)
    if job.days is not None:
        console.print("GPUs for the deadline: as if more GPUs were as fast each. Search again with so many to see what they do")


def _cells(offer: Offer, job: Job) -> Iterator[str]:
    yield offer.target.text
    yield offer.problem if offer.best is None else offer.best.candidate.text
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


# -- the command line -----------------------------------------------------------------------------------------------------


def is_choice(arguments: argparse.Namespace) -> bool:
    """Whether the command line asks for more than a layout: several targets, money or days."""
    return any(getattr(arguments, name) is not None for name in _OPTIONS)


def read_job(arguments: argparse.Namespace, batch_tokens: int) -> tuple[tuple[Target, ...], Job]:
    """The targets and what is to be trained on them. Raises InputError with every problem."""
    problems: list[str] = []
    targets: tuple[Target, ...] = ()
    with InputError.collect(problems):
        targets = _read_targets(arguments)
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
    return targets, Job(batch_tokens=batch_tokens, tokens=tokens, days=days, prices=prices)


def _read_targets(arguments: argparse.Namespace) -> tuple[Target, ...]:
    """One target or several. Raises InputError."""
    if arguments.targets is None and arguments.target is None:
        raise InputError(["command line: --search needs a target, such as --target h100:8x8, or several: --targets h100:8x8,h200:8x8"])
    if arguments.targets is None:
        return (Target.parse(arguments.target, arguments.chip, arguments.set),)
    problems = [
        f"command line: --{name} is about one chip. Write --target instead of --targets" for name in _OF_ONE if vars(arguments)[name]
    ]
    if arguments.target is not None:
        problems.append("command line: --target and --targets exclude each other. Put all targets into --targets")
    if problems:
        raise InputError(problems)
    return parse_targets(arguments.targets)


def parse_targets(text: str) -> tuple[Target, ...]:
    """The targets of `h100:8x8,h200:8x8`. Raises InputError with every problem."""
    problems: list[str] = []
    found: list[Target] = []
    for part in text.split(","):
        with InputError.collect(problems):
            found.append(Target.parse(part.strip()))
    names = [target.text for target in found]
    problems += [f"command line: --targets: {name} is there twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    if problems:
        raise InputError(problems)
    return tuple(found)


def parse_tokens(text: str) -> float:
    """A number of tokens: 15T, 300B, 2.5e9. Raises InputError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:[eE][+-]?\d{1,3})?)([KMBT]?)", text.strip())
    value = float(match[1]) * _SUFFIXES[match[2]] if match else math.nan
    if not 0 < value < math.inf:
        raise InputError([f"command line: --tokens: {text} is not a number of tokens, such as 15T, 300B or 2.5e9"])
    return value
