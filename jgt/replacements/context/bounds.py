# pyright: basic
"""Which keys a query may see, whatever the operands of the conditions are.

A schedule skips the keys that no query sees, and decides that before any data is known. Random operands cannot show it: image tokens that
see each other look causal until a token has the one number that means an image. So conditions are computed with bounds in the place of
numbers. What is made of positions alone is known. A comparison that reads an operand may be true and may be false, and and, or, not and
select combine what is known with what is not: `(q >= k) & (document_q == document_k)` is at most `q >= k`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jgt.program import jaxpr as jx
from jgt.program.jaxpr import Atom, Equation
from jgt.replacements.context.pairs import SHAPED, Labels, Operand, Reader, SeenPairs, labels_of, lets_meet

_MASK = np.dtype(bool)


class Bounds(NamedTuple):
    """A lower and an upper bound of a value that says whether pairs meet, as bool arrays whose dims are those of the value, or 1."""

    least: jax.Array
    most: jax.Array


class _OperandError(Exception):
    """A value depends on an operand."""


def possible_pairs(pairs: SeenPairs, queries: jax.Array, keys: jax.Array) -> jax.Array | None:
    """bool[1, queries, keys]: no operand lets a query see another key than these. None if each query may see each key."""
    bounder = _Bounder(Reader(pairs.source, queries, keys, _refuse))
    bounds = [bounder.of(one.atom, one.labels) for one in pairs.conditions]
    found = [one.holds(least if one.is_not else most) for one, (least, most) in zip(pairs.conditions, bounds, strict=True)]
    return pairs.all_of(found, queries, keys)


def _refuse(operand: Operand) -> jax.Array:
    raise _OperandError


@dataclass
class _Bounder:
    """The bounds of masks, and of numbers that are added to scores. reader: of what depends on positions alone."""

    reader: Reader

    def of(self, atom: Atom, labels: Labels) -> Bounds:
        """The bounds of a variable whose dims have these labels."""
        try:
            known = lets_meet(self.reader.value(atom, labels))
            return Bounds(known, known)
        except _OperandError:
            equation = self.reader.source.made.get(atom) if jx.is_var(atom) else None
            made = None if equation is None else self._made(equation, labels)
            return made or Bounds(*(jnp.full([1] * len(labels), value) for value in (False, True)))

    def _made(self, equation: Equation, labels: Labels) -> Bounds | None:
        """The bounds of what an equation makes; None where it may be anything."""
        name, inputs = equation.primitive.name, equation.invars
        are_masks = all(jx.dtype_of(a) is _MASK for a in inputs)
        if name in SHAPED:
            least, most = (SHAPED[name](cast(Reader, _Half(self, number)), equation, labels) for number in range(2))
            return None if least is None or most is None else Bounds(least, most)
        if name == "select_n" and len(inputs) == 3 and jx.dtype_of(inputs[0]) is _MASK:
            which, no, yes = self._all(equation, labels)
            least = (which.least & yes.least) | (~which.most & no.least) | (yes.least & no.least)
            return Bounds(least, (which.most & yes.most) | (~which.least & no.most))
        if name == "and" and are_masks:
            one, other = self._all(equation, labels)
            return Bounds(one.least & other.least, one.most & other.most)
        if name == "or" and are_masks:
            one, other = self._all(equation, labels)
            return Bounds(one.least | other.least, one.most | other.most)
        if name == "not" and are_masks:
            (one,) = self._all(equation, labels)
            return Bounds(~one.most, ~one.least)
        if name == "convert_element_type" and jx.is_real(inputs[0]) and jx.is_real(equation.outvars[0]):
            return self.of(inputs[0], labels)
        return None

    def _all(self, equation: Equation, labels: Labels) -> list[Bounds]:
        return [self.of(a, labels_of(a, labels)) for a in equation.invars]


@dataclass
class _Half:
    """Reads the least or the most of values, as a `Reader` does that only gives them another shape."""

    bounder: _Bounder
    number: int

    def value(self, atom: Atom, labels: Labels) -> jax.Array:
        """One of the two bounds."""
        return self.bounder.of(atom, labels)[self.number]
