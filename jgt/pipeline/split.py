"""A loss cut in parts around its layer scan: what runs once, for each microbatch before, in and after the layers, and at the end.

Two traces of the function take part. The `whole` program has the full batch: it says what is a sum over the batch, and
its beginning and end run outside of the pipeline. The `micro` program has the rows of one microbatch on one data shard:
its embedding, layers and head run inside, tick by tick.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jgt import jaxpr as jx
from jgt.jaxpr import Equation, Place, Program, Var
from jgt.parts import Flat, Part, cut, flatten, marks
from jgt.pipeline.align import AlignmentError, alignment
from jgt.pipeline.extent import Extent
from jgt.pipeline.growth import Growth
from jgt.pipeline.rows import Rows, shape_of

PARAMS, DATA, LAYERS = 1, 2, 4


class SplitError(Exception):
    """The program has no place for a pipeline; the message says why, without file and line."""


@dataclass(frozen=True, kw_only=True)
class Total:
    """One number that the microbatches bring out of the pipeline: their sum, or their mean."""

    var: Var
    is_mean: bool


@dataclass(frozen=True, kw_only=True)
class Split:
    """The parts, wired by variables of the micro program; `before` and `after` are of the whole program.

    shared: parameters → `weights` (scanned over by the layers) and `common` (used elsewhere in the pipeline; those that every
    layer reads are `in_layers`).
    before: inputs of the whole batch → `statistics`. embed: → `travel`, what goes from chunk to chunk besides `ys`.
    local: what layers read of inputs alone. head: travel, ys → `totals`. after: totals → the function's results.
    """

    scan: Equation
    place: Place
    num_layers: int
    arguments: tuple[Var, ...]
    full_arguments: tuple[Var, ...]
    inputs: tuple[Var, ...]
    shared: Part
    weights: tuple[Var, ...]
    common: tuple[Var, ...]
    in_layers: tuple[Var, ...]
    before: Part
    statistics: tuple[Var, ...]
    embed: Part
    travel: tuple[Any, ...]
    ys: tuple[Var, ...]
    local: Part
    head: Part
    totals: tuple[Total, ...]
    after: Part
    after_totals: tuple[Var, ...]
    num_extras: int
    """How many of the travelling values the layers only pass on; they stand at the end."""
    like: Mapping[Var, int]
    """For a weight or common value that is a parameter, or one cast or scaled, the parameter's index."""


def split(
    micro: Program, whole: Program, larger: Program, *, ratio: float, signal: str, num_params: int, keys: Sequence[int] = (), trusted: tuple[str, ...] = ()
) -> Split:
    """Cuts a function of parameters and inputs; `larger` is traced at `ratio` times the rows of `whole`.

    keys: the arguments that are random keys, of which each part of the batch gets its own. trusted: signals under which values of one microbatch stand for those of the batch. Raises SplitError.
    """
    flat, full, twin = (flatten(program, _dissolves(signal)) for program in (micro, whole, larger))
    layers = _layer_scan(flat, signal)
    growth = _growth(full, twin, ratio, num_params, trusted)
    align = _alignment(full, flat, growth)
    return _Splitter(flat, full, growth, align, layers, num_params).split(keys)


def _dissolves(signal: str) -> Any:
    def dissolve(equation: Equation) -> bool:
        # A checkpoint around the layers would recompute the whole pipeline: the pipeline has its own.
        return jx.is_call(equation) or (jx.is_remat(equation) and any(_scans(p, signal, equation) for p in jx.subprograms(equation)))

    return dissolve


def _scans(program: Program, signal: str, within: Equation) -> bool:
    around = jx.place_of(within, Place())
    for equation in jx.body(program).eqns:
        if jx.is_scan(equation) and jx.place_of(equation, around).path == signal:
            return True
        if any(_scans(p, signal, equation) for p in jx.subprograms(equation) if jx.is_call(equation)):
            return True
    return False


