"""What the layout says must be sent, from textbook formulas; the compiled program is held against it.

A parameter sharded over axes that split the batch is gathered where it is used and its gradient reduce-scattered; one that is not
gets its gradient all-reduced (ZeRO, arXiv 1910.02054). A matmul that contracts a dim of a parameter that is sharded over another
axis leaves partial sums, to be all-reduced (Megatron-LM, arXiv 1909.08053). What shard_map sends is in the trace.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import jax.numpy as jnp

from jgt import jaxpr as jx
from jgt.jaxpr import Equation, Program, Var
from jgt.plan.compiled import Compiled
from jgt.plan.origin import NONE, origin_of
from jgt.plan.parameters import OPTIMIZER, Parameter
from jgt.plan.replication import spec_dims
from jgt.scopes import taken_share

Dims = tuple[tuple[str, ...], ...]
_EXPLICIT = {"psum": "all-reduce", "psum_invariant": "all-reduce", "all_gather": "all-gather", "all_gather_invariant": "all-gather"} | {
    "reduce_scatter": "reduce-scatter", "ppermute": "collective-permute", "all_to_all": "all-to-all"
}


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Bytes that one device must send in a step over some axes, for one signal, and which formula says so."""

    signal: str
    axes: tuple[str, ...]
    bytes: int
    formula: str


@dataclass(frozen=True)
class _Held:
    """An array made of one parameter alone: which one, the axes of its dims, how much of the parameter it is, and how often it is made."""

    index: int
    dims: Dims
    share: Fraction
    times: Fraction = Fraction(1)


@dataclass
class _Partial:
    """Sums that are still to be added up over axes."""

    signal: str
    axes: tuple[str, ...]
    bytes: float
    is_split: bool = False


def expected(compiled: Compiled, params: Sequence[Parameter]) -> tuple[Expected, ...]:
    """What a compiled function's layout must send, by signal and axes."""
    mesh = dict(compiled.mesh.shape)
    batch = _batch_axes(compiled, mesh)
    reader = _Reader(mesh, batch, is_cpu=compiled.target is None)
    places = {a.path: n for n, a in enumerate(compiled.arguments) if a.position == 0}
    inner = jx.body(compiled.program)
    held = {inner.invars[places[p.path]]: _Held(i, p.dims, Fraction(1)) for i, p in enumerate(params)}
    reader.read(compiled.program, "", Fraction(1), held, batch)
    rows: collections.Counter[tuple[str, tuple[str, ...], str]] = collections.Counter()
    for index, p in enumerate(params):
        for axes, count, formula in _of_parameter(p, reader, index, mesh, batch):
            rows[p.signals[0] if p.signals else NONE, axes, formula] += count
        if update := _of_update(p, mesh):
            rows[OPTIMIZER, update[0], "parameters gathered after their update"] += update[1]
    for one in reader.partials:
        n = math.prod(mesh[a] for a in one.axes)
        rows[one.signal, one.axes, "all-reduce of partial sums"] += round(2 * (n - 1) / n * one.bytes)
    for (signal, axes), count in reader.explicit.items():
        rows[signal, axes, "shard_map"] += round(count)
    return tuple(Expected(signal=s, axes=a, bytes=n, formula=f) for (s, a, f), n in sorted(rows.items()) if n)


