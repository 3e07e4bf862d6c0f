"""How a traced program uses its parameters: the counts that the formulas turn into bytes.

The formulas ask three questions of a program. How often is each parameter used, forward and backward? Which matmuls contract a sharded
dim, so that devices hold partial sums? What does the program send itself, inside shard_map? One walk over the traced program answers
all three. It follows each parameter through whatever takes it alone (slices of stacked layers, casts, transposes, constraints) to
the matmuls and look-ups that consume it, and multiplies by the trips of the loops around them.

Invariant: a `_View` is always an array made of exactly one parameter, so that the mesh axes of its dims follow from the layout. The
trail ends where another array is involved. A scan over four stacked layers makes four views of a quarter each: one use in all.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import NamedTuple

import jax.numpy as jnp

from jgt.hlo.origin import NONE, origin_of
from jgt.planner.compiled import Compiled
from jgt.planner.layouts import Parameter
from jgt.program import jaxpr as jx
from jgt.program.dims import Dims, sharding_dims
from jgt.program.jaxpr import Atom, Equation, Program, Var
from jgt.program.scopes import taken_share


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Three things that XLA's backends do differently.

    sends_narrow: bf16 travels as bf16; otherwise every float travels in at least 4 bytes. scatters: forms reduce-scatters; otherwise
    an all-reduce takes its place, each device keeps a part, and a partial sum that was split so has to be gathered again. adds_first:
    adds partial sums to each other and reduces the result; otherwise it reduces each.
    """

    sends_narrow: bool
    scatters: bool
    adds_first: bool


CPU = Backend(sends_narrow=False, scatters=False, adds_first=False)
GPU = Backend(sends_narrow=True, scatters=True, adds_first=True)


@dataclass(frozen=True, kw_only=True)
class ParameterUse:
    """How a program uses one parameter in a step.

    counts: how often all of it is used, by phase. width: the bytes of its narrowest cast over its own (1/2: stored in f32, used in
    bf16). is_manual: it enters a shard_map that splits the batch itself. is_gathered: the program gathers it there. brought: the mesh axes
    over which the program gathers it once, before anything reads it.
    """

    counts: Mapping[str, Fraction] = field(default_factory=dict[str, Fraction])
    width: Fraction = Fraction(1)
    is_manual: bool = False
    is_gathered: bool = False
    brought: frozenset[str] = frozenset()

    @property
    def forward(self) -> Fraction:
        """How often the forward pass uses it."""
        return self.counts.get("forward", Fraction())

    @property
    def again(self) -> Fraction:
        """How often it is used afterwards. A recompute gathers it for the backward pass too, so the larger of the two counts."""
        return max(self.counts.get("recompute", Fraction()), self.counts.get("backward", Fraction()))


@dataclass
class PartialSum:
    """Sums that devices along `axes` hold in parts, `num_bytes` on each device in a step.

    is_again: computed in the recompute. is_split: a constraint splits the sum over its own axes, as sequence parallelism does.
    """

    signal: str
    axes: tuple[str, ...]
    num_bytes: Fraction
    is_again: bool = False
    is_split: bool = False


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What the walk finds: the use of each parameter, partial sums, and by signal and mesh axes the bytes that shard_map sends.

    again: the bytes of what the recompute makes whole, on each device, by signal and mesh axes.
    """

    parameters: tuple[ParameterUse, ...]
    partial_sums: tuple[PartialSum, ...]
    explicit: Mapping[tuple[str, tuple[str, ...]], Fraction]
    again: Mapping[tuple[str, tuple[str, ...]], Fraction]


def find_usage(compiled: Compiled, params: Sequence[Parameter], batch: tuple[str, ...], backend: Backend) -> Usage:
    """How a compiled function's traced program uses its parameters. batch: the mesh axes that split the batch."""
    positions = {a.path: n for n, a in enumerate(compiled.arguments) if a.position == 0}
    invars = jx.body(compiled.program).invars
    views = {invars[positions[p.path]]: _View(index, p.dims, Fraction(1)) for index, p in enumerate(params)}
    walk = _Walk(dict(compiled.mesh.shape), batch, backend, [ParameterUse() for _ in params])
    walk.read(compiled.program, _Scope("", Fraction(1), batch), views)
    return Usage(parameters=tuple(walk.uses), partial_sums=tuple(walk.partial_sums), explicit=dict(walk.explicit), again=dict(walk.again))


@dataclass(frozen=True)
class _View:
    """An array made of one parameter alone.

    index: the parameter. dims: the mesh axes of each dim. share: the part of the parameter (1/4: one of four layers). times: how
    often XLA makes it whole in a step.
    """

    index: int
    dims: Dims
    share: Fraction
    times: Fraction = Fraction(1)

    def axes_of(self, dims: Iterable[int]) -> set[str]:
        """The mesh axes of some dims."""
        return {axis for d in dims for axis in self.dims[d]}


