"""The layout of a traced program: its parameters, the axes that split its batch, and the constraints on values in between.

A plan wants a table of parameters, with their specs and their bytes on one device. But jgt plans any function: its first argument is one
tree in which parameters, moments and step counters lie side by side. Their use distinguishes them. An array that the model reads under
a signal is a parameter; one that only the optimizer reads is its state. A parameter's moments have its shape and the end of its path, so
that `opt_state/0/mu/layers/up` belongs to `params/layers/up`, and their sharding is the sharding of the gradient. Constraints are read
from the equations of the program, because XLA pads or replicates without a warning what a constraint cannot split evenly.

Invariant: a function without signals has parameters too. Then every array of its first argument that holds floats is one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax.sharding import NamedSharding

from jgt.hlo.origin import NONE
from jgt.planner.compiled import Argument, Compiled
from jgt.program import jaxpr as jx
from jgt.program.dims import Dims, sharding_dims, show_dims
from jgt.program.jaxpr import Equation, Place, Program, Var
from jgt.program.uses import Use, parameter_uses

OPTIMIZER = "optimizer"
"""The signal under which a training step updates its parameters."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter.

    dims: the mesh axes of each dim, and spec: the same as the YAML writes it. copies: the number of devices that store each part of
    it. state_dims: the mesh axes of its optimizer state and of its gradient; gradient_bytes: the bytes of its gradient on one device.
    source: file:line of a use.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    signals: tuple[str, ...]
    spec: str
    dims: Dims
    state_dims: Dims
    copies: int
    local_bytes: int
    gradient_bytes: int
    source: str

    @property
    def name(self) -> str:
        """The last two names of the path."""
        return "/".join(self.path.split("/")[-2:])


def parameters_of(compiled: Compiled, num_devices: int) -> tuple[Parameter, ...]:
    """The parameters among the arrays of a function's first argument."""
    # By convention the first argument contains the parameters and their optimizer state.
    state = [a for a in compiled.arguments if a.position == 0]
    uses = parameter_uses(compiled.program, len(state))
    # The update reads parameters and moments alike. Only a signal of the model shows which is which.
    by_model = [tuple(s for s in use.signals if s.rpartition("/")[2] != OPTIMIZER) for use in uses]
    has_signals = any(by_model)
    rows = list(zip(state, by_model, uses, strict=True))
    # Not `== "f"`: the kind of bf16 is V in numpy.
    is_parameter = [bool(signals) if has_signals else a.dtype.kind not in "iub" for a, signals, _ in rows]
    moments = [a for a, chosen in zip(state, is_parameter, strict=True) if not chosen]
    return tuple(_parameter(*row, moments, num_devices) for row, chosen in zip(rows, is_parameter, strict=True) if chosen)


def _parameter(a: Argument, signals: tuple[str, ...], use: Use, moments: Sequence[Argument], num_devices: int) -> Parameter:
    # If there are several (mu and nu, a master copy), all have one sharding, and the one with the most names in common is taken.
    candidates = [m for m in moments if m.shape == a.shape and _common_end(m.path, a.path)]
    moment = max(candidates, key=lambda m: _common_end(m.path, a.path), default=a)
    dims = _dims(a)
    return Parameter(
        path=a.path,
        shape=a.shape,
        dtype=str(a.dtype),
        signals=signals,
        spec="" if a.sharding is None else _spec_text(dims),
        dims=dims,
        state_dims=_dims(moment),
        # An empty array has no bytes to divide by.
        copies=num_devices * a.local_bytes // max(a.num_bytes, 1),
        local_bytes=a.local_bytes,
        # The gradient has the moment's sharding, but the parameter's type: moments may be kept in another one.
        gradient_bytes=moment.local_bytes // moment.dtype.itemsize * a.dtype.itemsize,
        source=next((line for signal, line in zip(use.signals, use.sources, strict=True) if line and signal != OPTIMIZER), ""),
    )


