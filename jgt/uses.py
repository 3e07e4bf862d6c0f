"""Where a program uses its parameters: the signals around their consumers, and which of their dims it slices off."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from jgt import jaxpr as jx
from jgt.jaxpr import Place, Program, Var


@dataclass(frozen=True)
class Use:
    """The signals under which a parameter is used, and its dims that are gone there: scanned over or indexed.

    sources: file:line of a use under each signal.
    """

    signals: tuple[str, ...]
    sliced: frozenset[int]
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Trail:
    """What a variable is of a parameter: dim by dim the parameter's own dim (None: not known), and dims sliced off."""

    index: int
    shape: tuple[int, ...]
    dims: tuple[int | None, ...]
    sliced: frozenset[int] = frozenset()

    def without(self, gone: Iterable[int], *, at_least: int = 1) -> _Trail:
        """After some of the variable's dims were sliced off; the parameter's dims below a size do not count as sliced."""
        positions = set(gone)
        dims = tuple(d for p, d in enumerate(self.dims) if p not in positions)
        lost = {d for p, d in enumerate(self.dims) if p in positions and d is not None and self.shape[d] >= at_least}
        return replace(self, dims=dims, sliced=self.sliced | lost)

    def onto(self, dims: tuple[int | None, ...]) -> _Trail:
        """With other dims."""
        return replace(self, dims=dims)


@dataclass(frozen=True)
class _Found:
    """A consumer of a parameter; `meets` says that another array takes part."""

    signal: str
    meets: bool
    sliced: frozenset[int]
    source: str


Trails = dict[Var, set[_Trail]]


def parameter_uses(program: Program, num_parameters: int) -> list[Use]:
    """The use of each of a program's first `num_parameters` arguments.

    A parameter is followed through casts, transposes, indexing and whatever else takes it alone to where it meets
    another array; only a parameter that meets none (a penalty on its norm) is used where it ends.
    """
    found: list[set[_Found]] = [set() for _ in range(num_parameters)]
    invars = jx.body(program).invars[:num_parameters]
    shapes = [tuple(getattr(var.aval, "shape", ())) for var in invars]
    trails: Trails = {v: {_Trail(n, shape, tuple(range(len(shape))))} for n, (v, shape) in enumerate(zip(invars, shapes, strict=True))}
    _follow(program, Place(), trails, found)
    return [_use(entries) for entries in found]


def _follow(program: Program, around: Place, trails: Trails, found: list[set[_Found]]) -> None:
    for equation in jx.body(program).eqns:
        followed = _all(trails[a] for a in equation.invars if jx.is_var(a) and a in trails)
        if not followed:
            continue
        place = jx.place_of(equation, around)
        programs = list(jx.subprograms(equation))
        for inner in programs:
            _follow_into(equation, inner, place, trails, found)
        if programs:
            continue
        meets, ends = _meets(equation, trails)
        for trail in followed:
            found[trail.index].add(_Found(place.path, meets, trail.sliced, jx.line_of(equation)))
        if not ends:
            for out in equation.outvars:
                trails.setdefault(out, set()).update(_through(equation, trail, len(out.aval.shape)) for trail in followed)


def _meets(equation: jx.Equation, trails: Trails) -> tuple[bool, bool]:
    """Whether a parameter meets an array that does not come from it, and whether its trail ends.

    A parameter that was summed up to a scalar (a norm) meets nothing; its trail ends at any other array all the same.
    """
    origins: set[frozenset[int]] = set()
    has_arrays = False
    for atom in equation.invars:
        own = trails.get(atom, set()) if jx.is_var(atom) else set()
        is_array = bool(getattr(atom.aval, "shape", ()))
        has_arrays |= is_array
        if is_array or any(trail.shape == () for trail in own):
            origins.add(frozenset(trail.index for trail in own))
    is_foreign = frozenset() in origins
    meets = has_arrays and (len(frozenset().union(*origins)) > 1 or (is_foreign and len(origins) > 1))
    return meets, meets or is_foreign


def _through(equation: jx.Equation, trail: _Trail, rank: int) -> _Trail:
    """A trail after an equation that meets nothing else."""
    permutation, squeezed = equation.params.get("permutation"), equation.params.get("dimensions")
    if permutation is not None:
        return trail.onto(tuple(trail.dims[d] for d in permutation))
    if squeezed is not None and rank == len(trail.dims) - len(squeezed):
        # A dim of size 1 that is squeezed out is the parameter's own: nobody stacks one.
        return trail.without(squeezed, at_least=2)
    if equation.params.keys() == {"axis"} and rank == len(trail.dims) - 1:
        return trail.without([equation.params["axis"]])
    return trail if rank == len(trail.dims) else trail.onto((None,) * rank)


def _follow_into(equation: jx.Equation, inner: Program, place: Place, trails: Trails, found: list[set[_Found]]) -> None:
    inside: Trails = {}
    for outer, var in zip(jx.operands(equation, inner), jx.body(inner).invars, strict=True):
        if outer is not None and jx.is_var(outer) and outer in trails:
            scanned = range(len(outer.aval.shape) - len(var.aval.shape))
            inside[var] = {trail.without(scanned) for trail in trails[outer]}
    if not inside:
        return
    _follow(inner, place, inside, found)
    for outer, var in zip(jx.results(equation, inner), jx.body(inner).outvars, strict=True):
        if outer is not None and jx.is_var(var) and var in inside:
            stacked = (None,) * (len(outer.aval.shape) - len(var.aval.shape))
            trails.setdefault(outer, set()).update(trail.onto(stacked + trail.dims) for trail in inside[var])


def _all(sets: Iterable[set[_Trail]]) -> set[_Trail]:
    return set().union(*sets)


def _use(entries: set[_Found]) -> Use:
    meeting = {entry for entry in entries if entry.meets} or entries
    signals = sorted({entry.signal for entry in meeting})
    innermost = tuple(s for s in signals if s and not any(other.startswith(f"{s}/") for other in signals))
    sliced = max((e.sliced for e in meeting if e.signal in innermost or not innermost), key=len, default=frozenset())
    sources = tuple(min((e.source for e in meeting if e.source and e.signal == signal), default="") for signal in innermost)
    return Use(innermost, sliced, sources)
