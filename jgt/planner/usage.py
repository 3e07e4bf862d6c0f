"""How a traced program uses its parameters: the counts that the formulas turn into bytes.

The formulas ask three questions of a program. How often is each parameter used, forward and backward? Which matmuls contract a sharded
dim, so that devices hold partial sums? What does the program send itself, inside shard_map? One walk over the traced program answers
all three. It follows each parameter through whatever takes it alone (slices of stacked layers, casts, transposes, constraints) to
the matmuls and look-ups that consume it, and multiplies by the trips of the loops around them.

The parts of the answer are in `jgt.program`: `views` (arrays made of one parameter), `partial` (sums of which devices hold parts) and
`sends` (bytes that the program sends itself).

Invariant: counts are of one step. Each is multiplied by the trips of the loops around it, and by the share of the ticks in which a pipeline
takes the branch around it.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import NamedTuple

from jgt.experts.exchange import weights_of
from jgt.hlo.origin import NONE, origin_of, phase_of
from jgt.planner.compiled import Compiled
from jgt.planner.layouts import Parameter
from jgt.program import jaxpr as jx
from jgt.program.dims import Dims, sharding_dims
from jgt.program.jaxpr import Equation, Program, Var
from jgt.program.partial import PartialSum, PartialSums
from jgt.program.scopes import replicas_of, taken_share
from jgt.program.sends import Backend, all_reduced, is_gather, is_on_devices, is_sum, sent
from jgt.program.views import View, Views, contractions, into, out_of, through


@dataclass(frozen=True, kw_only=True)
class ParameterUse:
    """How a program uses one parameter in a step.

    counts: how often all of it is used, by phase. width: the bytes of its narrowest cast over its own (1/2: stored in f32, used in
    bf16). is_manual: it enters a shard_map that splits the batch itself. is_gathered: the program gathers it there. brought: the mesh axes
    over which the program gathers it once, before anything reads it.
    held: those whose devices keep different parts of it, such as experts.
    """

    counts: Mapping[str, Fraction] = field(default_factory=dict[str, Fraction])
    width: Fraction = Fraction(1)
    is_manual: bool = False
    is_gathered: bool = False
    brought: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()

    @property
    def forward(self) -> Fraction:
        """How often the forward pass uses it."""
        return self.counts.get("forward", Fraction())

    @property
    def again(self) -> Fraction:
        """How often it is used afterwards. A recompute gathers it for the backward pass too, so the larger of the two counts."""
        return max(self.counts.get("recompute", Fraction()), self.counts.get("backward", Fraction()))


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What the walk finds: the use of each parameter, partial sums, and by signal and mesh axes the bytes that shard_map sends.

    again: the bytes of what the recompute makes whole, on each device, by signal and mesh axes. summed: by mesh axes, the bytes that
    replicas along them send to each other.
    """

    parameters: tuple[ParameterUse, ...]
    partial_sums: tuple[PartialSum, ...]
    explicit: Mapping[tuple[str, tuple[str, ...]], Fraction]
    again: Mapping[tuple[str, tuple[str, ...]], Fraction]
    summed: Mapping[tuple[str, ...], Fraction]


