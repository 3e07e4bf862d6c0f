"""The walk through a program that finds the extent of every value, by comparing the program with itself at another batch size.

The two traces are walked in step: each equation with its twin. A problem does not stop the walk. It becomes part of the value's extent and
of everything computed from it, because only a problem that reaches a result of the function matters.

A loop may change the extent of what it carries: a sum that starts at 0 grows with the batch after the first iteration. So its body is
walked until the carry's extents no longer change, which takes a few turns at most, because extents only ever become less special.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

from jgt.pipeline.batch.derivatives import backward_program, cotangent_extent, is_gradient_extent
from jgt.pipeline.batch.extent import INDEPENDENT, Extent, merged_extent, result_extent
from jgt.pipeline.batch.growth import AlignmentError, Feed, Growth, batch_sizes
from jgt.pipeline.batch.primitives import result_rows, runs_programs
from jgt.pipeline.batch.rows import MixingError, Rows, differs_in_shape
from jgt.program import jaxpr as jx
from jgt.program.equations import has_custom_derivative, is_scan, outer_operands, passes_on, scan_sizes, subprograms
from jgt.program.jaxpr import Atom, Equation, Program, Var
from jgt.program.parts import Flat
from jgt.program.places import Place, place_of, source_of


def growth_of(whole: Flat, larger: Flat, *, ratio: float, num_params: int, trusted: tuple[str, ...] = ()) -> Growth:
    """The growth of every value of a function of parameters and inputs with the batch.

    whole, larger: the function traced at one batch size and at `ratio` times as many rows. The first `num_params` arguments are
    parameters. The others are inputs; those whose shape differs between the traces have the batch in dim 0. trusted: see `Growth`.

    Nothing is refused here: a value that is neither a sum nor a mean over the batch has an extent with a problem, and it is
    for the caller to decide whether that value matters. Raises AlignmentError if the traces do not have the same equations.
    """
    growth = Growth(num_rows=batch_sizes(whole, larger) or (1, round(ratio)), trusted=trusted)
    for var, twin in list(zip(whole.invars, larger.invars, strict=True))[num_params:]:
        growth.extents[var] = Extent(Rows(0) if differs_in_shape(var, twin) else None)
    growth.add_constants(whole.consts, larger.consts)
    _Walk(growth).follow(whole.eqns, larger.eqns, Place())
    return growth


class _Walk:
    """The state of a walk: the extents so far, the source line of the current equation, and whether this is a derivative."""

    def __init__(self, growth: Growth):
        self._growth = growth
        self._source = ""
        self._is_derivative = False

    def follow(self, eqns: Sequence[Equation], twins: Sequence[Equation], around: Place) -> None:
        """Adds the extents of the results of `eqns`, which are at `around`. Raises AlignmentError if `twins` are other equations."""
        # Compared before any is followed: a rule may rely on its equation's twin.
        for equation, twin in itertools.zip_longest(eqns, twins):
            kind, twin_kind = _kind(equation), _kind(twin)
            if kind != twin_kind:
                where = source_of(equation or twin) or self._source
                raise AlignmentError(f"{where}: {kind} at one batch size is {twin_kind} at another")
        for equation, twin in zip(eqns, twins, strict=True):
            outer = self._source
            # An equation that JAX adds has no line; the line of the region around it is the best there is.
            self._source = source_of(equation) or outer
            self._add_results(equation, twin, place_of(equation, around))
            self._source = outer

    def _add_results(self, equation: Equation, twin: Equation, place: Place) -> None:
        growth = self._growth
        num_feeds = len(growth.feeds)
        is_trusted = growth.trusts(place)
        operands = [growth.of(a, b) for a, b in zip(equation.invars, twin.invars, strict=True)]
        # A literal that is not a power of the batch size is fine here: the microbatch has its own.
        if is_trusted:
            operands = [INDEPENDENT if e.problem and not jx.is_var(a) else e for a, e in zip(equation.invars, operands, strict=True)]
        try:
            results = self._results(equation, twin, operands, place)
        except MixingError as error:
            results = _refused(equation, twin, self._located(error))
        # A problem from before the trusted signal remains one.
        if is_trusted and not any(e.problem for e in operands):
            del growth.feeds[num_feeds:]
            results = [_trusted_extent(e, a, b) for e, a, b in zip(results, equation.outvars, twin.outvars, strict=True)]
        for var, extent in zip(equation.outvars, results, strict=True):
            if not jx.is_dropped(var):
                growth.extents[var] = extent

    def _results(self, equation: Equation, twin: Equation, operands: Sequence[Extent], place: Place) -> list[Extent]:
        """The extents of an equation's results. Raises MixingError."""
        if runs_programs(equation):
            return self._region(equation, twin, operands, place)
        return list(operands) if passes_on(equation) else self._simple(equation, twin, operands)

    def _simple(self, equation: Equation, twin: Equation, operands: Sequence[Extent]) -> list[Extent]:
        """The extents of the results of an equation without programs. Raises MixingError."""
        if any(e.rows for e in operands) or any(map(differs_in_shape, equation.outvars, twin.outvars)):
            operands = self._without_feeds(equation, operands)
        problem = next((e.problem for e in operands if e.problem), "")
        if problem:
            return _refused(equation, twin, problem)
        results: list[Extent] = []
        for index, rows in enumerate(result_rows(equation, twin, [e.rows for e in operands], self._growth.num_rows)):
            try:
                results.append(result_extent(equation, operands, rows))
            except MixingError as error:
                results.append(_refused(equation, twin, self._located(error))[index])
        return results

    def _without_feeds(self, equation: Equation, operands: Sequence[Extent]) -> list[Extent]:
        """The operands of an equation over rows. A number of the whole batch among them is noted, then treated as a constant."""
        rest: list[Extent] = []
        for atom, extent in zip(equation.invars, operands, strict=True):
            is_fed = extent.of_batch and extent.rows is None
            if is_fed:
                self._add_feed(atom, equation)
            rest.append(INDEPENDENT if is_fed else extent)
        return rest

    def _add_feed(self, atom: Atom, equation: Equation) -> None:
        # A literal can be fed too: the index of a branch that depends on the batch size. No equation computes it, so it is
        # treated like any other value that cannot be known in advance.
        self._growth.feeds.append(Feed(cast(Var, atom), equation, self._source))

    def _located(self, error: MixingError) -> str:
        return f"{self._source}: {error}" if self._source else str(error)

    def _region(self, equation: Equation, twin: Equation, operands: Sequence[Extent], place: Place) -> list[Extent]:
        """The extents of the results of an equation that runs programs. Raises MixingError."""
        condition = equation.params.get("cond_jaxpr")
        if is_scan(equation) and equation.params["length"] != twin.params["length"]:
            raise MixingError("it is a loop over the rows of the batch, or over groups of them")
        if "branches" in equation.params and (operands[0].of_batch or operands[0].problem):
            # The branch must be the one that the whole batch takes.
            self._add_feed(equation.invars[0], equation)
        results: list[Extent] | None = None
        for program, twin_program in zip(subprograms(equation), subprograms(twin), strict=True):
            if program is condition:
                continue
            outputs = self._through(equation, twin, program, twin_program, place)
            results = outputs if results is None else list(map(merged_extent, results, outputs))
        if results is None:
            raise MixingError(f"{equation.primitive.name} is not known to keep the rows of a batch apart")
        if has_custom_derivative(equation) and not self._is_derivative and not any(e.problem for e in results):
            self._check_derivative(equation, twin, operands, results, place)
        return results

    def _through(self, equation: Equation, twin: Equation, program: Program, twin_program: Program, place: Place) -> list[Extent]:
        """The extents of an equation's results, from the outputs of a program inside it."""
        inner = jx.body(program)
        if len(inner.outvars) != len(equation.outvars):
            raise MixingError(f"{equation.primitive.name} is not known to keep the rows of a batch apart")
        # A loop's arguments are constants, then what it carries, then what a scan goes over. Other programs have constants only.
        outer = outer_operands(equation, program)
        arguments = self._arguments(outer, outer_operands(twin, twin_program))
        num_carry, num_scanned = _loop_sizes(equation, program)
        end = len(arguments) - num_scanned
        start = end - num_carry
        constants, carry, scanned = arguments[:start], arguments[start:end], [_rows_shifted(e, -1) for e in arguments[end:]]
        num_feeds = len(self._growth.feeds)
        while True:
            outputs = self._outputs(program, twin_program, [*constants, *carry, *scanned], place)
            merged = list(map(merged_extent, carry, outputs[:num_carry]))
            if merged == carry:
                break
            carry = merged
            # The feeds of this turn are found again in the next one.
            del self._growth.feeds[num_feeds:]
        if "cond_jaxpr" in equation.params:
            self._check_condition(equation, twin, carry, place)
        # A constant of the region is a variable outside too, where the caller can find out what computes it.
        outside = dict(zip(inner.invars[:start], outer[:start], strict=True))
        self._growth.feeds[num_feeds:] = _moved_outside(self._growth.feeds[num_feeds:], outside, equation)
        stacked = 1 if is_scan(equation) else 0
        return [*outputs[:num_carry], *(_rows_shifted(e, stacked) for e in outputs[num_carry:])]

    def _arguments(self, atoms: Sequence[Atom | None], twins: Sequence[Atom | None]) -> list[Extent]:
        """The extents of the operands that enter a program."""
        pairs = [(a, b) for a, b in zip(atoms, twins, strict=True) if a is not None and b is not None]
        if len(pairs) < len(atoms):
            raise MixingError("jgt cannot tell which values enter a region of the program")
        return [self._growth.of(a, b) for a, b in pairs]

    def _outputs(self, program: Program, twin: Program, arguments: Sequence[Extent], place: Place) -> list[Extent]:
        """The extents of a program's outputs, from the extents of its arguments."""
        inner, twin_inner = jx.body(program), jx.body(twin)
        self._growth.add_constants(jx.constants(program), jx.constants(twin))
        self._growth.extents.update(zip(inner.invars, arguments, strict=True))
        self.follow(inner.eqns, twin_inner.eqns, place)
        return list(map(self._growth.of, inner.outvars, twin_inner.outvars))

    def _check_condition(self, equation: Equation, twin: Equation, carry: Sequence[Extent], place: Place) -> None:
        """Raises MixingError if the condition of a while loop reads the batch."""
        program: Program = equation.params["cond_jaxpr"]
        twin_program: Program = twin.params["cond_jaxpr"]
        num_constants = len(jx.body(program).invars) - len(carry)
        atoms, twins = outer_operands(equation, program), outer_operands(twin, twin_program)
        constants = self._arguments(atoms[:num_constants], twins[:num_constants])
        num_feeds = len(self._growth.feeds)
        (end,) = self._outputs(program, twin_program, [*constants, *carry], place)
        if end.of_batch or end.degree or end.problem or len(self._growth.feeds) > num_feeds:
            raise MixingError(
                "the batch decides when a loop ends, and a microbatch may decide otherwise. "
                "Run it for each row (jax.vmap) or a fixed number of times"
            )

    def _check_derivative(
        self, equation: Equation, twin: Equation, operands: Sequence[Extent], results: Sequence[Extent], place: Place
    ) -> None:
        """Raises MixingError if a custom derivative does not have the gradients of a function that can be split."""
        program, twin_program = backward_program(equation), backward_program(twin)
        inner = jx.body(program)
        by_var = {a: e for a, e in zip(equation.invars, operands, strict=True) if jx.is_var(a)}
        # The backward pass takes the operands first, then the cotangents.
        arguments = dict(zip(by_var, inner.invars, strict=False))
        used = [e for v, e in zip(equation.outvars, results, strict=True) if jx.is_real(v) and not jx.is_dropped(v)]
        num_feeds = len(self._growth.feeds)
        # The backward pass calls the function itself again, whose derivative is not to be followed a second time.
        self._is_derivative = True
        gradients = self._outputs(program, twin_program, [*by_var.values(), *map(cotangent_extent, used)], place)
        self._is_derivative = False
        fed = {feed.var for feed in self._growth.feeds[num_feeds:]}
        del self._growth.feeds[num_feeds:]
        # A number that the derivative itself computes from the batch, such as the mean of the cotangent over the rows.
        if fed - set(arguments.values()):
            raise MixingError("its own derivative uses something of the whole batch for each row of it")
        reals = [(e, arguments[var]) for var, e in by_var.items() if jx.is_real(var)]
        for (operand, var), gradient in zip(reals, gradients, strict=True):
            # A statistic of the batch: the forward pass has noted it as a feed already.
            if var in fed:
                continue
            if gradient.problem:
                raise MixingError(f"in its own derivative: {gradient.problem}")
            if not gradient.zero and not is_gradient_extent(gradient, operand):
                raise MixingError("its own derivative is not a sum over rows")


