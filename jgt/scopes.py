"""Scopes that jgt itself puts into programs, and how they read in a compiled program's names.

Signals are the user's; these tell what a pipeline made of them: what belongs to the pipeline alone, what runs backward
although nothing transposed it, and how much of a loop's work counts.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager
from fractions import Fraction

import jax

from jgt.signal import PREFIX

PIPELINE = "jgt.pipeline"
BACKWARD = "jgt.backward"
RECOMPUTE = "jgt.recompute"
_TAKEN = re.compile(r"jgt\.taken\.(\d+)of(\d+)")
_USEFUL = re.compile(r"jgt\.useful\.(\d+)of(\d+)")


def signals(path: Iterable[str]) -> AbstractContextManager[None]:
    """The region that these signals name, outermost first."""
    return _nested(PREFIX + name for name in path)


def pipeline() -> AbstractContextManager[None]:
    """What a pipeline does besides the model's own work."""
    return _nested([PIPELINE])


def backward() -> AbstractContextManager[None]:
    """Part of a backward pass that is written out."""
    return _nested([BACKWARD])


def recompute() -> AbstractContextManager[None]:
    """Part of a forward pass that runs again, written out."""
    return _nested([RECOMPUTE])


def taken(share: Fraction) -> AbstractContextManager[None]:
    """A branch that this share of the visits takes."""
    return _nested([f"jgt.taken.{share.numerator}of{share.denominator}"])


def useful(share: Fraction) -> AbstractContextManager[None]:
    """Work that always runs, of which this share is not thrown away."""
    return _nested([f"jgt.useful.{share.numerator}of{share.denominator}"])


def taken_share(name: str) -> Fraction:
    """How often the branches in a name are taken, all of them together."""
    return _product(_TAKEN, name)


def useful_share(name: str) -> Fraction:
    """The share of the work under a name that is not thrown away."""
    return _product(_USEFUL, name)


def branch_share(names: Iterable[str]) -> Fraction:
    """How often a branch is taken, from the names of what is in it; 1 where they say nothing."""
    return next((taken_share(name) for name in names if _TAKEN.search(name)), Fraction(1))


def _product(pattern: re.Pattern[str], name: str) -> Fraction:
    share = Fraction(1)
    for part, whole in pattern.findall(name):
        share *= Fraction(int(part), int(whole))
    return share


@contextlib.contextmanager
def _nested(names: Iterable[str]):
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(jax.named_scope(name))
        yield
