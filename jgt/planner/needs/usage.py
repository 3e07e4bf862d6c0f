"""The uses of parameters in a traced program, and the bytes that it has to send for values in between.

One walk over the traced program follows each parameter through whatever takes it alone to the matmuls and look-ups that consume
it, and the partial sums of those matmuls (`partial.py`). Counts are of one step: times the trips of loops, and the share of the ticks in
which a pipeline takes the branch.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import jax.numpy as jnp

from jgt.planner.compiled import Compiled
from jgt.planner.flops import trips_of
from jgt.planner.hlo.origin import EXCHANGED, NONE, phase_of, signal_of
from jgt.planner.hlo.shares import replicas_of, taken_share
from jgt.planner.layouts import Parameter, batch_axes
from jgt.planner.needs.equations import Backend, MeshAxes, View, Views, all_reduced, contractions, into, is_gather, out_of, sent, through
from jgt.planner.needs.partial import PartialSum, Sums, carry
from jgt.program import jaxpr as jx
from jgt.program.dims import Dims, num_parts, sharding_dims
from jgt.program.equations import is_scan, outer_operands, outer_results, subprograms
from jgt.program.jaxpr import Equation, Program, Var
from jgt.replacements.device_plan import plan_of
from jgt.replacements.experts.exchange import weights_of

_SUMS = ("reduce", "reduce_sum", "psum")
"""Primitives that add up an array over its own dims, which the partitioner may have split over devices."""


@dataclass(kw_only=True)
class ParameterUse:
    """The use of one parameter in a step.

    item_bytes: the bytes of one number as it is stored.
    counts: the uses of the whole parameter, by phase.
    parts: the parts of the batch that use it, one after another.
    width: the bytes of its narrowest cast over its own (1/2: stored in f32, used in bf16). Casts to eight bits do not count: no gradient is
    added up in them.
    read_width: the same, with casts to eight bits.
    is_manual: whether it enters a shard_map that splits the batch itself.
    is_gathered: whether the program gathers it there.
    brought: the mesh axes over which the program gathers it once, before anything reads it.
    held: the axes along which devices keep different parts of it, such as experts.
    """

    item_bytes: int
    counts: dict[str, Fraction] = field(default_factory=lambda: collections.defaultdict(Fraction))
    parts: int = 1
    width: Fraction = Fraction(1)
    read_width: Fraction = Fraction(1)
    is_manual: bool = False
    is_gathered: bool = False
    brought: set[str] = field(default_factory=set[str])
    held: set[str] = field(default_factory=set[str])


class _Scope(NamedTuple):
    """The surroundings of an equation: its name stack, the trips of its loops, and the axes that split the batch and are not manual.

    is_replaced: whether this is inside a replaced piece of program, whose plan contains what its sums send. parts: the trips of the loops
    around it that are not scans, such as the one over the parts of a batch.
    """

    name: str
    times: Fraction
    batch: MeshAxes
    is_replaced: bool = False
    parts: int = 1

    @property
    def runs(self) -> Fraction:
        return self.times * taken_share(self.name)

    @property
    def signal(self) -> str:
        return signal_of(self.name)


def usage_of(compiled: Compiled, params: Sequence[Parameter]) -> Usage:
    """The uses of parameters in a compiled function's traced program."""
    positions = {a.path: n for n, a in enumerate(compiled.arguments) if a.position == 0}
    invars = jx.body(compiled.program).invars
    views = {invars[positions[p.path]]: View(index, p.dims, Fraction(1)) for index, p in enumerate(params)}
    backend, batch = Backend(compiled.is_described), batch_axes(compiled, params)
    uses = [ParameterUse(item_bytes=jnp.dtype(p.dtype).itemsize) for p in params]
    usage = Usage(mesh=dict(compiled.mesh.shape), batch=batch, backend=backend, parameters=uses)
    usage.read(compiled.program, _Scope("", Fraction(1), batch), views)
    return usage


