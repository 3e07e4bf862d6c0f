"""FLOPs of a traced program, by signal and phase: matmuls and convolutions times the loops around them.

One multiply-add is two FLOPs. Score matrices of attention count in full, causal or not, as they are computed; cuDNN computes half of a causal one.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from jgt import jaxpr as jx
from jgt.jaxpr import Equation, Program
from jgt.plan.cudnn import attention_flops
from jgt.plan.origin import NONE, Phase, origin_of, phase_of
from jgt.scopes import taken_share, useful_share


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs of one signal in one phase, over all devices. executed: with what pipelines compute in their bubbles."""

    signal: str
    phase: Phase
    executed: float
    useful: float


@dataclass(frozen=True)
class _Dot:
    name: str
    count: Fraction


def flops(program: Program) -> tuple[Flops, ...]:
    """FLOPs of a program on all devices together, however they share them; loops of unknown length count once."""
    executed: dict[tuple[str, Phase], Fraction] = collections.defaultdict(Fraction)
    useful: dict[tuple[str, Phase], Fraction] = collections.defaultdict(Fraction)
    for dot in _dots(program, "", Fraction(1)):
        origin = origin_of(dot.name)
        key = (NONE, phase_of(dot.name)) if origin is None else (origin.signal, origin.phase)
        count = dot.count * taken_share(dot.name)
        executed[key] += count
        useful[key] += count * useful_share(dot.name)
    return tuple(
        Flops(signal=signal, phase=phase, executed=float(executed[signal, phase]), useful=float(useful[signal, phase]))
        for signal, phase in sorted(executed)
    )


def _dots(program: Program, around: str, times: Fraction) -> Iterator[_Dot]:
    for equation in jx.body(program).eqns:
        name = f"{around}/{equation.source_info.name_stack}"
        own = _own_flops(equation)
        if own:
            yield _Dot(name, own * times)
        inner = [list(_dots(p, name, times * _repeats(equation))) for p in jx.subprograms(equation)]
        if "branches" in equation.params:
            inner = [max(inner, key=lambda dots: sum(dot.count for dot in dots))]
        for dots in inner:
            yield from dots


def _repeats(equation: Equation) -> int:
    """How often the programs inside an equation run, on all devices that see them apart."""
    params = equation.params
    if jx.is_scan(equation):
        return params["length"]
    if "newly_manual_axes" in params:
        sizes = dict(params["mesh"].shape)
        return math.prod(sizes[axis] for axis in params["newly_manual_axes"])
    return 1


def _own_flops(equation: Equation) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[d] for d in contracted)
    if name == "ragged_dot_general":
        # [rows, k] with [groups, k, n]: every row meets one group's matrix.
        left, right = (v.aval.shape for v in equation.invars[:2])
        return 2 * math.prod(left) * right[-1]
    if name == "conv_general_dilated":
        numbers, right = params["dimension_numbers"], equation.invars[1].aval.shape
        taps = math.prod(right) // right[numbers.rhs_spec[0]]
        return 2 * math.prod(equation.outvars[0].aval.shape) * taps
    return attention_flops(equation)
