"""A loss cut into parts around its layer scan: what runs once, what runs for each microbatch, and what runs at the end.

The parts are cut from two traces of the user's function. The `whole` program has the full batch: it shows which of its numbers are sums
over the batch, and its beginning and end run outside of the pipeline. The `micro` program has the rows of one microbatch on one data shard:
its embedding, layers and head run inside, tick by tick. Equation by equation the two are the same program, which `jgt.pipeline.batch.align`
establishes, so a number found in the one has its variable in the other. For a decoder:

    loss = sum(nats · weights) / sum(weights)
    shared      params → weights, common       casts to bf16
    before      inputs → statistics            nothing here; the count of tokens, if the model divides rows by it
    embed       one microbatch → travel        the embedding
    (the scan)  travel → travel                the layers, chunk by chunk
    head        travel → totals                logits, loss, both sums
    after       totals → results               the quotient of the sums
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
from jax.typing import DTypeLike

from jgt.pipeline.arrays import Floats, has_gradient
from jgt.pipeline.batch import AlignmentError, Growth, align_microbatch, growth_of
from jgt.pipeline.config import PipelineConfig
from jgt.pipeline.peel import peeled
from jgt.pipeline.whole_program import DATA, LAYERS, PARAMS, SplitError, WholeProgram, argument_marks, dissolves, forward, layer_scan
from jgt.program import jaxpr as jx
from jgt.program.equations import part_for, scan_sizes, separate, subprograms
from jgt.program.jaxpr import Atom, Equation, Program, Var
from jgt.program.parts import Flat, Part, dependency_bits, extract_part, flatten
from jgt.program.places import Place, place_of, source_of
from jgt.program.reads import narrow_reads


@dataclass(frozen=True, kw_only=True)
class Total:
    """One number that the microbatches bring out of the pipeline: their sum, or their mean."""

    var: Var
    is_mean: bool


@dataclass(frozen=True, kw_only=True)
class Split:
    """The parts and the variables that connect them, all of the micro program except for `before` and `after`.

    Every list of arrays in this package has the order of one of these tuples.
    """

    scan: Equation
    place: Place
    num_layers: int
    arguments: tuple[Var, ...]
    """Parameters, then inputs."""
    full_arguments: tuple[Var, ...]
    """The same of the whole program."""
    inputs: tuple[Var, ...]

    shared: Part
    """Parameters → `weights` and `common`, each value once."""
    weights: tuple[Var, ...]
    """Values of parameters alone that the layers are scanned over."""
    narrow: Mapping[Var, DTypeLike]
    """For a weight that the layers cast wherever they read it, the type that they cast it to."""
    common: tuple[Var, ...]
    """Values of parameters alone that are read elsewhere in the pipeline."""
    in_layers: tuple[Var, ...]
    """The values of `common` that every layer reads."""

    before: Part
    """Inputs of the whole batch → `statistics`."""
    statistics: tuple[Var, ...]

    embed: Part
    """One microbatch → `travel`."""
    travel: tuple[Atom, ...]
    """The scan's carry, then extras: values of one microbatch and the parameters that layers or head read but no layer changes."""
    num_extras: int
    ys: tuple[Var, ...]
    """The scan's stacked outputs that the head reads; they travel after `travel`, and each layer writes its row."""
    local: Part
    """One microbatch's inputs → what layers read of inputs alone."""

    head: Part
    """`travel` and `ys` → `totals`."""
    totals: tuple[Total, ...]

    after: Part
    """`after_totals` (and arguments) → the function's results."""
    after_totals: tuple[Var, ...]
    """The variables of `totals` in the whole program."""
    like: Mapping[Var, int]
    """For a weight or common value that is a parameter, or one cast or scaled, the parameter's index."""
    frozen: frozenset[Var] = frozenset()
    """The weights and common values that have no gradients, because the call does not differentiate by their parameters."""

    def floats(self, values: Sequence[Var]) -> Floats:
        """Which of these weights or common values have gradients."""
        return Floats(tuple(v not in self.frozen and has_gradient(jx.struct_of(v)) for v in values))

    def differentiated(self, values: Sequence[Var]) -> list[Var]:
        """Those of these weights or common values that have gradients."""
        return self.floats(values).select(values)

    @property
    def trains_embedding(self) -> bool:
        """Whether the embedding has gradients, for which it needs the cotangents of what enters the layers."""
        return any(v in self.embed.inputs for v in self.differentiated(self.common))

    @property
    def goes_back(self) -> bool:
        """Whether layers run backward: not if the head alone has gradients."""
        return self.trains_embedding or bool(self.differentiated((*self.weights, *self.in_layers)))

    @cached_property
    def stacks(self) -> frozenset[int]:
        """The indices of the parameters that the layers are scanned over."""
        return frozenset(self.like[v] for v in self.weights if v in self.like)

    def half_matrices(self) -> dict[Var, DTypeLike]:
        """By matrix that is read in half precision, that type. Vectors are few, and not worth a rounding."""
        read = {v: jnp.dtype(self.narrow.get(v, jx.dtype_of(v))) for v in (*self.weights, *self.common)}
        # A weight has a dim of layers in front.
        return {v: dtype for v, dtype in read.items() if dtype == jnp.bfloat16 and len(jx.shape_of(v)) - (v in self.weights) >= 2}