@dataclass(kw_only=True)
class Usage:
    """The uses of parameters in a program, and its partial sums. Programs inside it are read in turn, with the views of their variables.

    mesh: the sizes of the mesh axes. batch: the axes that split the batch. parameters: the use of each parameter. has_experts: whether
    rows travel to experts. sent: the bytes that a device sends for values in between, by signal, mesh axes and formula.
    """

    mesh: Mapping[str, int]
    batch: MeshAxes
    backend: Backend
    parameters: list[ParameterUse]
    partial_sums: list[PartialSum] = field(default_factory=list[PartialSum])
    has_experts: bool = False
    sent: dict[tuple[str, MeshAxes, str], Fraction] = field(default_factory=lambda: collections.defaultdict(Fraction))
    _counted: set[Var] = field(default_factory=set[Var])

    @property
    def summed(self) -> set[MeshAxes]:
        """The mesh axes over which replicas add up what they have."""
        return {axes for signal, axes, _ in self.sent if signal == EXCHANGED}

    def read(self, program: Program, around: _Scope, views: Views) -> None:
        """Reads a program, and extends `views` by the arrays that are made of parameters."""
        sums: Sums = {}
        laid: dict[Var, Dims] = {}
        for equation in jx.body(program).eqns:
            scope = around._replace(name=f"{around.name}/{equation.source_info.name_stack}")
            self._send(equation, scope, views)
            weights = weights_of(equation)
            self.has_experts |= bool(weights)
            for var, dims in weights:
                self._hold(var, dims, scope, views)
            for inner in subprograms(equation):
                # The function of experts may read its weights any number of times: they are brought to their devices once a call.
                self._enter(equation, inner, scope, {} if weights else views)
            self._contract(equation, scope, views, sums)
            carry(equation, sums, self.partial_sums, adds_first=self.backend.is_gpu)
            self._follow(equation, scope, views)
            self._regather(equation, scope, laid)

    def _send(self, equation: Equation, scope: _Scope, views: Views) -> None:
        """Counts the bytes of a collective that the program names itself, and marks the parameters that it gathers."""
        collective, between = sent(equation, self.mesh, self.backend), replicas_of(scope.name)
        if between is not None:
            axes, numbers = between
            if collective is None and numbers is not None and equation.primitive.name in _SUMS:
                collective = axes, numbers * self.backend.item_bytes(equation.invars[0]) * all_reduced(num_parts(axes, self.mesh))
            if collective is not None:
                self.sent[EXCHANGED, collective[0], "sums over replicas"] += scope.runs * collective[1]
        elif collective is not None:
            if is_gather(equation):
                for atom in equation.invars:
                    if jx.is_var(atom) and atom in views:
                        self.parameters[views[atom].index].is_gathered = True
            self.sent[scope.signal, collective[0], "shard_map"] += scope.runs * collective[1]

    def _hold(self, var: Var, dims: Dims, scope: _Scope, views: Views) -> None:
        if var in views:
            view, use = views[var], self.parameters[views[var].index]
            use.held.update(axis for axes in dims for axis in axes)
            use.counts[phase_of(scope.name)] += view.times * view.share * taken_share(scope.name)

    def _enter(self, equation: Equation, inner: Program, scope: _Scope, views: Views) -> None:
        # shard_map makes some axes manual: inside, shapes are one device's along them.
        manual = equation.params.get("newly_manual_axes", ())
        trips = trips_of(equation)
        times, parts = scope.times * trips, scope.parts * (1 if is_scan(equation) else trips)
        inside: Views = {}
        for outer, var in zip(outer_operands(equation, inner), jx.body(inner).invars, strict=True):
            if outer is not None and jx.is_var(outer) and outer in views:
                view = inside[var] = into(views[outer], outer, var, times)
                self.parameters[view.index].is_manual |= any(axis in self.batch for axis in manual)
        is_replaced = scope.is_replaced or plan_of(equation) is not None
        self.read(inner, _Scope(scope.name, times, tuple(a for a in scope.batch if a not in manual), is_replaced, parts), inside)
        for outer, atom in zip(outer_results(equation, inner), jx.body(inner).outvars, strict=True):
            if outer is None or not jx.is_var(atom) or atom not in inside:
                continue
            view = out_of(inside[atom], atom, outer, scope.times)
            if view is not None:
                # If several branches of a cond return a parameter, the first one counts.
                views.setdefault(outer, view)

    def _contract(self, equation: Equation, scope: _Scope, views: Views, sums: Sums) -> None:
        """A matmul or a look-up: it uses parameters, and leaves a partial sum if it contracts a dim that is sharded."""
        phase = phase_of(scope.name)
        for var, contracted in contractions(equation, views):
            view = views[var]
            # Several matmuls of a view share one gathered copy of it, in a recompute with the backward pass after it.
            if var not in self._counted:
                self._counted.add(var)
                use = self.parameters[view.index]
                use.counts[phase] += view.times * view.share * taken_share(scope.name)
                use.parts = max(use.parts, scope.parts)
            axes = tuple(a for a in self.mesh if a in contracted and a not in self.batch and self.mesh[a] > 1)
            if axes and not scope.is_replaced:
                partial = PartialSum(scope.signal, axes, scope.runs * self._local_bytes(equation.outvars[0], scope), phase == "recompute")
                self.partial_sums.append(partial)
                sums[equation.outvars[0]] = partial, True

    def _local_bytes(self, var: Var, scope: _Scope) -> Fraction:
        return Fraction(self.backend.bytes_of(var), num_parts(scope.batch, self.mesh))

    def _follow(self, equation: Equation, scope: _Scope, views: Views) -> None:
        step = through(equation, views, scope.times)
        if step is None:
            return
        source, view = step
        kind, out, use = equation.primitive.name, equation.outvars[0], self.parameters[view.index]
        if kind == "convert_element_type" and self.backend.is_gpu:
            # XLA casts the shards and gathers the result.
            num_bytes = jx.dtype_of(out).itemsize
            use.read_width = min(Fraction(num_bytes, use.item_bytes), use.read_width)
            if num_bytes > 1:
                use.width = min(Fraction(num_bytes, use.item_bytes), use.width)
        if kind == "sharding_constraint" and views[source].is_pinned:
            # Pinned to where it is stored, then to where it is read: it travels in between.
            use.brought |= views[source].axes() - view.axes()
        views[out] = view

    def _regather(self, equation: Equation, scope: _Scope, laid: dict[Var, Dims]) -> None:
        """Counts the values that a constraint splits and the next one makes whole again, in the recompute. laid: the dims of both."""
        kind = equation.primitive.name
        if kind not in ("sharding_constraint", "name", "convert_element_type"):
            return
        (source, *_), (out, *_) = equation.invars, equation.outvars
        before = laid.get(source) if jx.is_var(source) else None
        if kind != "sharding_constraint":
            laid.update({} if before is None else {out: before})
            return
        after = laid[out] = sharding_dims(equation.params["sharding"], len(jx.shape_of(out)))
        kept = {*self.batch, *(a for axes in after for a in axes)}
        axes = tuple(a for a in self.mesh if self.mesh[a] > 1 and a not in kept and any(a in one for one in before or ()))
        if axes and scope.signal != NONE and phase_of(scope.name) == "recompute":
            n = num_parts(axes, self.mesh)
            again = scope.runs * self._local_bytes(out, scope) * Fraction(n - 1, n)
            self.sent[scope.signal, axes, "gathered again for the backward pass"] += again