_Views = dict[Var, _View]

_KEEPS_PARTIAL = ("convert_element_type", "transpose", "reshape", "squeeze", "sharding_constraint", "name", "copy")
"""A partial sum stays one through these; anything else needs the whole sum."""

_REGION = "region"
"""The primitive of `jgt.regions`."""

_ALL_GATHERS = ("all_gather", "all_gather_invariant")
_RINGS: dict[str, Callable[[int], Fraction]] = {
    **dict.fromkeys(("psum", "psum_invariant"), lambda n: Fraction(2 * (n - 1), n)),
    **dict.fromkeys(_ALL_GATHERS, lambda n: Fraction(n - 1)),
    **dict.fromkeys(("reduce_scatter", "all_to_all"), lambda n: Fraction(n - 1, n)),
    "ppermute": lambda n: Fraction(1),
}
"""What a device sends in each collective of shard_map over n devices, as a multiple of its operand's bytes."""


class _Scope(NamedTuple):
    """What surrounds an equation: its name stack, the trips of its loops, and the axes that split the batch and are not manual.

    in_region: this is the meaning of a region, whose plan sends what its sums need.
    """

    name: str
    times: Fraction
    batch: tuple[str, ...]
    in_region: bool = False


class _Walk:
    """The walk under way. Programs inside others are read in turn, with the views of their own variables."""

    def __init__(self, mesh: Mapping[str, int], batch: tuple[str, ...], backend: Backend, uses: list[ParameterUse]):
        self._mesh, self._batch, self._backend, self.uses = mesh, batch, backend, uses
        self.partial_sums: list[PartialSum] = []
        self.explicit: dict[tuple[str, tuple[str, ...]], Fraction] = collections.defaultdict(Fraction)
        self.again: dict[tuple[str, tuple[str, ...]], Fraction] = collections.defaultdict(Fraction)
        self._counted: set[tuple[Var, str]] = set()
        self._pinned: set[Var] = set()

    def read(self, program: Program, around: _Scope, views: _Views) -> None:
        """Reads a program, and extends `views` by the arrays that are made of parameters."""
        # Partial sums are followed within one program only: XLA reduces them before they leave a loop.
        pending: dict[Var, PartialSum] = {}
        added: dict[Var, PartialSum] = {}
        laid: dict[Var, Dims] = {}
        for equation in jx.body(program).eqns:
            scope = around._replace(name=f"{around.name}/{equation.source_info.name_stack}")
            if equation.primitive.name in _RINGS:
                self._send(equation, scope, views)
            elif equation.primitive.name == _REGION:
                self._send_in_region(equation, scope)
            for inner in jx.subprograms(equation):
                self._enter(equation, inner, scope, views)
            if not self._carry(equation, pending):
                self._contract(equation, scope, views, pending)
            self._split(equation, pending, added)
            self._regather(equation, scope, laid)
            self._follow(equation, scope, views)

    def _send(self, equation: Equation, scope: _Scope, views: _Views) -> None:
        """A collective of shard_map: its bytes, and the parameters that it gathers."""
        kind, params = equation.primitive.name, equation.params
        named = params.get("axes", params.get("axis_name", ()))
        axes = tuple(a for a in self._mesh if a in (named if isinstance(named, tuple | list) else (named,)) and self._mesh[a] > 1)
        if not axes:
            return
        if kind in _ALL_GATHERS:
            for atom in equation.invars:
                if jx.is_var(atom) and atom in views:
                    self.uses[views[atom].index] = replace(self.uses[views[atom].index], is_gathered=True)
        ring = _RINGS[kind](math.prod(self._mesh[a] for a in axes))
        size = sum(self._bytes(v) for v in equation.invars if jx.dtype_of(v) is not None)
        origin = origin_of(scope.name)
        # The name stack also says how often a pipeline takes the branches around the collective.
        self.explicit[origin.signal if origin else NONE, axes] += scope.times * taken_share(scope.name) * size * ring

    def _send_in_region(self, equation: Equation, scope: _Scope) -> None:
        """What a region's plan sends."""
        sent: Mapping[str, Fraction] = equation.params["plan"].sent(equation, self._mesh, self._bytes)
        origin = origin_of(scope.name)
        for axis, num_bytes in sent.items():
            self.explicit[origin.signal if origin else NONE, (axis,)] += scope.times * taken_share(scope.name) * num_bytes

    def _enter(self, equation: Equation, inner: Program, scope: _Scope, views: _Views) -> None:
        """Reads a program inside an equation, and follows the parameters into it and out of it."""
        # shard_map makes some axes manual: inside, shapes are one device's along them.
        manual = equation.params.get("newly_manual_axes", ())
        times = scope.times * equation.params["length"] if jx.is_scan(equation) else scope.times
        inside: _Views = {}
        for outer, var in zip(jx.outer_operands(equation, inner), jx.body(inner).invars, strict=True):
            if outer is not None and jx.is_var(outer) and outer in views:
                view, gone = views[outer], len(jx.shape_of(outer)) - len(jx.shape_of(var))
                # A scan takes slices along leading dims. XLA makes them whole inside the loop, and before it what all runs share.
                share = view.share / max(math.prod(jx.shape_of(outer)[:gone]), 1)
                inside[var] = _View(view.index, view.dims[gone:], share, times if gone else view.times)
                if any(axis in self._batch for axis in manual):
                    self.uses[view.index] = replace(self.uses[view.index], is_manual=True)
        in_region = scope.in_region or equation.primitive.name == _REGION
        self.read(inner, _Scope(scope.name, times, tuple(a for a in scope.batch if a not in manual), in_region), inside)
        for outer, atom in zip(jx.outer_results(equation, inner), jx.body(inner).outvars, strict=True):
            if outer is None or not jx.is_var(atom) or atom not in inside:
                continue
            view, shape = inside[atom], jx.shape_of(outer)
            stacked = shape[: len(shape) - len(jx.shape_of(atom))]
            if shape == (*stacked, *jx.shape_of(atom)):
                # A scan stacks what it keeps for the backward pass.
                share = view.share * math.prod(stacked)
                # Of the branches of a cond, the first one that returns a parameter counts.
                views.setdefault(outer, _View(view.index, ((),) * len(stacked) + view.dims, share, scope.times))

    def _carry(self, equation: Equation, pending: dict[Var, PartialSum]) -> bool:
        """Whether an equation takes partial sums and leaves them partial: additions of two of them, and changes of shape or type."""
        kind, operands = equation.primitive.name, [a for a in equation.invars if jx.is_var(a)]
        if kind in ("add", "add_any") and len(operands) == 2 and all(a in pending for a in operands):
            first, second = (pending[a] for a in operands)
            if first.axes == second.axes:
                # Equal sums count the same, so it does not matter which of them is taken off the list.
                if self._backend.adds_first and second is not first and second in self.partial_sums:
                    self.partial_sums.remove(second)
                pending[equation.outvars[0]] = first
            return True
        if kind in _KEEPS_PARTIAL and operands and operands[0] in pending:
            pending[equation.outvars[0]] = pending[operands[0]]
            return True
        return False

    def _split(self, equation: Equation, pending: Mapping[Var, PartialSum], added: dict[Var, PartialSum]) -> None:
        """Partial sums that a constraint splits, if nothing but additions come before. added: sums of one with other values."""
        kind, found = equation.primitive.name, [pending.get(a, added.get(a)) for a in equation.invars if jx.is_var(a)]
        partial = next((one for one in found if one is not None), None)
        if partial is not None and kind == "sharding_constraint":
            dims = sharding_dims(equation.params["sharding"], len(jx.shape_of(equation.outvars[0])))
            partial.is_split |= any(axis in partial.axes for axes in dims for axis in axes)
        elif partial is not None and kind in ("add", "add_any", *_KEEPS_PARTIAL):
            added[equation.outvars[0]] = partial

    def _regather(self, equation: Equation, scope: _Scope, laid: dict[Var, Dims]) -> None:
        """Values that a constraint splits and the next one makes whole again, in the recompute. laid: the dims of constrained values."""
        kind, out = equation.primitive.name, equation.outvars[0] if equation.outvars else None
        source = equation.invars[0] if equation.invars else None
        if out is None or kind not in ("sharding_constraint", "name", "convert_element_type"):
            return
        before = laid.get(source) if source is not None and jx.is_var(source) else None
        if kind != "sharding_constraint":
            laid.update({} if before is None else {out: before})
            return
        after = laid[out] = sharding_dims(equation.params["sharding"], len(jx.shape_of(out)))
        kept, origin = {a for axes in after for a in axes} | {*self._batch}, origin_of(scope.name)
        axes = tuple(a for a in self._mesh if self._mesh[a] > 1 and a not in kept and any(a in one for one in before or ()))
        if axes and origin is not None and origin.phase == "recompute":
            local = Fraction(self._bytes(out), math.prod(self._mesh[a] for a in scope.batch))
            self.again[origin.signal, axes] += scope.times * taken_share(scope.name) * local

    def _contract(self, equation: Equation, scope: _Scope, views: _Views, pending: dict[Var, PartialSum]) -> None:
        """A matmul or a look-up: it uses parameters, and leaves a partial sum if it contracts a dim that is sharded."""
        origin = origin_of(scope.name)
        signal, phase = (origin.signal, origin.phase) if origin else (NONE, "forward")
        for var, contracted in _contractions(equation, views):
            view, use = views[var], self.uses[views[var].index]
            # Several matmuls of a view in one phase share one gathered copy of it.
            if (var, phase) not in self._counted:
                self._counted.add((var, phase))
                count = use.counts.get(phase, 0) + view.times * view.share * taken_share(scope.name)
                self.uses[view.index] = replace(use, counts={**use.counts, phase: count})
            axes = tuple(a for a in self._mesh if a in contracted and a not in self._batch and self._mesh[a] > 1)
            if axes and not scope.in_region:
                out = equation.outvars[0]
                local = Fraction(self._bytes(out), math.prod(self._mesh[a] for a in scope.batch))
                pending[out] = PartialSum(signal, axes, scope.times * taken_share(scope.name) * local, phase == "recompute")
                self.partial_sums.append(pending[out])

    def _bytes(self, atom: Atom) -> int:
        """Bytes of a value as the backend sends it."""
        dtype = jx.dtype_of(atom)
        is_widened = not self._backend.sends_narrow and jnp.issubdtype(dtype, jnp.floating)
        return math.prod(jx.shape_of(atom)) * (max(dtype.itemsize, 4) if is_widened else dtype.itemsize)

    def _follow(self, equation: Equation, scope: _Scope, views: _Views) -> None:
        """Follows a parameter through an equation that changes only its shape, type, layout or name."""
        # Scalars do not count as arrays: a parameter times a constant is still a view of it.
        sources = [a for a in equation.invars if jx.is_var(a) and a in views]
        arrays = [a for a in equation.invars if jx.shape_of(a)]
        if len(sources) != 1 or len(arrays) != 1 or len(equation.outvars) != 1 or any(True for _ in jx.subprograms(equation)):
            return
        view, before, out = views[sources[0]], jx.struct_of(sources[0]), equation.outvars[0]
        dims = _dims_after(equation, view.dims, before.shape, jx.shape_of(out))
        if dims is None:
            return
        kind, use = equation.primitive.name, self.uses[view.index]
        if kind == "convert_element_type" and self._backend.sends_narrow:
            # XLA casts the shards and gathers the result.
            width = Fraction(jx.dtype_of(out).itemsize, before.dtype.itemsize)
            self.uses[view.index] = replace(use, width=min(width, use.width))
        if kind == "sharding_constraint" and sources[0] in self._pinned:
            # Pinned to where it is, then to where it is read: it travels in between.
            brought = {a for axes in view.dims for a in axes} - {a for axes in dims for a in axes}
            self.uses[view.index] = replace(use, brought=use.brought | brought)
        if kind == "sharding_constraint":
            self._pinned.add(out)
        # Slices are a smaller part of the parameter, but a broadcast is not a larger one.
        share = view.share * min(Fraction(math.prod(jx.shape_of(out)), max(math.prod(before.shape), 1)), Fraction(1))
        views[out] = _View(view.index, dims, share, scope.times if kind == "sharding_constraint" else view.times)


