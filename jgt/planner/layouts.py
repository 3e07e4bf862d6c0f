"""The layout of a program: its parameters, and the axes that split its batch.

The first argument of a planned function is one tree of parameters, moments and step counters. An array that the model reads under a signal
is a parameter; one that only the optimizer reads is its state. A parameter's moments have its shape and the end of its path, and their
sharding is the sharding of the gradient. Without any signals, every array of the first argument that holds floats is a parameter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax.sharding import NamedSharding

from jgt.planner.compiled import Argument, Compiled
from jgt.program import jaxpr as jx
from jgt.program.dataflow import unchanged_arguments
from jgt.program.dims import Dims, sharding_dims, show_dims
from jgt.program.equations import is_call, outer_operands, subprograms
from jgt.program.jaxpr import Program, Var
from jgt.program.uses import Use, parameter_uses

OPTIMIZER = "optimizer"
"""The signal under which a training step updates its parameters."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter.

    dims: the mesh axes of each dim, and spec: the same as the YAML writes it. copies: the number of devices that store each part of
    it. state_dims: the mesh axes of its optimizer state and of its gradient; gradient_bytes: the bytes of its gradient on one device, 0 for
    a parameter that the function returns as it is.
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
    returned = set(unchanged_arguments(compiled.program))
    rows = list(zip(state, by_model, uses, [n not in returned for n in range(len(state))], strict=True))
    # Not `== "f"`: the kind of bf16 is V in numpy.
    is_parameter = [bool(signals) if has_signals else a.dtype.kind not in "iub" for a, signals, *_ in rows]
    moments = [a for a, chosen in zip(state, is_parameter, strict=True) if not chosen]
    return tuple(_parameter(*row, moments, num_devices) for row, chosen in zip(rows, is_parameter, strict=True) if chosen)


def _parameter(
    a: Argument, signals: tuple[str, ...], use: Use, is_updated: bool, moments: Sequence[Argument], num_devices: int
) -> Parameter:
    # If there are several (mu and nu, a master copy), all have one sharding, and the one with the most names in common is taken.
    candidates = [m for m in moments if is_updated and m.shape == a.shape and _common_end(m.path, a.path)]
    moment = max(candidates, key=lambda m: _common_end(m.path, a.path), default=a)
    dims = _dims(a)
    return Parameter(
        path=a.path,
        shape=a.shape,
        dtype=str(a.dtype),
        signals=signals,
        # As the YAML writes them; [] for an array that every device stores whole.
        spec="" if a.sharding is None else show_dims(dims) if any(dims) else "[]",
        dims=dims,
        state_dims=_dims(moment),
        # An empty array has no bytes to divide by.
        copies=num_devices * a.local_bytes // max(a.num_bytes, 1),
        local_bytes=a.local_bytes,
        # The gradient has the moment's sharding, but the parameter's type: moments may be kept in another one.
        gradient_bytes=moment.local_bytes // moment.dtype.itemsize * a.dtype.itemsize if is_updated else 0,
        source=next((line for signal, line in zip(use.signals, use.sources, strict=False) if line and signal != OPTIMIZER), ""),
    )


def batch_axes(compiled: Compiled, params: Sequence[Parameter]) -> tuple[str, ...]:
    """The axes that split the rows of the inputs, by the shardings of jit or by constraints in the program.

    Rows are the first dim, and the second of integers: tokens [b, s]. The gradients of parameters are sums over them.

    Axes along which each device has its own parameters (`jgt.replacements.replicas`) do not count, because nothing is added up over them.
    """
    mesh = dict(compiled.mesh.shape)
    # Scalars, such as a step counter, have no first dim.
    arguments = zip(jx.body(compiled.program).invars, compiled.arguments, strict=True)
    inputs = {var: a for var, a in arguments if a.position != 0 and a.shape}
    axes = {axis for var, a in inputs.items() if a.sharding is not None for axis in _axes_of_rows(var, a.sharding)}
    axes.update(_constrained_axes(compiled.program, set(inputs)))

    def has_replicas(axis: str) -> bool:
        # The first dim of all parameters is as long as the axis, and split over it.
        return bool(params) and all(p.shape[:1] == (mesh[axis],) and p.dims[0] == (axis,) for p in params)

    return tuple(axis for axis in mesh if axis in axes and mesh[axis] > 1 and not has_replicas(axis))


def _axes_of_rows(var: Var, sharding: NamedSharding) -> Iterator[str]:
    for axes in sharding_dims(sharding, len(jx.shape_of(var)))[: 2 if jx.is_integer(var) else 1]:
        yield from axes


def _constrained_axes(program: Program, inputs: set[Var]) -> Iterator[str]:
    """The axes of the rows in the constraints on these variables themselves."""
    for equation in jx.body(program).eqns:
        if equation.primitive.name == "sharding_constraint" and equation.invars[0] in inputs:
            yield from _axes_of_rows(equation.invars[0], equation.params["sharding"])
        # Into nested calls of jax.jit, but not into loops: their slices are not the inputs themselves.
        for inner in subprograms(equation) if is_call(equation) else ():
            pairs = zip(outer_operands(equation, inner), jx.body(inner).invars, strict=True)
            yield from _constrained_axes(inner, {var for outer, var in pairs if outer is not None and jx.is_var(outer) and outer in inputs})


def _dims(a: Argument) -> Dims:
    return ((),) * len(a.shape) if a.sharding is None else sharding_dims(a.sharding, len(a.shape))


def _common_end(a: str, b: str) -> int:
    pairs = zip(reversed(a.split("/")), reversed(b.split("/")), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
