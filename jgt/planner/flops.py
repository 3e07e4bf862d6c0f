"""FLOPs of a traced program by signal and phase: its matmuls and convolutions, times the trips of the loops around them.

Element-wise work is left out: it is bound by memory, and the timeline counts its bytes. Shapes are of whole arrays, so the counts are of
all devices together. Invariant: the sum over phases is the sum over all matmuls, none counted twice.

Two other counts agree with these in a step without attention, recompute, pipeline and repeated work. `jgt.planner.hlo.kernels` counts what
each device computes, so work that several devices repeat counts on each of them, and cuDNN's backward kernel counts the scores that it
computes once more. The caller's `Workload` counts what the model needs, from its sizes: it is the numerator of MFU.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from jgt.planner.hlo.origin import NONE, Origin, Phase, origin_of, phase_of, signal_of
from jgt.planner.hlo.shares import expected_trips, taken_share, useful_share
from jgt.program import jaxpr as jx
from jgt.program.equations import is_scan, subprograms
from jgt.program.jaxpr import Equation, Program
from jgt.program.kernels import kernel_of
from jgt.program.scopes import useful_name
from jgt.replacements.experts.exchange import exchange_of

RAGGED_DOT = "ragged_dot_general"
"""The primitive of `jax.lax.ragged_dot`."""


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of one signal in one phase, on all devices.

    executed counts what a pipeline computes in its bubbles, and empty rows of experts; useful does not.
    """

    signal: str
    phase: Phase
    executed: float
    useful: float


def flops(program: Program) -> tuple[Flops, ...]:
    """The FLOPs of a program by signal and phase.

    The largest branch of a conditional counts. A loop of unknown length counts as often as its name says, or once.
    """
    # Fractions are exact: a branch that a pipeline takes 8 of 9 times counts 8/9.
    executed: dict[Origin, Fraction] = collections.defaultdict(Fraction)
    useful: dict[Origin, Fraction] = collections.defaultdict(Fraction)
    for name, count in _dots(program, "", Fraction(1)):
        key = origin_of(name) or Origin(NONE, phase_of(name))
        executed[key] += count * taken_share(name)
        useful[key] += count * taken_share(name) * useful_share(name)
    return tuple(Flops(signal=o.signal, phase=o.phase, executed=float(executed[o]), useful=float(useful[o])) for o in sorted(executed))


def grouped_flops(program: Program) -> dict[str, float]:
    """The FLOPs of `jax.lax.ragged_dot` by signal, each row with the matrix of its group only."""
    sums: dict[str, Fraction] = collections.defaultdict(Fraction)
    for name, count in _dots(program, "", Fraction(1), lambda e: _matmul_flops(e) if e.primitive.name == RAGGED_DOT else 0):
        sums[signal_of(name)] += count * taken_share(name)
    return {signal: float(count) for signal, count in sums.items()}


def _dots(
    program: Program, around: str, times: Fraction, counted: Callable[[Equation], int] | None = None
) -> Iterator[tuple[str, Fraction]]:
    """The whole name stack of each matmul, and its FLOPs, times the loops around it. counted: counts an equation's FLOPs."""
    for equation in jx.body(program).eqns:
        name, trips = f"{around}/{equation.source_info.name_stack}", times * _repeats(equation)
        if (exchange := exchange_of(equation)) is not None:
            # The region's meaning has the rows there are. Each device computes as many as it has room for.
            filled = exchange[0].filled(exchange[1])
            name, trips = f"{name}/{useful_name(filled)}", trips / filled
        if count := (counted or _matmul_flops)(equation):
            yield name, count * times
        inner = [list(_dots(p, name, trips, counted)) for p in subprograms(equation)]
        if "branches" in equation.params:
            # Which branch is taken is not known from the program. The one with the most FLOPs counts.
            inner = [max(inner, key=lambda dots: sum(count for _, count in dots))]
        for dots in inner:
            yield from dots


def _repeats(equation: Equation) -> int:
    if "newly_manual_axes" in equation.params:
        # Shapes inside a shard_map are one device's along its manual axes, so the devices along these axes count.
        sizes = dict(equation.params["mesh"].shape)
        return math.prod(sizes[axis] for axis in equation.params["newly_manual_axes"])
    return trips_of(equation)


def trips_of(equation: Equation) -> int:
    """The runs of an equation's programs in one run of it. A loop of unknown length counts as often as its name says, or once."""
    if is_scan(equation):
        return equation.params["length"]
    expected = expected_trips(f"{equation.source_info.name_stack}") if equation.primitive.name == "while" else None
    return 1 if expected is None else expected


def _matmul_flops(equation: Equation) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = jx.shape_of(equation.invars[0])
        return 2 * math.prod(jx.shape_of(equation.outvars[0])) * math.prod(left[int(d)] for d in contracted)
    if name == RAGGED_DOT:
        # [rows, k] with [groups, k, n]: every row is multiplied by the matrix of its group. Where rows are contracted, [rows, k] with
        # [rows, n], each group has its own, so together they have all.
        left, right = (jx.shape_of(v) for v in equation.invars[:2])
        numbers = params["ragged_dot_dimension_numbers"]
        (_, contracted), (_, batch) = numbers.dot_dimension_numbers
        shared = {*contracted, *batch, *numbers.rhs_group_dimensions}
        return 2 * math.prod(left) * math.prod(size for dim, size in enumerate(right) if dim not in shared)
    if name == "conv_general_dilated":
        numbers, right = params["dimension_numbers"], jx.shape_of(equation.invars[1])
        # The inputs summed into one output: all of the kernel's dims except the output's features.
        taps = math.prod(right) // right[int(numbers.rhs_spec[0])]
        return 2 * math.prod(jx.shape_of(equation.outvars[0])) * taps
    kernel = kernel_of(name)
    if kernel is None or kernel.traced_flops is None:
        return 0
    return kernel.traced_flops(name, params, [jx.shape_of(v) for v in equation.invars])