def batch_axes(compiled: Compiled, params: Sequence[Parameter]) -> tuple[str, ...]:
    """The axes that split the first dim of the inputs, by the shardings of jit or by constraints in the program.

    Axes along which each device has its own parameters (`jgt.replicas`) do not count, because nothing is added up over them.
    """
    mesh = dict(compiled.mesh.shape)
    # Scalars, such as a step counter, have no first dim.
    arguments = zip(jx.body(compiled.program).invars, compiled.arguments, strict=True)
    inputs = {var: a for var, a in arguments if a.position != 0 and a.shape}
    axes = {axis for a in inputs.values() if a.sharding is not None for axis in sharding_dims(a.sharding, len(a.shape))[0]}
    axes.update(_constrained_axes(compiled.program, set(inputs)))

    def has_replicas(axis: str) -> bool:
        # The first dim of all parameters is as long as the axis, and split over it.
        return bool(params) and all(p.shape[:1] == (mesh[axis],) and p.dims[0] == (axis,) for p in params)

    return tuple(axis for axis in mesh if axis in axes and mesh[axis] > 1 and not has_replicas(axis))


def _constrained_axes(program: Program, inputs: set[Var]) -> Iterator[str]:
    """The axes of the first dim in the constraints on these variables themselves."""
    for equation in jx.body(program).eqns:
        if equation.primitive.name == "sharding_constraint" and equation.invars[0] in inputs:
            yield from sharding_dims(equation.params["sharding"], len(jx.shape_of(equation.invars[0])))[0]
        # Into nested calls of jax.jit, but not into loops: their slices are not the inputs themselves.
        for inner in jx.subprograms(equation) if jx.is_call(equation) else ():
            pairs = zip(jx.outer_operands(equation, inner), jx.body(inner).invars, strict=True)
            yield from _constrained_axes(inner, {var for outer, var in pairs if outer is not None and jx.is_var(outer) and outer in inputs})


def _dims(a: Argument) -> Dims:
    return ((),) * len(a.shape) if a.sharding is None else sharding_dims(a.sharding, len(a.shape))


def _common_end(a: str, b: str) -> int:
    """The number of names that two paths have in common at their ends."""
    pairs = zip(reversed(a.split("/")), reversed(b.split("/")), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """A sharding constraint of the traced program. misfits: pairs (dim, axes) whose axes do not divide the size of the dim."""

    signal: str
    source: str
    shape: tuple[int, ...]
    spec: str
    local_bytes: int
    misfits: tuple[tuple[int, tuple[str, ...]], ...]


def constraints(program: Program, around: Place = Place()) -> Iterator[Constraint]:  # noqa: B008 - a Place never changes
    """Every sharding constraint of a program, and of the programs inside it."""
    for equation in jx.body(program).eqns:
        place = jx.place_of(equation, around)
        sharding = equation.params.get("sharding") if equation.primitive.name == "sharding_constraint" else None
        if isinstance(sharding, NamedSharding):
            yield _constraint(equation, sharding, place)
        for inner in jx.subprograms(equation):
            yield from constraints(inner, place)


def _constraint(equation: Equation, sharding: NamedSharding, place: Place) -> Constraint:
    array = jx.struct_of(equation.invars[0])
    dims = sharding_dims(sharding, len(array.shape))
    sizes = dict(sharding.mesh.shape)
    parts = [math.prod(sizes[axis] for axis in axes) for axes in dims]
    # XLA pads each part to the same size, so a device stores the quotient, rounded up.
    local = math.prod(-(-size // n) for size, n in zip(array.shape, parts, strict=True))
    return Constraint(
        signal=place.path or NONE,
        source=jx.line_of(equation),
        shape=tuple(array.shape),
        spec=_spec_text(dims),
        local_bytes=local * array.dtype.itemsize,
        misfits=tuple((d, axes) for d, (axes, n, size) in enumerate(zip(dims, parts, array.shape, strict=True)) if size % n),
    )


def _spec_text(dims: Dims) -> str:
    """Dims as the YAML writes them; [] for an array that every device stores whole."""
    return show_dims(dims) if any(dims) else "[]"
