"""Named scopes that jgt adds to programs, and how to read them back from the op names of a compiled program.

Signals are the scopes that the user chose. A plan or a profile also needs to know what a pipeline did with them: which
operations belong to the pipeline rather than to the model, which run in the backward pass although jgt wrote it out (JAX marks
only what it transposed itself), and how often a branch or a loop body does useful work. These facts have to survive XLA,
and op names are the one place that does.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from fractions import Fraction
from typing import TypeVar

import jax

_T = TypeVar("_T")

PREFIX = "sig."
"""Marks signals among other named scopes, such as Flax's, in name stacks and in the compiled program."""

MICROBATCH = "jgt.microbatch"
"""The scope of values that are meant of one microbatch (`jgt.signal.per_microbatch`)."""

OWN = "jgt."
"""Begins the names of the scopes that jgt adds. They have no prefix of signals, so no rule can match them."""
RULE = "jgt.rule"
"""The scope of what rules ask for: constraints, and the computation of parameters where they belong."""
PIPELINE = "jgt.pipeline"
BACKWARD = "jgt.backward"
RECOMPUTE = "jgt.recompute"
ON_DEVICES = "jgt.on_devices"
REPLICAS = "jgt.replicas"
_REPLICAS = re.compile(r"jgt\.replicas\.([\w+-]+)(?:\.(\d+))?")
_TAKEN = re.compile(r"jgt\.taken\.(\d+)of(\d+)")
_TRIPS = re.compile(r"jgt\.(?:trips\.(\d+)|more_rounds(?:\.(\d+))?)")
_USEFUL = re.compile(r"jgt\.useful\.(\d+)of(\d+)")


@contextlib.contextmanager
def signals(path: Iterable[str]) -> Generator[None]:
    """The region that these signals name, outermost first."""
    with contextlib.ExitStack() as stack:
        for name in path:
            stack.enter_context(jax.named_scope(PREFIX + name))
        yield


def rule() -> AbstractContextManager[object]:
    """The scope of what rules ask for. A program with it is checked for what XLA computes wrongly."""
    return jax.named_scope(RULE)


def listed_once(scopes: Sequence[_T], begins: Collection[int], around: Sequence[_T] = ()) -> list[_T]:
    """The scopes of an operation of a backward pass without those that JAX lists a second time around a recomputed region.

    begins: the indices where JAX begins a list, with `jvp`, as in transpose(jvp(a))/b/jvp(a)/b; around: the scopes of the program.
    """
    once, end = list(around), 0
    for index, scope in enumerate(scopes):
        if index in begins:
            lengths = range(min(len(once), len(scopes) - index), 0, -1)
            end = index + next((n for n in lengths if once[-n:] == list(scopes[index : index + n])), 0)
        if index >= end:
            once.append(scope)
    return once[len(around) :]


def pipeline() -> AbstractContextManager[object]:
    """Work that a pipeline does in addition to the model's own."""
    return jax.named_scope(PIPELINE)


def backward() -> AbstractContextManager[object]:
    """A piece of a backward pass that jgt writes out instead of leaving it to JAX's transposition."""
    return jax.named_scope(BACKWARD)


def recompute() -> AbstractContextManager[object]:
    """A piece of a forward pass that jgt runs a second time."""
    return jax.named_scope(RECOMPUTE)


def on_devices() -> AbstractContextManager[object]:
    """A program for one device that takes the place of a piece of the model."""
    return jax.named_scope(ON_DEVICES)


def over_replicas(axes: Iterable[str], numbers: int | None = None) -> AbstractContextManager[object]:
    """Sends between replicas along mesh axes. numbers: the count of numbers on each device in a sum that the partitioner adds up."""
    return jax.named_scope(".".join([REPLICAS, "+".join(axes), *([] if numbers is None else [str(numbers)])]))


def replicas_of(name: str) -> tuple[tuple[str, ...], int | None] | None:
    """The axes and the numbers of the innermost `over_replicas` in a name; None without one."""
    innermost = next(reversed(list(_REPLICAS.finditer(name))), None)
    return None if innermost is None else (tuple(innermost[1].split("+")), None if innermost[2] is None else int(innermost[2]))


def branch_taken(share: Fraction) -> AbstractContextManager[object]:
    """A branch of a cond that runs in this share of the cond's executions."""
    # `3of4` and not `3/4`: a slash separates scopes in an op name.
    return jax.named_scope(f"jgt.taken.{share.numerator}of{share.denominator}")


def trips(count: int) -> AbstractContextManager[object]:
    """A loop whose number of trips only the run knows, and which is expected to make this many."""
    return jax.named_scope(f"jgt.trips.{count}")


def useful(share: Fraction) -> AbstractContextManager[object]:
    """Work that always runs, but whose result is used in this share of the cases only."""
    return jax.named_scope(useful_name(share))


def useful_name(share: Fraction) -> str:
    """The scope of `useful`."""
    return f"jgt.useful.{share.numerator}of{share.denominator}"


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
