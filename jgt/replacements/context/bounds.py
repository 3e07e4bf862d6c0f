# pyright: basic
"""Which keys a query may see, whatever the operands of the conditions are.

A schedule skips the keys that no query sees, and decides that before any data is known. Random operands cannot show it: image tokens that
see each other look causal until a token has the one number that means an image. So conditions are computed with all values that a mask may
have. What is made of positions alone has one. A comparison that reads an operand may be true and may be false, and what follows from it has
a value for each: `(q >= k) & (document_q == document_k)` may be true only where `q >= k` is, and so may numbers that are added to scores.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jgt.program import jaxpr as jx
from jgt.program.dataflow import ELEMENTWISE
from jgt.program.jaxpr import Atom, Equation
from jgt.replacements.context.pairs import SHAPED, Condition, Labels, Operand, Reader, SeenPairs, elementwise, labels_of, lets_meet

_MASK = np.dtype(bool)
_MOST = 16
"""The values of one variable. With more of them it may be anything."""


class Alternative(NamedTuple):
    """One of the values that a variable may have, and where: bool, with the dims of the value or 1."""

    where: jax.Array
    value: jax.Array


class _OperandError(Exception):
    """A value depends on an operand."""


def possible_pairs(pairs: SeenPairs, queries: jax.Array, keys: jax.Array) -> jax.Array | None:
    """bool[1, queries, keys]: no operand lets a query see another key than these. None if each query may see each key."""
    values = _Values(Reader(pairs.source, queries, keys, _refuse))
    return pairs.all_of([one.holds(values.possible(one)) for one in pairs.conditions], queries, keys)


def _refuse(operand: Operand) -> jax.Array:
    raise _OperandError


@dataclass
class _Values:
    """The values that variables may have. reader: reads what depends on positions alone."""

    reader: Reader
    known: dict[tuple[Atom, Labels], list[Alternative] | None] = field(default_factory=dict)

    def possible(self, condition: Condition) -> jax.Array:
        """The value of a condition that lets all pairs meet that may."""
        found = self.of(condition.atom, condition.labels)
        if found is None:
            return jnp.full([1] * len(condition.labels), not condition.is_not)
        meets = functools.reduce(jnp.logical_or, (one.where & (lets_meet(one.value) != condition.is_not) for one in found))
        return meets != condition.is_not

    def of(self, atom: Atom, labels: Labels) -> list[Alternative] | None:
        """All values of a variable whose dims have these labels; None if it may have any."""
        if not jx.is_var(atom):
            return [Alternative(jnp.array(True), self.reader.value(atom, labels))]
        if (atom, labels) not in self.known:
            self.known[atom, labels] = self._found(atom, labels)
        return self.known[atom, labels]

    def _found(self, atom: Atom, labels: Labels) -> list[Alternative] | None:
        everywhere = jnp.ones([1] * len(labels), bool)
        try:
            return [Alternative(everywhere, self.reader.value(atom, labels))]
        except _OperandError:
            equation = self.reader.source.made.get(cast(jx.Var, atom))
        found = None if equation is None else self._made(equation, labels)
        if jx.dtype_of(atom) is not _MASK:
            return found
        # A mask has two values, however many ways lead to them.
        ways = [(everywhere, everywhere)] if found is None else [(one.where & one.value, one.where & ~one.value) for one in found]
        may_be = (functools.reduce(jnp.logical_or, part) for part in zip(*ways, strict=True))
        return [Alternative(where, jnp.full([1] * len(labels), value)) for where, value in zip(may_be, (True, False), strict=True)]

    def _made(self, equation: Equation, labels: Labels) -> list[Alternative] | None:
        """All values that an equation makes."""
        if equation.primitive.name in SHAPED:
            return self._shaped(equation, labels)
        operands = [self.of(a, labels_of(a, labels)) for a in equation.invars]
        known = [one for one in operands if one is not None]
        if equation.primitive.name not in ELEMENTWISE or len(known) < len(operands) or math.prod(map(len, known)) > _MOST:
            return None
        return [
            Alternative(functools.reduce(jnp.logical_and, (one.where for one in each)), elementwise(equation, [one.value for one in each]))
            for each in itertools.product(*known)
        ]

    def _shaped(self, equation: Equation, labels: Labels) -> list[Alternative] | None:
        part, made = _Part(self), list[Alternative]()
        while len(made) < part.count:
            part.number, halves = len(made), list[jax.Array]()
            for part.half in range(2):
                try:
                    found = SHAPED[equation.primitive.name](cast(Reader, part), equation, labels)
                except _OperandError:
                    return None
                if found is None:
                    return None
                halves.append(found)
            made.append(Alternative(*halves))
        return made


@dataclass
class _Part:
    """A `Reader` of one of several values of a variable: of `where` (half 0), or of the value itself (half 1)."""

    values: _Values
    number: int = 0
    half: int = 0
    count: int = 1

    def value(self, atom: Atom, labels: Labels) -> jax.Array:
        """Where the value is possible, or the value itself."""
        found = self.values.of(atom, labels)
        if found is None:
            raise _OperandError
        self.count = len(found)
        return found[self.number][self.half]
