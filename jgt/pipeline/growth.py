"""The extents of all values of a program, found by comparing it with the same program at another batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jgt import jaxpr as jx
from jgt.jaxpr import Equation, Place, Program, Var
from jgt.pipeline.extent import SAME, Extent, either, extent_of, of_constant
from jgt.pipeline.primitives import places, runs_programs
from jgt.pipeline.rows import MixingError, Rows, shape_of


@dataclass(frozen=True)
class Feed:
    """A value without rows, computed from rows, that meets rows again (or decides over them): a statistic of the whole batch."""

    var: Any
    equation: Equation
    source: str


@dataclass
class Growth:
    """The extents of a program's values, and what is fed back into rows.

    num_rows: of the batch, at the two sizes. trusted: signals under which everything is taken as it is for the rows at hand:
    nothing is refused there, plain sums are sums and all else are means.
    """

    num_rows: tuple[int, int]
    trusted: tuple[str, ...] = ()
    extents: dict[Var, Extent] = field(default_factory=dict)
    feeds: list[Feed] = field(default_factory=list)
    _source: str = ""
    _is_derivative: bool = False

    def of(self, atom: Any) -> Extent:
        """The extent of a variable or literal."""
        return self.extents.get(atom, SAME) if jx.is_var(atom) else of_constant(atom.val, atom.val, self.num_rows)

    def trusts(self, place: Place) -> bool:
        """Whether everything at a place is taken as it is."""
        return any(place.inside(tuple(signal.split("/"))) for signal in self.trusted)

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
        """Adds the extents of arrays that two programs close over. Raises ValueError where they are not the same program."""
        if len(constants) != len(other):
            raise ValueError(f"it holds {len(constants)} arrays at one batch size and {len(other)} at another")
        for (var, value), twin in zip(constants.items(), other.values(), strict=True):
            self.extents[var] = of_constant(value, twin, self.num_rows)

    def _equation(self, equation: Equation, twin: Equation, place: Place) -> None:
        num_feeds = len(self.feeds)
        is_trusted = self.trusts(place)
        given = [self._operand(a, b) for a, b in zip(equation.invars, twin.invars, strict=True)]
        if is_trusted:
            given = [SAME if e.problem and not jx.is_var(a) else e for a, e in zip(equation.invars, given, strict=True)]
        found = self._nested(equation, twin, given, place) if runs_programs(equation) else self._results(equation, twin, given)
        if is_trusted and not any(e.problem for e in given):
            del self.feeds[num_feeds:]
            found = [_taken(e, a, b) for e, a, b in zip(found, equation.outvars, twin.outvars, strict=True)]
        for var, extent in zip(equation.outvars, found, strict=True):
            if not jx.is_dropped(var):
                self.extents[var] = extent

    def _operand(self, atom: Any, twin: Any) -> Extent:
        if jx.is_var(atom) or jx.is_var(twin):
            return self.of(atom)
        return of_constant(atom.val, twin.val, self.num_rows)

    def _results(self, equation: Equation, twin: Equation, given: Sequence[Extent]) -> list[Extent]:
        if any(e.rows for e in given) or any(_grows(a, b) for a, b in zip(equation.outvars, twin.outvars, strict=True)):
            given = self._without_feeds(equation, given)
        problem = next((e.problem for e in given if e.problem), "")
        if problem:
            return self._refused(equation, twin, problem)
        try:
            rows = places(equation, twin, [e.rows for e in given], self.num_rows)
        except MixingError as why:
            return self._refused(equation, twin, self._located(why))
        found = []
        for index, one in enumerate(rows):
            try:
                found.append(extent_of(equation, given, one))
            except MixingError as why:
                found.append(self._refused(equation, twin, self._located(why))[index])
        return found

    def _without_feeds(self, equation: Equation, given: Sequence[Extent]) -> list[Extent]:
        kept = []
        for atom, extent in zip(equation.invars, given, strict=True):
            is_fed = extent.of_batch and extent.rows is None
            if is_fed:
                self.feeds.append(Feed(atom, equation, self._source))
            kept.append(SAME if is_fed else extent)
        return kept

    def _located(self, why: MixingError) -> str:
        return f"{self._source}: {why}" if self._source else str(why)

    @staticmethod
    def _refused(equation: Equation, twin: Equation, problem: str) -> list[Extent]:
        pairs = zip(equation.outvars, twin.outvars, strict=True)
        return [Extent(Rows(0, 0) if _grows(a, b) else None, of_batch=True, problem=problem) for a, b in pairs]

    def _nested(self, equation: Equation, twin: Equation, given: Sequence[Extent], place: Place) -> list[Extent]:
        """The extents of the results of an equation that runs programs."""
        pairs = list(zip(jx.subprograms(equation), jx.subprograms(twin), strict=True))
        condition = equation.params.get("cond_jaxpr")
        try:
            if jx.is_scan(equation) and equation.params["length"] != twin.params["length"]:
                raise MixingError("it is a loop over the rows of the batch, or over groups of them")
            if "branches" in equation.params and (given[0].of_batch or given[0].problem):
                # Which branch runs has to be known of the whole batch.
                self.feeds.append(Feed(equation.invars[0], equation, self._source))
            found: list[Extent] | None = None
            for a, b in pairs:
                if a is condition:
                    continue
                outs = self._through(equation, twin, a, b, place)
                found = outs if found is None else [either(x, y) for x, y in zip(found, outs, strict=True)]
            if found is None:
                raise MixingError(f"{equation.primitive.name} is not known to keep the rows of a batch apart")
            if jx.has_own_derivative(equation) and not self._is_derivative and not any(e.problem for e in found):
                self._backward(equation, twin, given, found, place)
        except MixingError as why:
            return self._refused(equation, twin, self._located(why))
        return found

    def _through(self, equation: Equation, twin: Equation, program: Program, other_program: Program, place: Place) -> list[Extent]:
        inner, other = jx.body(program), jx.body(other_program)
        if len(inner.outvars) != len(equation.outvars):
            raise MixingError(f"{equation.primitive.name} is not known to keep the rows of a batch apart")
        outer = jx.operands(equation, program)
        entering = [self._entering(a, b) for a, b in zip(outer, jx.operands(twin, other_program), strict=True)]
        num_carry, num_scanned = _loop_sizes(equation, program)
        first = len(entering) - num_scanned - num_carry
        entering[first + num_carry :] = [_unstacked(e) for e in entering[first + num_carry :]] if num_scanned else []
        self._constants(program, other_program)
        num_feeds = len(self.feeds)
        while True:
            self.extents.update(zip(inner.invars, entering, strict=True))
            self.follow(inner.eqns, other.eqns, place)
            leaving = [self._operand(a, b) for a, b in zip(inner.outvars, other.outvars, strict=True)]
            again = [*entering[:first], *map(either, entering[first : first + num_carry], leaving), *entering[first + num_carry :]]
            if again == entering:
                break
            entering = again
            del self.feeds[num_feeds:]
        if "cond_jaxpr" in equation.params:
            self._refuse_an_end_by_batch(equation, twin, entering[first:], place)
        # What enters unchanged is known outside as well.
        behind = dict(zip(inner.invars[:first], outer[:first], strict=True))
        fed = self.feeds[num_feeds:]
        self.feeds[num_feeds:] = [replace(f, var=behind[f.var], equation=equation) if f.var in behind else f for f in fed]
        return [*leaving[:num_carry], *map(_stacked, leaving[num_carry:])] if jx.is_scan(equation) else leaving

    def _entering(self, atom: Any, twin: Any) -> Extent:
        if atom is None or twin is None:
            raise MixingError("what enters a region of the program cannot be told")
        return self._operand(atom, twin)

    def _constants(self, program: Program, other: Program) -> None:
        self.closed_over(jx.constants(program), jx.constants(other))

    def _refuse_an_end_by_batch(self, equation: Equation, twin: Equation, carry: Sequence[Extent], place: Place) -> None:
        """Raises MixingError if the condition of a while loop reads the batch."""
        program, other_program = equation.params["cond_jaxpr"], twin.params["cond_jaxpr"]
        inner, other = jx.body(program), jx.body(other_program)
        constants = len(inner.invars) - len(carry)
        outer = zip(jx.operands(equation, program)[:constants], jx.operands(twin, other_program)[:constants], strict=True)
        self.extents.update(zip(inner.invars, [*(self._entering(a, b) for a, b in outer), *carry], strict=True))
        self._constants(program, other_program)
        num_feeds = len(self.feeds)
        self.follow(inner.eqns, other.eqns, place)
        (end,) = (self._operand(a, b) for a, b in zip(inner.outvars, other.outvars, strict=True))
        if end.of_batch or end.degree or end.problem or len(self.feeds) > num_feeds:
            raise MixingError("a loop ends when the batch says so, and a microbatch may say otherwise. Run it for each row (jax.vmap) or a fixed number of times")

    def _backward(self, equation: Equation, twin: Equation, given: Sequence[Extent], found: Sequence[Extent], place: Place) -> None:
        """Raises MixingError if a derivative of its own has no meaning for a part of the batch."""
        programs = [jx.backward_of(e) for e in (equation, twin)]
        inner, other = map(jx.body, programs)
        operands = {a: e for a, e in zip(equation.invars, given, strict=True) if jx.is_var(a)}
        inputs = dict(zip(operands, inner.invars, strict=False))
        used = [e for a, e in zip(equation.outvars, found, strict=True) if jx.is_float(a) and not jx.is_dropped(a)]
        self.extents.update(zip(inner.invars, [*operands.values(), *map(_cotangent, used)], strict=True))
        self._constants(*programs)
        num_feeds = len(self.feeds)
        self._is_derivative = True  # The function itself stands in it again.
        self.follow(inner.eqns, other.eqns, place)
        self._is_derivative = False
        fed = {feed.var for feed in self.feeds[num_feeds:]}
        del self.feeds[num_feeds:]
        if fed - set(inputs.values()):
            raise MixingError("its own derivative uses something of the whole batch for each row of it")
        floats = [(e, inputs[var]) for var, e in operands.items() if jx.is_float(var)]
        for (e, var), a, b in zip(floats, inner.outvars, other.outvars, strict=True):
            gradient = self._operand(a, b)
            if var in fed:  # a statistic, as in the function itself
                continue
            if gradient.problem:
                raise MixingError(f"in its own derivative: {gradient.problem}")
            if not gradient.zero and not _fits(gradient, e):
                raise MixingError("its own derivative is not a sum over rows")


def _cotangent(result: Extent) -> Extent:
    """The loss is a sum over the microbatches: so is the derivative by a number; that by a mean shrinks with the part it is of."""
    if result.rows:
        return Extent(Rows(result.rows.dim, result.rows.copies), -result.degree)
    return Extent(None, 1 - result.degree, not result.of_batch)


def _fits(gradient: Extent, operand: Extent) -> bool:
    if gradient.rows and operand.rows:
        is_there = gradient.rows.dim == operand.rows.dim and gradient.rows.copies in (0, operand.rows.copies or gradient.rows.copies)
        return is_there and gradient.degree == -operand.degree
    return gradient.rows is operand.rows and gradient.exact and gradient.degree == 1 - operand.degree


def _taken(extent: Extent, var: Any, twin: Any) -> Extent:
    """What a value is that is taken as it is for the rows at hand."""
    if not _grows(var, twin):
        is_plain = not extent.problem and extent.exact and extent.degree in (0, 1)
        return extent if is_plain else Extent(of_batch=True)
    if not extent.problem:
        return extent
    a, b = shape_of(var), shape_of(twin)
    return Extent(Rows(next(d for d in range(len(a)) if d >= len(b) or a[d] != b[d])))


def _grows(var: Any, twin: Any) -> bool:
    return shape_of(var) != shape_of(twin)


def _loop_sizes(equation: Equation, program: Program) -> tuple[int, int]:
    """How many operands a loop carries, and how many it goes over; 0 for what is no loop."""
    if jx.is_scan(equation):
        num_constants, num_carry = jx.scan_sizes(equation)
        return num_carry, len(jx.body(program).invars) - num_constants - num_carry
    return (len(jx.body(program).outvars) if "body_jaxpr" in equation.params else 0), 0


def _unstacked(extent: Extent) -> Extent:
    return replace(extent, rows=extent.rows.at(extent.rows.dim - 1)) if extent.rows else extent


def _stacked(extent: Extent) -> Extent:
    return replace(extent, rows=extent.rows.at(extent.rows.dim + 1)) if extent.rows else extent
