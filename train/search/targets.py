"""`jgt plan --search --targets A,B`: which machine to rent. A search on each target, and the offers that follow from them."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Sequence

from jgt.document import InputError, collect
from jgt.hardware.chip import Target, parse_target, read_prices

from .offers import Job, Offer, chip_of, offer_of, print_offers, ranked
from .search import LayoutSearch

_SUFFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_OPTIONS = "targets", "price", "tokens", "deadline"
_OF_ONE = "chip", "set"

Begin = Callable[[Target], LayoutSearch]
"""Makes the search for a target, which has not begun. Raises InputError if there is nothing to search."""


def is_choice(arguments: argparse.Namespace) -> bool:
    """Whether the command line asks for more than a layout: several targets, money or days."""
    return any(getattr(arguments, name) is not None for name in _OPTIONS)


def read_job(arguments: argparse.Namespace, batch_tokens: int) -> tuple[tuple[Target, ...], Job]:
    """The targets and what is to be trained on them. Raises InputError with every problem."""
    problems: list[str] = []
    targets: tuple[Target, ...] = ()
    with collect(problems):
        targets = _read_targets(arguments)
    tokens, days, prices = None, arguments.deadline, None
    if arguments.tokens is not None:
        with collect(problems):
            tokens = parse_tokens(arguments.tokens)
    if days is not None and not 0 < days < math.inf:
        problems.append(f"command line: --deadline: must be a number of days above 0, not {days:g}")
    if days is not None and arguments.tokens is None:
        problems.append("command line: --deadline needs --tokens, the tokens that have to be done by then")
    if arguments.price is not None:
        with collect(problems):
            prices = read_prices(arguments.price, [chip_of(target) for target in targets])
    if problems:
        raise InputError(problems)
    return targets, Job(batch_tokens=batch_tokens, tokens=tokens, days=days, prices=prices)


def _read_targets(arguments: argparse.Namespace) -> tuple[Target, ...]:
    """One target or several. Raises InputError."""
    if arguments.targets is None and arguments.target is None:
        raise InputError(["command line: --search needs a target, such as --target h100:8x8, or several: --targets h100:8x8,h200:8x8"])
    if arguments.targets is None:
        return (read_target(arguments),)
    problems = [
        f"command line: --{name} is about one chip. Write --target instead of --targets" for name in _OF_ONE if vars(arguments)[name]
    ]
    if arguments.target is not None:
        problems.append("command line: --target and --targets exclude each other. Put all targets into --targets")
    if problems:
        raise InputError(problems)
    return parse_targets(arguments.targets)


def read_target(arguments: argparse.Namespace) -> Target:
    """The target of a command line with `--target`. Raises InputError."""
    return parse_target(arguments.target, arguments.chip, arguments.set)


def search_targets(targets: Sequence[Target], job: Job, begin: Begin) -> list[tuple[Offer, LayoutSearch | None]]:
    """Searches on one target after another, until Ctrl-C. Returns the offers, the best first, each with its search."""
    found: list[tuple[Offer, LayoutSearch | None]] = []
    is_interrupted = False
    for target in targets:
        search, problem = None, "not reached"
        if not is_interrupted:
            print(f"{target.text}:", file=sys.stderr, flush=True)
            try:
                search = begin(target)
                search.run()
                is_interrupted, problem = search.is_interrupted, "nothing fits"
            except InputError as error:
                # Another target may have a layout.
                search, problem = None, error.problems[0]
        found.append((offer_of(target, search, problem, job), search))
    best_first = {id(offer): rank for rank, offer in enumerate(ranked([offer for offer, _ in found], job))}
    return sorted(found, key=lambda pair: best_first[id(pair[0])])


def show_offers(offers: Sequence[Offer], job: Job, *, as_json: bool) -> None:
    """Prints the offers."""
    if as_json:
        print(json.dumps({"version": 1, "targets": [offer.to_json() for offer in offers]}, indent=1))
    else:
        print_offers(offers, job)


def parse_targets(text: str) -> tuple[Target, ...]:
    """The targets of `h100:8x8,h200:8x8`. Raises InputError with every problem."""
    problems: list[str] = []
    found: list[Target] = []
    for part in text.split(","):
        with collect(problems):
            found.append(parse_target(part.strip()))
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