def _contractions(equation: Equation, views: _Views) -> Iterator[tuple[Var, set[str]]]:
    """The views that an equation multiplies or looks up, each with the mesh axes of the dims that it sums over."""
    summed: Sequence[Iterable[int]] = ()
    if equation.primitive.name == "dot_general":
        summed, _ = equation.params["dimension_numbers"]
    elif equation.primitive.name == "gather":
        # Each device finds the rows that it has, and zeros for the others: their sum is the result.
        summed = (equation.params["dimension_numbers"].start_index_map,)
    # A gather has the table first, then indices, which are not a parameter.
    for atom, dims in zip(equation.invars, summed, strict=False):
        if jx.is_var(atom) and atom in views:
            yield atom, views[atom].axes_of(dims)


def _dims_after(equation: Equation, dims: Dims, before: tuple[int, ...], after: tuple[int, ...]) -> Dims | None:
    """The mesh axes of the dims after an equation; None if they cannot be known."""
    if equation.primitive.name == "sharding_constraint":
        return sharding_dims(equation.params["sharding"], len(after))
    if equation.params.get("permutation") is not None:
        return tuple(dims[int(d)] for d in equation.params["permutation"])
    if len(after) == len(before):
        return dims
    # Layers are taken apart and stacked along leading dims; the dim that a matmul sums over is among the last, which stay.
    same = 0
    while same < min(len(before), len(after)) and before[-1 - same] == after[-1 - same]:
        same += 1
    return ((),) * (len(after) - same) + dims[len(dims) - same :] if same else None