def _kind(equation: Equation | None) -> str:
    """The features that two equations must share to be the same at two batch sizes."""
    if equation is None:
        return "nothing"
    num_branches = len(list(subprograms(equation)))
    return f"{equation.primitive.name} ({len(equation.invars)} operands, {len(equation.outvars)} results, {num_branches} programs)"


def _refused(equation: Equation, twin: Equation, problem: str) -> list[Extent]:
    """Results with a problem. They have rows if they grow with the batch, so that what follows is still recognised as such."""
    pairs = zip(equation.outvars, twin.outvars, strict=True)
    return [Extent(Rows(0, 0) if differs_in_shape(a, b) else None, of_batch=True, problem=problem) for a, b in pairs]


def _trusted_extent(extent: Extent, var: Var, twin: Var) -> Extent:
    """The extent of a value under a trusted signal: any problem is forgiven, and what is not a plain sum is averaged."""
    if not differs_in_shape(var, twin):
        is_plain = not extent.problem and extent.exact and extent.degree in (0, 1)
        return extent if is_plain else Extent(of_batch=True)
    if not extent.problem:
        return extent
    # The problem may be that no rule knows where the rows are. The dim that grows is the best guess, and the user has vouched for it.
    a, b = jx.shape_of(var), jx.shape_of(twin)
    return Extent(Rows(next(d for d in range(len(a)) if d >= len(b) or a[d] != b[d])))


def _loop_sizes(equation: Equation, program: Program) -> tuple[int, int]:
    """The number of operands that a loop carries, and the number that a scan goes over; (0, 0) for an equation that is not a loop."""
    if is_scan(equation):
        num_constants, num_carry = scan_sizes(equation)
        return num_carry, len(jx.body(program).invars) - num_constants - num_carry
    return (len(jx.body(program).outvars) if "body_jaxpr" in equation.params else 0), 0


def _rows_shifted(extent: Extent, by: int) -> Extent:
    """The extent after a leading dim was added (1) or removed (-1), as a scan does with what it stacks and slices."""
    return replace(extent, rows=extent.rows.at(extent.rows.dim + by)) if extent.rows else extent


def _moved_outside(feeds: Sequence[Feed], outside: Mapping[Var, Atom | None], equation: Equation) -> Iterator[Feed]:
    """Feeds found inside of a region, expressed by the variables around it where these are constants of the region."""
    for feed in feeds:
        var = outside.get(feed.var)
        yield feed if var is None or not jx.is_var(var) else replace(feed, var=var, equation=equation)
