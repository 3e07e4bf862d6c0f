"""`jgt conformance`: searches JAX for programs that it computes wrongly over devices, and runs the same through `jgt.shard`."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence

from jgt.command.console import Console
from jgt.command.parser import CommandParser
from jgt.conformance.campaign import Counts, versions
from jgt.conformance.classes import WrongClass
from jgt.conformance.search import Search, run_through_jgt
from jgt.document import InputError

_LEAST = 0.1
"""The fewest minutes in which a program is drawn."""
_SEARCHING = 0.6
"""The share of the time for the search. The rest is for the same programs through `jgt.shard`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0: searched, whatever was found. 2: the input is wrong."""
    made = parser()
    return made.answer(argv, lambda arguments: _conformance(_minutes(arguments.minutes), arguments.seed, is_json=arguments.json))


def parser() -> CommandParser:
    """The command line of a search."""
    made = CommandParser(
        "jgt conformance", "Searches the installed JAX for programs that it computes wrongly when they are split over devices."
    )
    made.add_argument("--minutes", default="5", metavar="N", help="the wall time of the search; default: 5")
    made.add_argument("--seed", type=int, default=0, metavar="S", help="another seed draws other programs; default: 0")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not _LEAST <= minutes < math.inf:
        wanted = f"must be a number of minutes, {_LEAST} or more"
        raise InputError([f"command line: --minutes: {wanted}, not {text!r}. Nothing is drawn in less. Leave the flag out for 5 minutes"])
    return minutes


def _conformance(minutes: float, seed: int, *, is_json: bool) -> None:
    began = time.monotonic()
    search = Search(seed)
    search.run(
        _until(began + 60 * minutes * _SEARCHING, lambda: f"{_drawn(search)['programs']:,} programs, {_drawn(search)['wrong']} wrong")
    )
    classes = [known for known in search.classes if known.is_confirmed]
    examples = [[known.program.to_json()] for known in classes]
    counts, outcomes = run_through_jgt([*examples, *search.drawn], _until(began + 60 * minutes, lambda: "the same through jgt.shard"))
    for known, outcome in zip(classes, outcomes, strict=False):
        known.through_jgt = outcome
    if is_json:
        print(json.dumps(_report(search, classes, counts), indent=1))
    else:
        _show(search, classes, counts, (time.monotonic() - began) / 60)


def _until(end: float, told: Callable[[], str]) -> Callable[[], bool]:
    """Whether this moment is past. On a terminal, a line says what was done."""

    def is_over() -> bool:
        left = end - time.monotonic()
        if sys.stderr.isatty():
            print(f"\r\x1b[K{told()}" if left > 0 else "\r\x1b[K", end="", file=sys.stderr, flush=True)
        return left <= 0

    return is_over


def _drawn(search: Search) -> Counts:
    return Counts(search.counts["chain"] + search.counts["single"])


def _report(search: Search, classes: Sequence[WrongClass], counts: Counts) -> dict[str, object]:
    drawn = _drawn(search)
    return {
        **versions(),
        **{name: drawn[name] for name in ("programs", "right", "wrong", "refused")},
        "classes": [known.to_json() for known in classes],
        "through_jgt": {name: counts[name] for name in ("programs", "right", "wrong", "refused", "crashed", "changed")},
        "crashes": dict(search.crashes),
    }


def _show(search: Search, classes: Sequence[WrongClass], counts: Counts, minutes: float) -> None:
    console, drawn = Console(), _drawn(search)
    console.print(
        f"Searched jax {versions()['jax']} for {minutes:.1f} min: {drawn['programs']:,} programs, each in a layout, "
        f"{drawn['wrong']} wrong, {drawn['refused']} refused, {drawn['crashed']} of which XLA's compiler died"
    )
    for known in classes:
        error = "" if known.special else f", off by up to {known.error:.2g} of the largest number"
        console.print(f"\n{known.name}: {known.count} programs{error}. Through jgt.shard: {known.through_jgt or 'not run'}\n")
        console.print("\n".join(f"    {line}" for line in known.example.splitlines()), soft_wrap=True)
    console.print(
        f"\nThrough jgt.shard: {counts['programs']:,} of these programs, {counts['wrong']} wrong, {counts['refused']} refused, "
        f"{counts['crashed']} of which XLA's compiler died; {counts['changed']:,} operations got another layout"
    )


if __name__ == "__main__":
    sys.exit(main())
