"""Where a program uses its parameters: under which signals, and which of their dims are sliced off before.

A rule names a parameter by the signal under which the model uses it, but a program knows only its arguments. Between the argument and its
use are casts, transposes, indexing and the slicing of a scan over layers. So each parameter is followed forward through
the program. As long as an equation reads nothing but the parameter (and scalars), its result is still that parameter in another
form, and a trail records which dims have become which. The first equation that combines it with another array is its
use. `layers/attn/q` of shape [layers, embed, heads] is thus used under `layers/attn` with dim 0 sliced off.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from jgt.program import jaxpr as jx
from jgt.program.dims import reshape_runs
from jgt.program.equations import outer_operands, outer_results, separate, subprograms
from jgt.program.jaxpr import Equation, Program, Var
from jgt.program.places import Place, line_of, place_of


@dataclass(frozen=True)
class Use:
    """The signals under which a parameter is used, and its dims that no longer exist there: scanned over or indexed.

    sources: file:line of a use under each signal, or of one at all if it is under none.
    """

    signals: tuple[str, ...]
    sliced: frozenset[int]
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Trail:
    """A parameter in another form: for each dim of the variable the parameter's dim (None: unknown), and the dims sliced off.

    A dim that a reshape divides (layers taken two at a time) is the dim of several variables' dims, and gone when all of them are.
    """

    index: int
    shape: tuple[int, ...]
    dims: tuple[int | None, ...]
    sliced: frozenset[int] = frozenset()

    @property
    def gone(self) -> frozenset[int]:
        """The dims that were sliced off and of which nothing is left."""
        return self.sliced.difference(self.dims)

    def without(self, positions: Iterable[int], *, at_least: int = 1) -> _Trail:
        """The trail after these dims of the variable were sliced off; a parameter's dim smaller than `at_least` does not count."""
        removed = set(positions)
        dims = tuple(d for p, d in enumerate(self.dims) if p not in removed)
        sliced = {d for p, d in enumerate(self.dims) if p in removed and d is not None and self.shape[d] >= at_least}
        return replace(self, dims=dims, sliced=self.sliced | sliced)


@dataclass(frozen=True)
class _Consumer:
    """An equation that reads a parameter; `meets` says that it reads another array too."""

    signal: str
    meets: bool
    sliced: frozenset[int]
    source: str


# A set for each variable, because the branches of a cond may return different parameters.
_Trails = dict[Var, set[_Trail]]


def parameter_uses(program: Program, num_parameters: int) -> list[Use]:
    """The use of each of a program's first `num_parameters` arguments.

    A parameter that never meets another array (only its norm is taken, for a penalty) is used wherever it is read.
    """
    consumers: list[set[_Consumer]] = [set() for _ in range(num_parameters)]
    invars = jx.body(program).invars[:num_parameters]
    shapes = [jx.shape_of(var) for var in invars]
    trails: _Trails = {v: {_Trail(n, shape, tuple(range(len(shape))))} for n, (v, shape) in enumerate(zip(invars, shapes, strict=True))}
    _follow(program, Place(), trails, consumers)
    return [_use(entries) for entries in consumers]


def _follow(program: Program, around: Place, trails: _Trails, consumers: list[set[_Consumer]]) -> None:
    for equation in (part for one in jx.body(program).eqns for part in separate(one)):
        followed = set[_Trail]().union(*(trails[a] for a in equation.invars if jx.is_var(a) and a in trails))
        if not followed:
            continue
        place = place_of(equation, around)
        # The equations inside a call or a loop use a parameter, not the call. A kernel contains a program too, with other arguments.
        # Every program is followed into, so the list comes before the question.
        entered = [_follow_into(equation, inner, place, trails, consumers) for inner in subprograms(equation)]
        if any(entered):
            continue
        meets, ends = _meets(equation, trails)
        for trail in followed:
            consumers[trail.index].add(_Consumer(place.path, meets, trail.gone, line_of(equation)))
        if not ends:
            for out in equation.outvars:
                trails.setdefault(out, set()).update(_through(equation, trail, len(jx.shape_of(out))) for trail in followed)