def split_loss(
    micro: Program, whole: Program, larger: Program, pipeline: PipelineConfig, *, ratio: float, num_params: int, keys: Sequence[int]
) -> Split:
    """Cuts a function of parameters and inputs; `larger` is traced at `ratio` times the rows of `whole`.

    keys: the indices of arguments that are random keys, from which each part of the batch derives its own. Raises SplitError.
    """
    # An argument has rows if another batch size gives it another shape.
    pairs = enumerate(zip(jx.body(whole).invars, jx.body(larger).invars, strict=True))
    sources = {n for n, (a, b) in pairs if n < num_params or jx.shape_of(a) != jx.shape_of(b)}
    (flat, layers), (full, _), (twin, _) = (_flattened(program, pipeline.signal, sources) for program in (micro, whole, larger))
    try:
        growth = growth_of(full, twin, ratio=ratio, num_params=num_params, trusted=pipeline.per_microbatch)
    except AlignmentError as error:
        raise SplitError(
            f"the program changes with the batch size: {error}. Write it so that only its shapes depend on the batch"
        ) from None
    align = _alignment(full, flat, growth)
    whole_layers = next(i for i, j in align.items() if j == layers)
    return _Splitter(flat, WholeProgram(full, growth, whole_layers, num_params), align, layers, num_params).split(keys)


def _flattened(program: Program, signal: str, sources: Collection[int]) -> tuple[Flat, int]:
    """The flat program, and the index of its layer scan, which runs forward and has only results that its layers are needed for."""
    flat = flatten(program, dissolves(signal))
    return peeled(*forward(flat, layer_scan(flat, signal)), sources)


def _alignment(full: Flat, micro: Flat, growth: Growth) -> Mapping[int, int]:
    """The index of the micro program's equation for each of the whole program's; with one row, JAX may leave some out."""
    try:
        return align_microbatch(full, micro, growth)
    except AlignmentError as error:
        raise SplitError(
            f"{error}. Write it so that only its shapes depend on the batch, "
            "or use fewer microbatches, so that each has more than one row on each device"
        ) from None