def _layer_scan(flat: Flat, signal: str) -> int:
    """The index of the scan under a signal."""
    scans = [(i, jx.place_of(e, Place()).path) for i, e in enumerate(flat.eqns) if jx.is_scan(e)]
    found = [i for i, path in scans if path == signal]
    if len(found) == 1:
        if flat.eqns[found[0]].params["reverse"]:
            raise SplitError(f"the layer scan under {signal!r} goes in reverse. Scan the layers forward")
        return found[0]
    if len(found) > 1:
        raise SplitError(f"the signal {signal!r} holds {len(found)} scans, but a pipeline runs one. Give each scan a signal of its own")
    seen = sorted({jx.place_of(e, Place()).path for e in flat.eqns} - {""})
    if any(path == signal or path.startswith(f"{signal}/") for path in seen):
        raise SplitError(
            f"the signal {signal!r} holds no layer scan. Stack the layers' parameters and run them with jax.lax.scan, nnx.scan or nn.scan "
            "directly under this signal"
        )
    others = ", ".join(repr(path) for _, path in scans) or "none"
    raise SplitError(f"no signal of the program is {signal!r}. Layer scans stand under: {others}")


def _growth(full: Flat, twin: Flat, ratio: float, num_params: int, trusted: tuple[str, ...]) -> Growth:
    inputs = list(zip(full.invars, twin.invars, strict=True))[num_params:]
    rows = _num_rows(full, twin) or (1, round(ratio))
    growth = Growth(rows, trusted)
    for var, other in inputs:
        growth.extents[var] = Extent(Rows(0) if shape_of(var) != shape_of(other) else None)
    try:
        growth.closed_over(full.consts, twin.consts)
        growth.follow(full.eqns, twin.eqns, Place())
    except ValueError as error:
        raise SplitError(f"the program is another one at another batch size: {error}. Write it so that only its shapes depend on the batch") from None
    return growth


def _num_rows(full: Flat, other: Flat) -> tuple[int, int] | None:
    """The rows of the batch of two programs, as far as they have inputs with rows."""
    sizes = ((shape_of(a), shape_of(b)) for a, b in zip(full.invars, other.invars, strict=True))
    return next(((a[0], b[0]) for a, b in sizes if a != b), None)


def _alignment(full: Flat, micro: Flat, growth: Growth) -> Mapping[int, int]:
    """The micro program's equation for each of the whole one's. A microbatch of one row may leave some out."""
    try:
        return alignment(full.eqns, micro.eqns, _num_rows(full, micro) or (1, 1), growth)
    except AlignmentError as error:
        raise SplitError(
            f"{error}. Write it so that only its shapes depend on the batch, or use fewer microbatches, so that each has more than one row on each device"
        ) from None


