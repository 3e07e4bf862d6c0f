"""A loss cut in parts around its layer scan: what runs once, for each microbatch before, in and after the layers, and at the end.

Two traces of the function take part. The `whole` program has the full batch: it says what is a sum over the batch, and
its beginning and end run outside of the pipeline. The `micro` program has the rows of one microbatch on one data shard:
its embedding, layers and head run inside, tick by tick.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jgt import jaxpr as jx
from jgt.jaxpr import Equation, Place, Program, Var
from jgt.parts import Flat, Part, cut, flatten, marks
from jgt.pipeline.align import AlignmentError, alignment
from jgt.pipeline.growth import Growth
from jgt.pipeline.layer_scan import SplitError, dissolves, layer_scan
from jgt.pipeline.whole import DATA, LAYERS, PARAMS, Whole, argument_marks, growth_of, num_rows


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

    keys: the arguments that are random keys, of which each part of the batch gets its own. trusted: signals under which
    values of one microbatch stand for those of the batch. Raises SplitError.
    """
    flat, full, twin = (flatten(program, dissolves(signal)) for program in (micro, whole, larger))
    layers = layer_scan(flat, signal)
    growth = growth_of(full, twin, ratio, num_params, trusted)
    align = _alignment(full, flat, growth)
    whole_layers = next(i for i, j in align.items() if j == layers)
    return _Splitter(flat, Whole(full, growth, whole_layers, num_params), align, layers, num_params).split(keys)


def _alignment(full: Flat, micro: Flat, growth: Growth) -> Mapping[int, int]:
    """The micro program's equation for each of the whole one's. A microbatch of one row may leave some out."""
    try:
        return alignment(full.eqns, micro.eqns, num_rows(full, micro) or (1, 1), growth)
    except AlignmentError as error:
        raise SplitError(
            f"{error}. Write it so that only its shapes depend on the batch, or use fewer microbatches, so that each has more than one row on each device"
        ) from None


class _Splitter:
    def __init__(self, flat: Flat, whole: Whole, align: Mapping[int, int], layers: int, num_params: int):
        self.flat, self.whole, self.align = flat, whole, align
        self.scan = flat.eqns[layers]
        self.params, self.inputs = flat.invars[:num_params], flat.invars[num_params:]
        self.marks = marks(flat, argument_marks(flat, num_params), {layers: LAYERS})

    def split(self, keys: Sequence[int]) -> Split:
        whole = self.whole
        frontier = whole.frontier()
        whole.check_draws(frontier, keys)
        totals = tuple(Total(var=self._micro(var), is_mean=whole.growth.of(var).degree == 0) for var in frontier)
        fed = whole.statistics(frontier)
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
        before, after = cut(whole.flat, fed), cut(whole.flat, whole.flat.outvars, frontier)
        whole.check_parts(before, after)
        return Split(
            scan=self.scan,
            place=jx.place_of(self.scan, Place()),
            num_layers=self.scan.params["length"],
            arguments=self.flat.invars,
            full_arguments=whole.flat.invars,
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

    def _micro(self, var: Var) -> Var:
        """The micro program's variable for one of the whole program."""
        index = self.whole.maker[var]
        equation = self.whole.flat.eqns[index]
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
