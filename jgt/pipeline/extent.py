"""How the values of a program grow with its batch, found by comparing the program at two batch sizes.

A value either has rows (a dim that grows with the batch) or does not; and it has a degree: 0 if twice the batch leaves it
alike (a mean), 1 if it doubles it (a sum). A pipeline may add up what has degree 1 over its microbatches and average what
has degree 0; anything else that depends on the whole batch has no meaning for a part of it. Nor has what mixes rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jgt import jaxpr as jx
from jgt.jaxpr import Equation, Place, Program, Var
from jgt.pipeline.rows import growing, mixing

_LINEAR = frozenset(
    ["neg", "convert_element_type", "reshape", "broadcast_in_dim", "transpose", "squeeze", "expand_dims", "reduce_sum", "copy", "copy_p", "slice", "dynamic_slice", "gather", "concatenate", "rev", "cumsum", "reduce_precision", "name", "sharding_constraint", "stop_gradient", "mul", "div", "add", "sub", "add_any", "dot_general", "real"]
)
"""Primitives that multiply their result by n when they multiply their operands by n; mul, div and dot_general add degrees."""


@dataclass(frozen=True)
class Extent:
    """What a value is of the batch.

    of_batch: it was computed from rows. exact: summing (or averaging) the values of parts of the batch gives that of the
    whole, not merely something alike. zero: it is 0. problem: why it is neither a sum nor a mean.
    """

    rows: bool = False
    degree: int = 0
    of_batch: bool = False
    exact: bool = True
    zero: bool = False
    problem: str = ""


SAME = Extent()


@dataclass(frozen=True)
class Feed:
    """A value without rows, computed from rows, that meets rows again: a statistic of the whole batch."""

    var: Any
    equation: Equation
    source: str


@dataclass
class Growth:
    """The extents of a program's values, and what is fed back into rows.

    trusted: signals under which everything is taken as it is for the rows at hand: sums as sums, all else as means.
    """

    ratio: float
    trusted: tuple[str, ...] = ()
    extents: dict[Var, Extent] = field(default_factory=dict)
    feeds: list[Feed] = field(default_factory=list)
    _source: str = ""

    def of(self, atom: Any) -> Extent:
        """The extent of a variable or literal."""
        if jx.is_var(atom):
            return self.extents.get(atom, SAME)
        return Extent(zero=_is_zero(atom.val))

    def follow(self, eqns: Sequence[Equation], other: Sequence[Equation], around: Place) -> None:
        """Adds the extents of the results of `eqns`, which stand at `around`; `other` are the same at another batch size.

        Raises ValueError where the two are not the same program.
        """
        if len(eqns) != len(other):
            raise ValueError(f"it has {len(eqns)} steps at one batch size and {len(other)} at another")
        for equation, twin in zip(eqns, other, strict=True):
            if equation.primitive.name != twin.primitive.name:
                raise ValueError(f"{jx.source_of(equation)}: {equation.primitive.name} at one batch size is {twin.primitive.name} at another")
            outer = self._source
            self._source = jx.source_of(equation) or outer
            self._equation(equation, twin, jx.place_of(equation, around))
            self._source = outer

    def closed_over(self, constants: Mapping[Var, Any], other: Mapping[Var, Any]) -> None:
        """Adds the extents of arrays that two programs close over."""
        for (var, value), twin in zip(constants.items(), other.values(), strict=True):
            if value.shape != twin.shape:
                is_uniform = bool((np.asarray(value) == np.asarray(value).flat[0]).all())
                problem = "" if is_uniform else "a constant array with a row for each sequence of the batch"
                self.extents[var] = Extent(rows=True, problem=problem)

    def _equation(self, equation: Equation, twin: Equation, place: Place) -> None:
        given = [self._operand(a, b) for a, b in zip(equation.invars, twin.invars, strict=True)]
        inner = self._inner(equation, twin, given, place)
        is_trusted = any(place.inside(tuple(signal.split("/"))) for signal in self.trusted)
        for index, (var, other) in enumerate(zip(equation.outvars, twin.outvars, strict=True)):
            if jx.is_dropped(var):
                continue
            rows = bool(growing(var, other))
            if inner is not None:
                found = replace(inner[index], rows=rows or inner[index].rows)
            elif is_trusted:
                found = self._trusted(given, rows)
            else:
                found = self._result(equation, given, rows)
                mixed = mixing(equation, twin) if rows and not found.problem else None
                found = found if mixed is None else self._mixed(mixed, rows=True)
            self.extents[var] = found

    @staticmethod
    def _trusted(given: Sequence[Extent], rows: bool) -> Extent:
        return Extent(rows=rows, of_batch=any(e.of_batch or e.rows for e in given))

    def _operand(self, atom: Any, twin: Any) -> Extent:
        if jx.is_var(atom) or jx.is_var(twin):
            return self.of(atom)
        return self._constant(atom.val, twin.val)

    def _constant(self, value: Any, other: Any) -> Extent:
        """The extent of a number that a program holds: a count of rows differs between the two sizes."""
        if getattr(value, "shape", ()) != () or getattr(other, "shape", ()) != ():
            return SAME
        a, b = float(value), float(other)
        if a == b or not (math.isfinite(a) and math.isfinite(b)):
            return Extent(zero=a == 0)
        degree = math.log(b / a) / math.log(self.ratio) if a * b > 0 else math.nan
        if not math.isclose(degree, round(degree) if math.isfinite(degree) else 0, abs_tol=1e-3):
            return Extent(problem=f"the number {a:g} becomes {b:g} at another batch size")
        return Extent(degree=round(degree))

    def _result(self, equation: Equation, given: Sequence[Extent], rows: bool) -> Extent:
        name = equation.primitive.name
        if rows or any(e.rows for e in given):
            given = self._without_feeds(equation, given)
        problem = next((e.problem for e in given if e.problem), "")
        if problem:
            return Extent(rows=rows, of_batch=True, problem=problem)
        if all(e == SAME or e.zero for e in given):
            return Extent(rows=rows, of_batch=False, zero=bool(given) and given[0].zero and name in _LINEAR)
        if rows or not any(e.rows for e in given):
            return self._alike(equation, given, rows)
        return self._reduced(equation, given)

    def _without_feeds(self, equation: Equation, given: Sequence[Extent]) -> list[Extent]:
        kept = []
        for atom, extent in zip(equation.invars, given, strict=True):
            fed = extent.of_batch and not extent.rows
            if fed:
                self.feeds.append(Feed(atom, equation, self._source))
            kept.append(SAME if fed else extent)
        return kept

    def _alike(self, equation: Equation, given: Sequence[Extent], rows: bool) -> Extent:
        """Rows from rows, or numbers from numbers."""
        name = equation.primitive.name
        of_batch = any(e.of_batch for e in given)
        exact = all(e.exact for e in given)
        if name in ("mul", "dot_general"):
            num_of_batch = sum(e.of_batch and not e.rows for e in given)
            return Extent(rows, sum(e.degree for e in given), of_batch, exact and num_of_batch <= 1)
        if name == "div":
            over, under = given
            return Extent(rows, over.degree - under.degree, of_batch, exact and (rows or not under.of_batch), zero=over.zero)
        values = given[1:] if name == "select_n" else given
        degrees = {e.degree for e in values if not e.zero}
        if len(degrees) > 1:
            return self._mixed("it adds or compares what grows with the batch and what does not", rows)
        (degree,) = degrees or {0}
        is_linear = name in _LINEAR or name == "select_n"
        if degree and not is_linear:
            return self._mixed(f"{name} is not linear, but is taken of a sum over the batch", rows)
        return Extent(rows, degree, of_batch, exact and (is_linear or rows))

    def _reduced(self, equation: Equation, given: Sequence[Extent]) -> Extent:
        """A number from rows."""
        name = equation.primitive.name
        if name in ("reduce_sum", "dot_general"):
            return Extent(False, 1 + sum(e.degree for e in given), True)
        if name in ("scatter-add", "scatter_add") and given[0].zero:
            return Extent(False, 1 + given[-1].degree, True)
        return self._mixed(f"{name} over the batch is neither a sum nor a mean", rows=False)

    def _mixed(self, why: str, rows: bool) -> Extent:
        return Extent(rows, 0, True, problem=f"{self._source}: {why}" if self._source else why)

    def _inner(self, equation: Equation, twin: Equation, given: Sequence[Extent], place: Place) -> list[Extent] | None:
        """The extents of the results of an equation that holds programs; None for any other."""
        pairs = list(zip(jx.subprograms(equation), jx.subprograms(twin), strict=True))
        condition = equation.params.get("cond_jaxpr")
        fitting = [(a, b) for a, b in pairs if a is not condition and len(jx.body(a).outvars) == len(equation.outvars)]
        if not fitting:
            return None
        if jx.is_scan(equation) and equation.params["length"] != twin.params["length"]:
            return [self._mixed("it is a loop over the rows of the batch", rows=False) for _ in equation.outvars]
        by_var = {a: e for a, e in zip(equation.invars, given, strict=True) if jx.is_var(a)}
        loops = jx.is_scan(equation) or "body_jaxpr" in equation.params
        found: list[Extent] | None = None
        for a, b in fitting:
            outs = self._through(equation, a, b, by_var, place, loops)
            found = outs if found is None else [_joined(x, y) for x, y in zip(found, outs, strict=True)]
        return found

    def _through(
        self, equation: Equation, program: Program, twin: Program, by_var: Mapping[Var, Extent], place: Place, loops: bool
    ) -> list[Extent]:
        inner, other = jx.body(program), jx.body(twin)
        outer = jx.operands(equation, program)
        self.closed_over(jx.constants(program), jx.constants(twin))
        entering = [SAME if o is None else by_var[o] if jx.is_var(o) else self.of(o) for o in outer]
        while True:
            self.extents.update(zip(inner.invars, entering, strict=True))
            num_feeds = len(self.feeds)
            self.follow(inner.eqns, other.eqns, place)
            leaving = [self._operand(a, b) for a, b in zip(inner.outvars, other.outvars, strict=True)]
            if not loops:
                return leaving
            first = len(entering) - _num_scanned(equation, program) - _num_carry(equation, program)
            again = list(entering)
            for index in range(_num_carry(equation, program)):
                again[first + index] = _joined(entering[first + index], leaving[index])
            if again == entering:
                return leaving
            entering = again
            del self.feeds[num_feeds:]


def _num_carry(equation: Equation, program: Program) -> int:
    return jx.scan_sizes(equation)[1] if jx.is_scan(equation) else len(jx.body(program).outvars)


def _num_scanned(equation: Equation, program: Program) -> int:
    if not jx.is_scan(equation):
        return 0
    return len(jx.body(program).invars) - sum(jx.scan_sizes(equation))


def _joined(a: Extent, b: Extent) -> Extent:
    """What a value is that may be either."""
    if a.problem or b.problem:
        return a if a.problem else b
    if a.zero or b.zero:
        other = b if a.zero else a
        return replace(other, rows=a.rows or b.rows, zero=a.zero and b.zero)
    if a.degree != b.degree:
        return Extent(a.rows, 0, True, problem="a loop carries what grows with the batch next to what does not")
    return Extent(a.rows or b.rows, a.degree, a.of_batch or b.of_batch, a.exact and b.exact)


def _is_zero(value: Any) -> bool:
    return getattr(value, "shape", ()) == () and not isinstance(value, bool) and float(value) == 0