class _Splitter:
    def __init__(self, flat: Flat, full: Flat, growth: Growth, align: Mapping[int, int], layers: int, num_params: int):
        self.flat, self.full, self.growth, self.align = flat, full, growth, align
        self.scan = flat.eqns[layers]
        self.params, self.inputs = flat.invars[:num_params], flat.invars[num_params:]
        self.full_params, self.full_inputs = full.invars[:num_params], full.invars[num_params:]
        self.marks = marks(flat, self._argument_marks(self.params, self.inputs), {layers: LAYERS})
        full_layers = next(i for i, j in align.items() if j == layers)
        self.full_scan = full.eqns[full_layers]
        self.full_marks = marks(full, self._argument_marks(self.full_params, self.full_inputs), {full_layers: LAYERS})
        self.maker = {var: index for index, e in enumerate(full.eqns) for var in e.outvars}

    @staticmethod
    def _argument_marks(params: Sequence[Var], inputs: Sequence[Var]) -> dict[Var, int]:
        return dict.fromkeys(params, PARAMS) | dict.fromkeys(inputs, DATA)

    def split(self, keys: Sequence[int]) -> Split:
        frontier = self._frontier()
        self._check_draws(frontier, keys)
        totals = tuple(Total(var=self._micro(var), is_mean=self.growth.of(var).degree == 0) for var in frontier)
        fed = self._statistics(frontier)
        statistics = tuple(map(self._micro, fed))
        num_consts, num_carry = jx.scan_sizes(self.scan)
        operands, results = list(self.scan.invars), list(self.scan.outvars)
        carry = operands[num_consts : num_consts + num_carry]
        constants, scanned = operands[:num_consts], operands[num_consts + num_carry :]
        read_by_head = self._crossing([t.var for t in totals], {*results, *statistics})
        extras = _unique(a for a in [*constants, *scanned, *read_by_head] if self._of(a) == PARAMS | DATA)
        travel = (*carry, *extras)
        read_by_embed = self._crossing(travel, set(statistics), travelling=False)
        weights = _unique(a for a in scanned if self._of(a) == PARAMS)
        common = _unique(a for a in [*constants, *read_by_head, *read_by_embed] if self._of(a) == PARAMS)
        shared = _unique([*weights, *common])
        given = (*shared, *statistics)
        before, after = cut(self.full, fed), cut(self.full, self.full.outvars, frontier)
        self._check_whole(before, after)
        return Split(
            scan=self.scan,
            place=jx.place_of(self.scan, Place()),
            num_layers=self.scan.params["length"],
            arguments=self.flat.invars,
            full_arguments=self.full.invars,
            inputs=tuple(self.inputs),
            shared=cut(self.flat, shared),
            weights=weights,
            common=common,
            in_layers=_unique(a for a in constants if self._of(a) == PARAMS),
            before=before,
            statistics=statistics,
            embed=cut(self.flat, travel, given),
            travel=travel,
            ys=tuple(v for v in results[num_carry:] if v in read_by_head),
            local=cut(self.flat, _unique(a for a in [*constants, *scanned] if jx.is_var(a) and self._of(a) in (0, DATA)), statistics),
            head=cut(self.flat, [t.var for t in totals], (*results, *extras, *given)),
            totals=totals,
            after=after,
            after_totals=frontier,
            num_extras=len(extras),
            like={var: index for var in shared if (index := self._origin(var)) is not None},
        )

    def _crossing(self, outputs: Sequence[Any], ends: set[Var], *, travelling: bool = True) -> list[Var]:
        """What the equations that compute `outputs` read from elsewhere: `ends`, what parameters alone give, what travels."""

        def elsewhere(var: Var) -> bool:
            return var in ends or self._of(var) == PARAMS or (travelling and self._of(var) == PARAMS | DATA)

        needed: dict[Var, None] = {a: None for a in outputs if jx.is_var(a)}
        for equation in reversed(self.flat.eqns):
            if any(v in needed and not elsewhere(v) for v in equation.outvars):
                needed.update((a, None) for a in equation.invars if jx.is_var(a))
        return [var for var in needed if elsewhere(var)]

    def _of(self, atom: Any) -> int:
        return self.marks.get(atom, 0) if jx.is_var(atom) else 0

    def _frontier(self) -> tuple[Var, ...]:
        """The values without rows that the results need and that only the pipeline can compute, in the whole program."""
        found: dict[Var, None] = {}
        pending = [a for a in self.full.outvars if jx.is_var(a)]
        seen = set(pending)
        for index, atom in enumerate(pending):
            if self.growth.of(atom).rows:
                raise SplitError(
                    f"result {index} of the function has a row for each sequence of the batch. A pipelined function returns sums and means over the batch"
                )
        while pending:
            var = pending.pop()
            bits = self.full_marks.get(var, 0)
            if not (bits & PARAMS and bits & (DATA | LAYERS)):
                continue
            equation = self.full.eqns[self.maker[var]]
            extent = self.growth.of(var)
            leaves = equation is self.full_scan or any(self.growth.of(a).rows for a in equation.invars)
            if leaves:
                self._check(var, extent)
                found[var] = None
                continue
            for atom in equation.invars:
                if jx.is_var(atom) and atom not in seen:
                    seen.add(atom)
                    pending.append(atom)
        if not any(self.full_marks[v] & LAYERS for v in found):
            raise SplitError("no result of the function depends on its layers")
        return tuple(sorted(found, key=lambda var: self.maker[var]))

    def _check(self, var: Var, extent: Extent) -> None:
        problem = extent.problem
        if not problem and extent.degree not in (0, 1):
            problem = f"it grows like the batch to the power of {extent.degree}"
        if not problem and not extent.exact:
            problem = "it is a product, quotient or function of sums over the batch, taken inside of a region or of the layers"
        if problem:
            where = jx.source_of(self.full.eqns[self.maker[var]])
            place = f" at {where}" if where and not problem.startswith(where) else ""
            raise SplitError(
                f"a result depends on a value{place} that its microbatches cannot be added up to: {problem}. "
                "If it is meant of one microbatch, name its signal under pipeline.per_microbatch"
            )

    def _statistics(self, frontier: Sequence[Var]) -> tuple[Var, ...]:
        """What must be known of the whole batch before its microbatches run: sums of inputs that rows are multiplied with."""
        reached = self._reached(frontier)
        found: dict[Var, None] = {}
        for feed in self.growth.feeds:
            if not any(var in reached for var in feed.equation.outvars):
                continue
            if feed.var not in self.maker or self.full_marks.get(feed.var, 0) & (PARAMS | LAYERS):
                raise SplitError(
                    f"{feed.source}: a value that is computed from the whole batch and the parameters is used for each row of it again (batch statistics), or chooses what to do with it. "
                    "A microbatch does not have the whole batch; if it is meant of one microbatch, name its signal under pipeline.per_microbatch"
                )
            found[feed.var] = None
        return tuple(found)

    def _check_draws(self, frontier: Sequence[Var], keys: Sequence[int]) -> None:
        """Random numbers with rows must come from an argument, or each microbatch would draw the same."""
        reached = self._reached(frontier)
        from_keys = marks(self.full, {self.full.invars[index]: 1 for index in keys})
        for equation in self.full.eqns:
            if not any(v in reached and not from_keys.get(v, 0) for v in equation.outvars):
                continue
            if any(self.growth.of(var).rows for var in jx.draws(equation)):
                raise SplitError(
                    f"{jx.source_of(equation)}: random numbers with a row for each sequence are drawn from a key that is no argument of the function: "
                    "every microbatch would draw the same. Pass the key as an argument, besides the parameters"
                )

    def _check_whole(self, *parts: Part) -> None:
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
        for equation in reversed(self.full.eqns):
            if any(v in needed for v in equation.outvars):
                needed.update(a for a in equation.invars if jx.is_var(a))
                for program in jx.subprograms(equation):
                    needed.update(_all_variables(program))
        return needed

    def _micro(self, var: Var) -> Var:
        """The micro program's variable for one of the whole program."""
        index = self.maker[var]
        equation = self.full.eqns[index]
        twin = self.flat.eqns[self.align[index]] if index in self.align else None
        position = list(equation.outvars).index(var)
        if twin is None or twin.outvars[position].aval.shape != var.aval.shape:
            raise SplitError(
                f"{jx.source_of(equation)}: the program for one microbatch differs from that of the whole batch. "
                "Use fewer microbatches, so that each has more than one row on each device"
            )
        return twin.outvars[position]

    def _origin(self, var: Var) -> int | None:
        """The parameter that a value is, perhaps cast or scaled."""
        makers = {v: e for e in self.flat.eqns for v in e.outvars}
        while var in makers:
            same = [a for a in makers[var].invars if jx.is_var(a) and a.aval.shape == var.aval.shape]
            others = [a for a in makers[var].invars if jx.is_var(a) and a.aval.shape not in (var.aval.shape, ())]
            if len(same) != 1 or others or list(jx.subprograms(makers[var])):
                return None
            var = same[0]
        return self.params.index(var) if var in self.params else None


def _unique(atoms: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(atoms))


def _all_variables(program: Program) -> Iterator[Var]:
    for equation in jx.body(program).eqns:
        yield from equation.outvars
        for inner in jx.subprograms(equation):
            yield from _all_variables(inner)
