"""What the program of the whole batch says: what its microbatches have to bring out, and what they must know before.

Both are numbers without rows. What the results need and only the pipeline can compute is its frontier; sums of inputs that
rows are multiplied with are statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jgt import jaxpr as jx
from jgt.jaxpr import Place, Program, Var
from jgt.parts import Flat, Part, marks
from jgt.pipeline.extent import Extent
from jgt.pipeline.growth import Growth
from jgt.pipeline.layer_scan import SplitError
from jgt.pipeline.rows import Rows, shape_of

PARAMS, DATA, LAYERS = 1, 2, 4
"""What a value depends on, as bits."""


def argument_marks(flat: Flat, num_params: int) -> dict[Var, int]:
    """The bits of a program's arguments."""
    return dict.fromkeys(flat.invars[:num_params], PARAMS) | dict.fromkeys(flat.invars[num_params:], DATA)


class Whole:
    """A program of parameters and inputs, its layer scan the equation number `layers`, and how its values grow."""

    def __init__(self, flat: Flat, growth: Growth, layers: int, num_params: int):
        self.flat, self.growth = flat, growth
        self.maker = {var: index for index, e in enumerate(flat.eqns) for var in e.outvars}
        """The equation that makes each variable."""
        self._scan = flat.eqns[layers]
        self._marks = marks(flat, argument_marks(flat, num_params), {layers: LAYERS})

    def frontier(self) -> tuple[Var, ...]:
        """The values without rows that the results need and that only the pipeline can compute, in the whole program."""
        found: dict[Var, None] = {}
        pending = [a for a in self.flat.outvars if jx.is_var(a)]
        seen = set(pending)
        for index, atom in enumerate(self.flat.outvars):
            if self.growth.of(atom).rows:
                raise SplitError(
                    f"result {index} of the function has a row for each sequence of the batch. A pipelined function returns sums and means over the batch"
                )
        while pending:
            var = pending.pop()
            bits = self._marks.get(var, 0)
            if not (bits & PARAMS and bits & (DATA | LAYERS)):
                continue
            equation = self.flat.eqns[self.maker[var]]
            extent = self.growth.of(var)
            leaves = equation is self._scan or any(self.growth.of(a).rows for a in equation.invars)
            if leaves:
                self._check(var, extent)
                found[var] = None
                continue
            for atom in equation.invars:
                if jx.is_var(atom) and atom not in seen:
                    seen.add(atom)
                    pending.append(atom)
        if not any(self._marks[v] & LAYERS for v in found):
            raise SplitError("no result of the function depends on its layers")
        return tuple(sorted(found, key=lambda var: self.maker[var]))

    def _check(self, var: Var, extent: Extent) -> None:
        problem = extent.problem
        if not problem and extent.degree not in (0, 1):
            problem = f"it grows like the batch to the power of {extent.degree}"
        if not problem and not extent.exact:
            problem = "it is a product, quotient or function of sums over the batch, taken inside of a region or of the layers"
        if problem:
            where = jx.source_of(self.flat.eqns[self.maker[var]])
            place = f" at {where}" if where and not problem.startswith(where) else ""
            raise SplitError(
                f"a result depends on a value{place} that its microbatches cannot be added up to: {problem}. "
                "If it is meant of one microbatch, name its signal under pipeline.per_microbatch"
            )

    def statistics(self, frontier: Sequence[Var]) -> tuple[Var, ...]:
        """What must be known of the whole batch before its microbatches run: sums of inputs that rows are multiplied with."""
        reached = self._reached(frontier)
        found: dict[Var, None] = {}
        for feed in self.growth.feeds:
            if not any(var in reached for var in feed.equation.outvars):
                continue
            if feed.var not in self.maker or self._marks.get(feed.var, 0) & (PARAMS | LAYERS):
                raise SplitError(
                    f"{feed.source}: a value that is computed from the whole batch and the parameters is used for each row of it again (batch statistics), or chooses what to do with it. "
                    "A microbatch does not have the whole batch; if it is meant of one microbatch, name its signal under pipeline.per_microbatch"
                )
            found[feed.var] = None
        return tuple(found)

    def check_draws(self, frontier: Sequence[Var], keys: Sequence[int]) -> None:
        """Random numbers with rows must come from an argument, or each microbatch would draw the same."""
        reached = self._reached(frontier)
        from_keys = marks(self.flat, {self.flat.invars[index]: 1 for index in keys})
        for equation in self.flat.eqns:
            if not any(v in reached and not from_keys.get(v, 0) for v in equation.outvars):
                continue
            if any(self.growth.of(var).rows for var in jx.draws(equation)):
                raise SplitError(
                    f"{jx.source_of(equation)}: random numbers with a row for each sequence are drawn from a key that is no argument of the function: "
                    "every microbatch would draw the same. Pass the key as an argument, besides the parameters"
                )

    def check_parts(self, *parts: Part) -> None:
        """Nothing that is drawn by rows may be needed of the whole batch: microbatches draw their own."""
        for part in parts:
            for equation in jx.body(part.program).eqns:
                if any(self.growth.of(var).rows for var in jx.draws(equation)):
                    raise SplitError(
                        f"{jx.source_of(equation)}: a sum of random numbers over the whole batch is needed besides what the microbatches draw, "
                        "which differs. Draw them outside and pass them as an input"
                    )

    def _reached(self, outputs: Sequence[Var]) -> set[Var]:
        needed = set(outputs)
        for equation in reversed(self.flat.eqns):
            if any(v in needed for v in equation.outvars):
                needed.update(a for a in equation.invars if jx.is_var(a))
                for program in jx.subprograms(equation):
                    needed.update(_all_variables(program))
        return needed


def growth_of(full: Flat, twin: Flat, ratio: float, num_params: int, trusted: tuple[str, ...]) -> Growth:
    """How the values of `full` grow with the batch; `twin` has `ratio` times its rows. Raises SplitError."""
    inputs = list(zip(full.invars, twin.invars, strict=True))[num_params:]
    rows = num_rows(full, twin) or (1, round(ratio))
    growth = Growth(rows, trusted)
    for var, other in inputs:
        growth.extents[var] = Extent(Rows(0) if shape_of(var) != shape_of(other) else None)
    try:
        growth.closed_over(full.consts, twin.consts)
        growth.follow(full.eqns, twin.eqns, Place())
    except ValueError as error:
        raise SplitError(f"the program is another one at another batch size: {error}. Write it so that only its shapes depend on the batch") from None
    return growth


def num_rows(full: Flat, other: Flat) -> tuple[int, int] | None:
    """The rows of the batch of two programs, as far as they have inputs with rows."""
    sizes = ((shape_of(a), shape_of(b)) for a, b in zip(full.invars, other.invars, strict=True))
    return next(((a[0], b[0]) for a, b in sizes if a != b), None)


def _all_variables(program: Program) -> Iterator[Var]:
    for equation in jx.body(program).eqns:
        yield from equation.outvars
        for inner in jx.subprograms(equation):
            yield from _all_variables(inner)