class _Splitter:
    """Cuts the micro program along what each value depends on: PARAMS, DATA (the inputs), LAYERS, or several of them."""

    def __init__(self, flat: Flat, whole: WholeProgram, align: Mapping[int, int], layers: int, num_params: int):
        self.flat, self.whole, self.align = flat, whole, align
        self.scan = flat.eqns[layers]
        self.params, self.inputs = flat.invars[:num_params], flat.invars[num_params:]
        self.marks = dependency_bits(flat, argument_marks(flat, num_params), {layers: LAYERS})

    def split(self, keys: Sequence[int]) -> Split:
        whole = self.whole
        frontier = whole.frontier()
        whole.check_draws(frontier, keys)
        # Doubling the batch leaves a mean as it was (degree 0) and doubles a sum (degree 1).
        totals = tuple(Total(var=self._micro(var), is_mean=whole.growth.of(var).degree == 0) for var in frontier)
        fed = whole.statistics(frontier)
        statistics = tuple(map(self._micro, fed))
        # A scan reads constants (the same for all layers), its carry, and arrays of which each layer gets a row.
        num_consts, num_carry = scan_sizes(self.scan)
        operands, results = list(self.scan.invars), list(self.scan.outvars)
        carry = operands[num_consts : num_consts + num_carry]
        constants, scanned = operands[:num_consts], operands[num_consts + num_carry :]
        read_by_head = self._crossing([t.var for t in totals], {*results, *statistics})
        # A value of parameters and one microbatch (a projected memory, say) can be computed once, by the embedding, and
        # must then travel with the microbatch to the stages that read it.
        extras = _unique(a for a in _variables([*constants, *scanned, *read_by_head]) if self._of(a) == PARAMS | DATA)
        travel = (*carry, *extras)
        read_by_embed = self._crossing(travel, set(statistics), travelling=False)
        weights = _unique(a for a in _variables(scanned) if self._of(a) == PARAMS)
        common = _unique(a for a in _variables([*constants, *read_by_head, *read_by_embed]) if self._of(a) == PARAMS)
        shared = _unique([*weights, *common])
        # The search of each part below ends at these: they are computed outside of the loop, once a step.
        known = (*shared, *statistics)
        # These two are cut from the whole program: they need no microbatches, and run once.
        before, after = extract_part(whole.flat, fed), extract_part(whole.flat, whole.flat.outvars, frontier)
        whole.check_parts(before, after)
        return Split(
            scan=self.scan,
            place=place_of(self.scan, Place()),
            num_layers=self.scan.params["length"],
            arguments=self.flat.invars,
            full_arguments=whole.flat.invars,
            inputs=tuple(self.inputs),
            shared=extract_part(self.flat, shared),
            weights=weights,
            narrow=self._narrow(weights, num_consts + num_carry),
            common=common,
            in_layers=_unique(a for a in _variables(constants) if self._of(a) == PARAMS),
            before=before,
            statistics=statistics,
            embed=extract_part(self.flat, travel, known),
            travel=travel,
            # Stacked outputs that the head does not read need not travel.
            ys=tuple(v for v in results[num_carry:] if v in read_by_head),
            # 0: made of constants alone, such as a causal mask. A stage computes such values itself instead of
            # receiving them.
            local=extract_part(self.flat, _unique(a for a in _variables([*constants, *scanned]) if self._of(a) in (0, DATA)), statistics),
            head=extract_part(self.flat, [t.var for t in totals], (*results, *extras, *known)),
            totals=totals,
            after=after,
            after_totals=frontier,
            num_extras=len(extras),
            like={var: index for var in shared if (index := self._origin(var)) is not None},
        )

    def _narrow(self, weights: Sequence[Var], first: int) -> dict[Var, DTypeLike]:
        """The type of each weight that layers read in one narrower type alone. first: the number of the first operand scanned over."""
        types: dict[Var, set[DTypeLike | None]] = {}
        reads = narrow_reads(self.scan.params["jaxpr"])
        for index, atom in enumerate(self.scan.invars[first:], start=first):
            if jx.is_var(atom) and atom in weights:
                read = reads[index]
                types.setdefault(atom, set()).add(None if read is None else read.dtype)
        return {var: one for var, (one, *others) in types.items() if one is not None and not others}

    def _crossing(self, outputs: Sequence[Atom], ends: set[Var], *, travelling: bool = True) -> list[Var]:
        """The values that the equations computing `outputs` read from elsewhere.

        These are `ends`, values of parameters alone and, if `travelling`, values of one microbatch and parameters.
        """

        def elsewhere(var: Var) -> bool:
            return var in ends or self._of(var) == PARAMS or (travelling and self._of(var) == PARAMS | DATA)

        needed: dict[Var, None] = dict.fromkeys(_variables(outputs))
        for equation in reversed(self.flat.eqns):
            if own := part_for(equation, {v for v in equation.outvars if v in needed and not elsewhere(v)}):
                needed.update((a, None) for a in _variables(own.invars))
        return [var for var in needed if elsewhere(var)]

    def _of(self, var: Var) -> int:
        return self.marks.get(var, 0)

    def _micro(self, var: Var) -> Var:
        """The micro program's variable for one of the whole program."""
        index = self.whole.maker[var]
        equation = self.whole.flat.eqns[index]
        twin = self.flat.eqns[self.align[index]] if index in self.align else None
        position = list(equation.outvars).index(var)
        if twin is None or jx.shape_of(twin.outvars[position]) != jx.shape_of(var):
            raise SplitError(
                f"{source_of(equation)}: the program for one microbatch differs from the program for the whole batch. "
                "Use fewer microbatches, so that each has more than one row on each device"
            )
        return twin.outvars[position]

    def _origin(self, var: Var) -> int | None:
        """The index of the parameter that a value is, perhaps cast or scaled."""
        makers = {v: part for e in self.flat.eqns for part in separate(e) for v in part.outvars}
        while var in makers:
            same = [a for a in _variables(makers[var].invars) if jx.shape_of(a) == jx.shape_of(var)]
            others = [a for a in _variables(makers[var].invars) if jx.shape_of(a) not in (jx.shape_of(var), ())]
            # A cast or a scaling has one operand of this shape, scalars besides, and no program inside.
            if len(same) != 1 or others or list(subprograms(makers[var])):
                return None
            var = same[0]
        return self.params.index(var) if var in self.params else None


def _variables(atoms: Iterable[Atom]) -> list[Var]:
    return [a for a in atoms if jx.is_var(a)]


def _unique(variables: Iterable[Var]) -> tuple[Var, ...]:
    return tuple(dict.fromkeys(variables))