def _batch_axes(compiled: Compiled, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes over which inputs are split along their first dim, as they come or as the program lays them out."""
    found: set[str] = set()
    inputs: set[Var] = set()
    for a, var in zip(compiled.arguments, jx.body(compiled.program).invars, strict=True):
        if a.position != 0 and a.shape:
            inputs.add(var)
            found.update(() if a.sharding is None else spec_dims(a.sharding, len(a.shape))[0])
    found.update(_first_axes(compiled.program, inputs))
    return tuple(axis for axis in mesh if axis in found and mesh[axis] > 1)


def _first_axes(program: Program, inputs: set[Var]) -> Iterator[str]:
    """The axes of the first dim in the constraints on these variables themselves."""
    for equation in jx.body(program).eqns:
        if equation.primitive.name == "sharding_constraint" and equation.invars[0] in inputs:
            yield from spec_dims(equation.params["sharding"], len(equation.invars[0].aval.shape))[0]
        for inner in jx.subprograms(equation) if jx.is_call(equation) else ():
            given = zip(jx.operands(equation, inner), jx.body(inner).invars, strict=True)
            yield from _first_axes(inner, {var for outer, var in given if outer is not None and jx.is_var(outer) and outer in inputs})


def _of_parameter(
    p: Parameter, reader: _Reader, index: int, mesh: Mapping[str, int], batch: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], int, str]]:
    named, scattered = ({axis for axes in dims for axis in axes} for dims in (p.dims, p.state_dims))
    stored = tuple(a for a in batch if a in named)
    # ZeRO-1: the gradient of a whole parameter is split like its optimizer state.
    split = tuple(a for a in batch if a in scattered and a not in named)
    others = tuple(a for a in batch if a not in named and a not in scattered)
    n, m, k = (math.prod(mesh[a] for a in axes) for axes in (stored, others, split))
    forward, again = reader.uses[index, "forward"], max(reader.uses[index, "recompute"], reader.uses[index, "backward"])
    is_manual = index in reader.manual
    narrow = Fraction(reader.narrowest.get(index, 1))
    if n > 1 and index not in reader.gathered:
        gathers = Fraction(1) if is_manual else forward + again
        yield stored, round(gathers * (n - 1) * p.local_bytes * narrow), "parameters gathered"
    if is_manual or not any(phase == "backward" for _, phase in reader.uses):
        return
    if n > 1:
        # On CPU no reduce-scatter is formed: an all-reduce, of which each device takes its part.
        yield stored, round(forward * (n - 1) * p.local_bytes * narrow * (2 if reader.is_cpu else 1)), "gradients reduce-scattered"
    if k > 1:
        yield split, round(forward * Fraction(k - 1, k) * p.local_bytes * narrow * (2 if reader.is_cpu else 1)), "gradients reduce-scattered"
    if m > 1:
        yield others, round(forward * Fraction(2 * (m - 1), m) * p.local_bytes * narrow), "gradients all-reduced"


def _of_update(p: Parameter, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], int] | None:
    """What a parameter costs whose optimizer state is sharded further than itself."""
    named = {axis for axes in p.dims for axis in axes}
    more = tuple(a for a in mesh if mesh[a] > 1 and a not in named and any(a in axes for axes in p.state_dims))
    n = math.prod(mesh[a] for a in more)
    return (more, (n - 1) * p.local_bytes // n) if n > 1 else None


@dataclass
class _Reader:
    """Walks a traced program for uses of parameters, partial sums and collectives that it names itself.

    is_cpu: XLA sends narrow floats as f32 there, and reduces each of several sums that are added to each other.
    """

    mesh: Mapping[str, int]
    batch: tuple[str, ...]
    is_cpu: bool
    uses: dict[tuple[int, str], Fraction] = field(default_factory=lambda: collections.defaultdict(Fraction))
    seen: set[tuple[Var, str]] = field(default_factory=set)
    narrowest: dict[int, Fraction] = field(default_factory=dict)
    manual: set[int] = field(default_factory=set)
    gathered: set[int] = field(default_factory=set)
    partials: list[_Partial] = field(default_factory=list)
    explicit: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=lambda: collections.defaultdict(float))

    def read(self, program: Program, around: str, times: Fraction, held: dict[Var, _Held], batch: tuple[str, ...]) -> None:
        """Follows `held` through a program that runs so many times; batch: its axes that are not manual here."""
        pending: dict[Var, _Partial] = {}
        for equation in jx.body(program).eqns:
            name = f"{around}/{equation.source_info.name_stack}"
            self._collective(equation, name, times, held)
            self._inner(equation, name, times, held, batch)
            self._partial(equation, name, times, held, pending, batch)
            self._follow(equation, times, held)

    def _inner(self, equation: Equation, name: str, times: Fraction, held: dict[Var, _Held], batch: tuple[str, ...]) -> None:
        programs = list(jx.subprograms(equation))
        manual = equation.params.get("newly_manual_axes", ()) if programs else ()
        length = equation.params["length"] if jx.is_scan(equation) else 1
        for program in programs:
            inside: dict[Var, _Held] = {}
            for outer, var in zip(jx.operands(equation, program), jx.body(program).invars, strict=True):
                if outer is None or not jx.is_var(outer) or outer not in held:
                    continue
                one = held[outer]
                if any(axis in self.batch for axis in manual):
                    self.manual.add(one.index)
                gone = len(outer.aval.shape) - len(var.aval.shape)
                sliced = math.prod(outer.aval.shape[:gone])
                # XLA brings together before a loop what does not change in it.
                made = times * length if gone else one.times
                inside[var] = _Held(one.index, one.dims[gone:], one.share / max(sliced, 1), made)
            self.read(program, name, times * length, inside, tuple(a for a in batch if a not in manual))
            for outer, var in zip(jx.results(equation, program), jx.body(program).outvars, strict=True):
                if outer is None or not jx.is_var(var) or var not in inside:
                    continue
                one, stacked = inside[var], outer.aval.shape[: len(outer.aval.shape) - len(var.aval.shape)]
                if outer.aval.shape == (*stacked, *var.aval.shape):
                    # What a scan keeps for the backward pass is stacked.
                    held.setdefault(outer, _Held(one.index, ((),) * len(stacked) + one.dims, one.share * math.prod(stacked), times))

    def _partial(
        self, equation: Equation, name: str, times: Fraction, held: Mapping[Var, _Held], pending: dict[Var, _Partial], batch: tuple[str, ...]
    ) -> None:
        """Sums over a dim that a parameter splits; those that are added to each other are reduced once."""
        operands = [a for a in equation.invars if jx.is_var(a)]
        kind = equation.primitive.name
        if kind in ("add_any", "add") and len(operands) == 2 and all(a in pending for a in operands):
            kept, dropped = (pending[a] for a in operands)
            if kept.axes == dropped.axes:
                if not self.is_cpu and dropped is not kept and dropped in self.partials:
                    self.partials.remove(dropped)
                pending[equation.outvars[0]] = kept
            return
        if kind in ("convert_element_type", "transpose", "reshape", "squeeze", "sharding_constraint", "name", "copy") and operands and operands[0] in pending:
            row = pending[equation.outvars[0]] = pending[operands[0]]
            if self.is_cpu and kind == "sharding_constraint" and not row.is_split:
                # On CPU the sum is whole before it is split over the same axis, and has to be gathered again.
                row.is_split = any(axis in row.axes for axes in spec_dims(equation.params["sharding"], len(operands[0].aval.shape)) for axis in axes)
                row.bytes *= 1.5 if row.is_split else 1
            return
        summed = list(_summed(equation, held))
        if not summed:
            return
        origin = origin_of(name)
        phase = origin.phase if origin else "forward"
        for var, axes in summed:
            one = held[var]
            if (var, phase) not in self.seen:
                self.seen.add((var, phase))
                self.uses[one.index, phase] += one.times * one.share * taken_share(name)
            over = tuple(a for a in self.mesh if a in axes and a not in self.batch and self.mesh[a] > 1)
            if over:
                out = equation.outvars[0]
                size = self._bytes(out) / math.prod(self.mesh[a] for a in batch)
                row = _Partial(origin.signal if origin else NONE, over, float(times * taken_share(name)) * size)
                self.partials.append(row)
                pending[out] = row

    def _collective(self, equation: Equation, name: str, times: Fraction, held: Mapping[Var, _Held]) -> None:
        kind = _EXPLICIT.get(equation.primitive.name)
        if kind is None:
            return
        params = equation.params
        named = params.get("axes", params.get("axis_name", ()))
        axes = tuple(a for a in self.mesh if a in (named if isinstance(named, tuple | list) else (named,)) and self.mesh[a] > 1)
        n = math.prod(self.mesh[a] for a in axes)
        if n == 1:
            return
        size = sum(self._bytes(v) for v in equation.invars if hasattr(v.aval, "dtype"))
        factor = {"all-reduce": 2 * (n - 1) / n, "all-gather": n - 1, "collective-permute": 1}.get(kind, (n - 1) / n)
        if kind == "all-gather":
            self.gathered.update(held[a].index for a in equation.invars if jx.is_var(a) and a in held)
        origin = origin_of(name)
        self.explicit[origin.signal if origin else NONE, axes] += float(times * taken_share(name)) * size * factor

    def _bytes(self, atom: Any) -> int:
        width = atom.aval.dtype.itemsize
        is_widened = self.is_cpu and jnp.issubdtype(atom.aval.dtype, jnp.floating)
        return math.prod(atom.aval.shape) * (max(width, 4) if is_widened else width)

    def _follow(self, equation: Equation, times: Fraction, held: dict[Var, _Held]) -> None:
        """A parameter through what only shapes, casts or names it."""
        own = [a for a in equation.invars if jx.is_var(a) and a in held]
        arrays = [a for a in equation.invars if getattr(a.aval, "shape", ())]
        if len(own) != 1 or len(arrays) != 1 or len(equation.outvars) != 1 or any(True for _ in jx.subprograms(equation)):
            return
        one, out, before = held[own[0]], equation.outvars[0], own[0].aval
        dims = _moved(equation, one.dims, before.shape, out.aval.shape)
        if dims is None:
            return
        share = one.share * Fraction(math.prod(out.aval.shape), max(math.prod(before.shape), 1))
        if not self.is_cpu and out.aval.dtype.itemsize < before.dtype.itemsize and equation.primitive.name == "convert_element_type":
            width = Fraction(out.aval.dtype.itemsize, before.dtype.itemsize)
            self.narrowest[one.index] = min(width, self.narrowest.get(one.index, Fraction(1)))
        is_laid_out = equation.primitive.name == "sharding_constraint"
        held[out] = _Held(one.index, dims, min(share, one.share), times if is_laid_out else one.times)


def _summed(equation: Equation, held: Mapping[Var, _Held]) -> Iterator[tuple[Var, set[str]]]:
    """The parameters that an equation multiplies or looks up, each with the axes of the dims that it sums over."""
    params = equation.params
    if equation.primitive.name == "dot_general":
        contracted, _ = params["dimension_numbers"]
        for atom, dims in zip(equation.invars, contracted, strict=True):
            if jx.is_var(atom) and atom in held:
                yield atom, {axis for d in dims for axis in held[atom].dims[d]}
    elif equation.primitive.name == "gather" and jx.is_var(equation.invars[0]) and equation.invars[0] in held:
        one = held[equation.invars[0]]
        yield equation.invars[0], {axis for d in params["dimension_numbers"].start_index_map for axis in one.dims[d]}


def _moved(equation: Equation, dims: Dims, before: tuple[int, ...], after: tuple[int, ...]) -> Dims | None:
    """The axes of the dims after an equation; None where they cannot be told."""
    sharding: Any = equation.params.get("sharding")
    if equation.primitive.name == "sharding_constraint":
        return spec_dims(sharding, len(after))
    if equation.params.get("permutation") is not None:
        return tuple(dims[d] for d in equation.params["permutation"])
    if len(after) == len(before):
        return dims
    # Layers are taken apart and stacked along leading dims; what a matmul sums over comes last.
    same = 0
    while same < min(len(before), len(after)) and before[-1 - same] == after[-1 - same]:
        same += 1
    return ((),) * (len(after) - same) + dims[len(dims) - same :] if same else None
