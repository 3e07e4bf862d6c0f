"""Named scopes that jgt adds to programs. `jgt.planner.hlo` reads them back from the op names of a compiled program.

Signals are the scopes that the user chose. A plan or a profile also needs to know what a pipeline did with them: which
operations belong to the pipeline rather than to the model, which run in the backward pass although jgt wrote it out (JAX marks
only what it transposed itself), and how often a branch or a loop body does useful work. These facts have to survive XLA,
and op names are the one place that does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager
from fractions import Fraction

import jax

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

DEVICE_PLAN = "on_devices"
"""The primitive of pieces that run as a program for one device (`jgt.replacements.device_plan`). Programs without any load no such plan."""


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
