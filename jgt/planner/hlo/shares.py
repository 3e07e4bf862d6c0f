"""The scopes in op names that say how often work runs and how much of it is useful (`jgt.program.scopes`)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from fractions import Fraction

_REPLICAS = re.compile(r"jgt\.replicas\.([\w+-]+)(?:\.(\d+))?")
_TAKEN = re.compile(r"jgt\.taken\.(\d+)of(\d+)")
_TRIPS = re.compile(r"jgt\.(?:trips\.(\d+)|more_rounds(?:\.(\d+))?)")
_USEFUL = re.compile(r"jgt\.useful\.(\d+)of(\d+)")


def expected_trips(loop: str, further_rounds: int = 0) -> int | None:
    """The number of trips to expect of a loop, from the scopes in its name; None if none of them says.

    further_rounds: the trips to expect of a loop that runs the rounds of an exchange of experts after the first. Rows that
    are evenly spread need none.
    """
    scope = _own_scope(_TRIPS, loop)
    if scope is None:
        return None
    return further_rounds if scope[1] is None else int(scope[1])


def possible_rounds(loop: str) -> int | None:
    """If a loop runs the further rounds of an exchange (`jgt.replacements.experts`), how many there can be, 0 if that is unknown."""
    scope = _own_scope(_TRIPS, loop)
    return int(scope[2] or 0) if scope and scope[1] is None else None


def _own_scope(pattern: re.Pattern[str], loop: str) -> re.Match[str] | None:
    """The innermost scope of a loop itself. Those around an outer loop are in its name too, before that loop's body."""
    return next(reversed(list(pattern.finditer(loop.rpartition("while/body")[2]))), None)


def taken_share(name: str) -> Fraction:
    """The share of cases in which an operation runs, by the `branch_taken` scopes in its name; nested ones multiply."""
    return _product(_TAKEN, name)


def useful_share(name: str) -> Fraction:
    """The share of cases in which the result of an operation is used, by the `useful` scopes in its name."""
    return _product(_USEFUL, name)


def branch_share(conditional: str, names: Iterable[str]) -> Fraction | None:
    """The share of cases in which a branch is taken, by the names of its conditional and of the operations in it; None if none says.

    The scopes of branches around the conditional are in both names. They say how often the conditional runs, not how it chooses.
    """
    around = len(_TAKEN.findall(conditional))
    # XLA adds operations without a name, so any operation with one has to do.
    shares = next((shares for name in names if len(shares := _TAKEN.findall(name)) > around), None)
    return None if shares is None else math.prod((Fraction(int(taken), int(of)) for taken, of in shares[around:]), start=Fraction(1))


def _product(pattern: re.Pattern[str], name: str) -> Fraction:
    return math.prod((Fraction(int(taken), int(of)) for taken, of in pattern.findall(name)), start=Fraction(1))


def replicas_of(name: str) -> tuple[tuple[str, ...], int | None] | None:
    """The axes and the numbers of the innermost `over_replicas` in a name; None without one."""
    innermost = next(reversed(list(_REPLICAS.finditer(name))), None)
    return None if innermost is None else (tuple(innermost[1].split("+")), None if innermost[2] is None else int(innermost[2]))