def _meets(equation: Equation, trails: _Trails) -> tuple[bool, bool]:
    """Whether a parameter meets an array that does not come from it, and whether its trail ends here.

    A parameter that was summed to a scalar (its norm) does not count as met: a penalty may be added to anything. But its
    trail ends at any other array.
    """
    origins: set[frozenset[int]] = set()
    has_arrays = False
    for atom in equation.invars:
        operand: set[_Trail] = trails.get(atom, set()) if jx.is_var(atom) else set()
        is_array = bool(jx.shape_of(atom))
        has_arrays |= is_array
        # Among scalars only a parameter that is a scalar itself counts. The norm of a parameter does not, and neither does a
        # constant.
        if is_array or any(trail.shape == () for trail in operand):
            origins.add(frozenset(trail.index for trail in operand))
    is_foreign = frozenset() in origins
    # Either several parameters meet each other, or one of them meets an array without a trail.
    meets = has_arrays and (len(frozenset[int]().union(*origins)) > 1 or (is_foreign and len(origins) > 1))
    return meets, meets or is_foreign


def _through(equation: Equation, trail: _Trail, rank: int) -> _Trail:
    """A trail after an equation that reads nothing but the parameter, whose result has this rank."""
    permutation: tuple[int, ...] | None = equation.params.get("permutation")
    squeezed: tuple[int, ...] | None = equation.params.get("dimensions")
    if permutation is not None:
        return replace(trail, dims=tuple(trail.dims[d] for d in permutation))
    # `rev` has the same param, but keeps the rank.
    if squeezed is not None and rank == len(trail.dims) - len(squeezed):
        # A dim of size 1 that is squeezed out is part of the parameter's own shape: a stack of one layer is scanned, not squeezed.
        return trail.without(squeezed, at_least=2)
    # unstack has `axis` and nothing else.
    if equation.params.keys() == {"axis"} and rank == len(trail.dims) - 1:
        return trail.without([equation.params["axis"]])
    if "new_sizes" in equation.params and not squeezed:
        return replace(trail, dims=_reshaped(trail.dims, jx.shape_of(equation.invars[0]), jx.shape_of(equation.outvars[0])))
    # After any other change of rank the correspondence is unknown. Dims sliced off later do not count.
    return trail if rank == len(trail.dims) else replace(trail, dims=(None,) * rank)


def _reshaped(dims: tuple[int | None, ...], old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int | None, ...]:
    """The dims after a reshape: a dim that it divides is the dim of each part, and a dim that it makes of several is None."""
    result: list[int | None] = []
    for before, after in reshape_runs(old, new):
        kept = {dims[d] for d in before if old[d] != 1}
        result += [kept.pop() if len(kept) == 1 else None] * len(after)
    return tuple(result)


def _follow_into(equation: Equation, inner: Program, place: Place, trails: _Trails, consumers: list[set[_Consumer]]) -> bool:
    """Follows parameters into a program of an equation; whether any of them is an argument of it."""
    inside: _Trails = {}
    for outer, var in zip(outer_operands(equation, inner), jx.body(inner).invars, strict=True):
        if outer is not None and jx.is_var(outer) and outer in trails:
            # A scan slices the leading dim off what it goes over.
            scanned = range(len(jx.shape_of(outer)) - len(jx.shape_of(var)))
            inside[var] = {trail.without(scanned) for trail in trails[outer]}
    if not inside:
        return False
    _follow(inner, place, inside, consumers)
    for outer, var in zip(outer_results(equation, inner), jx.body(inner).outvars, strict=True):
        if outer is not None and jx.is_var(var) and var in inside:
            # A scan stacks what it returns: the new leading dim is not one of the parameter's.
            stacked = (None,) * (len(jx.shape_of(outer)) - len(jx.shape_of(var)))
            trails.setdefault(outer, set()).update(replace(trail, dims=stacked + trail.dims) for trail in inside[var])
    return True


def _use(consumers: set[_Consumer]) -> Use:
    # Where a parameter meets an array matters; where it is only cast on the way there does not.
    meeting = {consumer for consumer in consumers if consumer.meets} or consumers
    signals = sorted({consumer.signal for consumer in meeting})
    # A use in layers/attn counts more than one in layers: it is more specific, and rules of `layers` cover it as well.
    innermost = tuple(s for s in signals if s and not any(other.startswith(f"{s}/") for other in signals))
    relevant = (c.sliced for c in meeting if c.signal in innermost or not innermost)
    sources = tuple(min((c.source for c in meeting if c.source and c.signal == signal), default="") for signal in innermost or ("",))
    # One spec has to serve all uses. It is written for the use that sees the fewest dims.
    return Use(innermost, max(relevant, key=len, default=frozenset[int]()), sources)