def find_usage(compiled: Compiled, params: Sequence[Parameter], batch: tuple[str, ...], backend: Backend) -> Usage:
    """How a compiled function's traced program uses its parameters. batch: the mesh axes that split the batch."""
    positions = {a.path: n for n, a in enumerate(compiled.arguments) if a.position == 0}
    invars = jx.body(compiled.program).invars
    views = {invars[positions[p.path]]: View(index, p.dims, Fraction(1)) for index, p in enumerate(params)}
    walk = _Walk(dict(compiled.mesh.shape), batch, backend, [ParameterUse() for _ in params])
    walk.read(compiled.program, _Scope("", Fraction(1), batch), views)
    return Usage(
        parameters=tuple(walk.uses),
        partial_sums=tuple(walk.partial_sums),
        explicit=dict(walk.explicit),
        again=dict(walk.again),
        summed=dict(walk.summed),
    )


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
        self.summed: dict[tuple[str, ...], Fraction] = collections.defaultdict(Fraction)
        self._counted: set[tuple[Var, str]] = set()
        self._pinned: set[Var] = set()

    def read(self, program: Program, around: _Scope, views: Views) -> None:
        """Reads a program, and extends `views` by the arrays that are made of parameters."""
        sums = PartialSums(self.partial_sums, self._backend.adds_first)
        laid: dict[Var, Dims] = {}
        for equation in jx.body(program).eqns:
            scope = around._replace(name=f"{around.name}/{equation.source_info.name_stack}")
            self._send(equation, scope, views)
            weights = weights_of(equation)
            for var, dims in weights:
                self._hold(var, dims, scope, views)
            for inner in jx.subprograms(equation):
                # How often the function of experts reads its weights says nothing: they are brought to their devices once a call.
                self._enter(equation, inner, scope, {} if weights else views)
            if not sums.carry(equation):
                self._contract(equation, scope, views, sums)
            sums.split(equation)
            self._regather(equation, scope, laid)
            self._follow(equation, scope, views)

    def _send(self, equation: Equation, scope: _Scope, views: Views) -> None:
        """A collective that the program names itself: its bytes, and the parameters that it gathers."""
        found, between = sent(equation, self._mesh, self._backend), replicas_of(scope.name)
        if between is not None:
            axes, numbers = between
            if found is None and numbers is not None and is_sum(equation):
                found = axes, numbers * self._backend.item_bytes(equation.invars[0]) * all_reduced(axes, self._mesh)
            if found is not None:
                self.summed[found[0]] += scope.times * taken_share(scope.name) * found[1]
            return
        if found is None:
            return
        axes, num_bytes = found
        if is_gather(equation):
            for atom in equation.invars:
                if jx.is_var(atom) and atom in views:
                    self.uses[views[atom].index] = replace(self.uses[views[atom].index], is_gathered=True)
        origin = origin_of(scope.name)
        # The name stack also says how often a pipeline takes the branches around the collective.
        signal, times = origin.signal if origin else NONE, scope.times * taken_share(scope.name)
        self.explicit[signal, axes] += times * num_bytes

    def _hold(self, var: Var, dims: Dims, scope: _Scope, views: Views) -> None:
        """A parameter that a call of experts reads, each device its own part."""
        if var in views:
            view, phase = views[var], phase_of(scope.name)
            use, share = self.uses[view.index], view.times * view.share * taken_share(scope.name)
            held = use.held.union(axis for axes in dims for axis in axes)
            self.uses[view.index] = replace(use, held=held, counts={**use.counts, phase: use.counts.get(phase, 0) + share})

    def _enter(self, equation: Equation, inner: Program, scope: _Scope, views: Views) -> None:
        """Reads a program inside an equation, and follows the parameters into it and out of it."""
        # shard_map makes some axes manual: inside, shapes are one device's along them.
        manual = equation.params.get("newly_manual_axes", ())
        times = scope.times * equation.params["length"] if jx.is_scan(equation) else scope.times
        inside: Views = {}
        for outer, var in zip(jx.outer_operands(equation, inner), jx.body(inner).invars, strict=True):
            if outer is not None and jx.is_var(outer) and outer in views:
                view = inside[var] = into(views[outer], outer, var, times)
                if any(axis in self._batch for axis in manual):
                    self.uses[view.index] = replace(self.uses[view.index], is_manual=True)
        in_region = scope.in_region or is_on_devices(equation)
        self.read(inner, _Scope(scope.name, times, tuple(a for a in scope.batch if a not in manual), in_region), inside)
        for outer, atom in zip(jx.outer_results(equation, inner), jx.body(inner).outvars, strict=True):
            if outer is None or not jx.is_var(atom) or atom not in inside:
                continue
            view = out_of(inside[atom], atom, outer, scope.times)
            if view is not None:
                # Of the branches of a cond, the first one that returns a parameter counts.
                views.setdefault(outer, view)

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
            local = Fraction(self._backend.bytes_of(out), math.prod(self._mesh[a] for a in scope.batch))
            self.again[origin.signal, axes] += scope.times * taken_share(scope.name) * local

    def _contract(self, equation: Equation, scope: _Scope, views: Views, sums: PartialSums) -> None:
        """A matmul or a look-up: it uses parameters, and leaves a partial sum if it contracts a dim that is sharded."""
        origin = origin_of(scope.name)
        signal, phase = (origin.signal, origin.phase) if origin else (NONE, "forward")
        for var, contracted in contractions(equation, views):
            view, use = views[var], self.uses[views[var].index]
            # Several matmuls of a view in one phase share one gathered copy of it.
            if (var, phase) not in self._counted:
                self._counted.add((var, phase))
                count = use.counts.get(phase, 0) + view.times * view.share * taken_share(scope.name)
                self.uses[view.index] = replace(use, counts={**use.counts, phase: count})
            axes = tuple(a for a in self._mesh if a in contracted and a not in self._batch and self._mesh[a] > 1)
            if axes and not scope.in_region:
                out = equation.outvars[0]
                local = Fraction(self._backend.bytes_of(out), math.prod(self._mesh[a] for a in scope.batch))
                sums.start(out, PartialSum(signal, axes, scope.times * taken_share(scope.name) * local, phase == "recompute"))

    def _follow(self, equation: Equation, scope: _Scope, views: Views) -> None:
        """Follows a parameter through an equation that changes only its shape, type, layout or name."""
        found = through(equation, views, scope.times)
        if found is None:
            return
        source, view = found
        kind, out, use = equation.primitive.name, equation.outvars[0], self.uses[view.index]
        if kind == "convert_element_type" and self._backend.sends_narrow:
            # XLA casts the shards and gathers the result.
            width = Fraction(jx.dtype_of(out).itemsize, jx.dtype_of(source).itemsize)
            self.uses[view.index] = replace(use, width=min(width, use.width))
        if kind == "sharding_constraint":
            if source in self._pinned:
                # Pinned to where it is, then to where it is read: it travels in between.
                self.uses[view.index] = replace(use, brought=use.brought | views[source].axes - view.axes)
            self._pinned.add(out)
        views[out] = view
