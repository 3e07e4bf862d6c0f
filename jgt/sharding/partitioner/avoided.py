"""The operations of compiled programs that got another layout or form, because XLA computes theirs wrongly."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextvars import ContextVar
from dataclasses import dataclass

MARK = "avoided_fault"
"""The last part of the names of the added constraints, and so of the collectives that they cause."""


@dataclass(frozen=True, kw_only=True)
class Avoided:
    """An operation that got another layout or another form.

    name: the operation with its scopes, as in the HLO.
    line: the file:line that it comes from.
    before, after: the layouts of its operands and of its result, as PartitionSpecs are written; or what XLA does, and the other form.
    is_layout: whether they are layouts.
    sends: whether devices send something for it.
    """

    name: str
    line: str
    before: str
    after: str
    is_layout: bool = True
    sends: bool = True


collected: ContextVar[list[Avoided] | None] = ContextVar("avoided faults", default=None)
is_off: ContextVar[bool] = ContextVar("faults are not avoided", default=False)


@contextlib.contextmanager
def avoided_faults() -> Generator[list[Avoided]]:
    """Collects the operations that get another layout in the programs that are compiled inside."""
    token = collected.set(avoided := list[Avoided]())
    try:
        yield avoided
    finally:
        collected.reset(token)


@contextlib.contextmanager
def with_faults() -> Generator[None]:
    """Compiles programs inside as XLA would, faults included: for tests, and to see whether XLA still has them."""
    token = is_off.set(True)
    try:
        yield
    finally:
        is_off.reset(token)
