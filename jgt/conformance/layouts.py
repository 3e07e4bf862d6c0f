"""Random layouts, the kinds of layouts that operations have met, and the choice of what was met least."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from jgt.conformance.program import AXES, DimAxes, DrawnProgram, DrawnValue

MESHES = ((2,), (4,), (8,), (2, 2), (2, 4), (4, 2), (2, 2, 2), (2, 2, 2), (4, 2, 2), (2, 2, 2, 2))
"""The sizes of the axes of the meshes that are drawn."""
_T = TypeVar("_T")


def least_met(met: Counter[str], candidates: Iterable[_T], cells: Callable[[_T], Iterable[str]]) -> _T:
    """The candidate whose cells were met least."""
    return max(candidates, key=lambda candidate: sum(1 / (1 + met[cell]) for cell in cells(candidate)))


def cells(program: DrawnProgram) -> Iterator[str]:
    """The neighbourhoods of a program: the kinds of two operations, and the layout of the value between them."""
    kinds = {step.name: step.kind for step in program.steps}
    for step in program.steps:
        pair = f"{kinds.get(step.operand, 'input')} > {step.kind}"
        yield from (pair, f"{pair} > {_kind(program.specs.get(step.operand), step.dim)}")


def _kind(spec: DimAxes | None, dim: int) -> str:
    if spec is None:
        return "free"
    split = [number for number, axes in enumerate(spec) if axes]
    if not split:
        return "whole"
    if dim not in split:
        return "other dim"
    return "several dims" if len(split) > 1 else "dim, several axes" if len(spec[dim]) > 1 else "dim"


def num_layouts(program: DrawnProgram, mesh: Sequence[int]) -> int:
    """The number of layouts of the arguments of a program: each axis splits one dim of an argument, or none."""
    return math.prod((len(value.shape) + 1) ** len(mesh) for value in program.inputs)


def lay_out(rng: random.Random, program: DrawnProgram, mesh: tuple[int, ...], *, share: float = 0.35) -> DrawnProgram:
    """The program with random specs. share: the share of steps, beside the last one, and of indices that have one."""

    def wanted(value: DrawnValue) -> bool:
        last = value.name == program.steps[-1].name
        given = value in program.inputs and value.dtype in ("float32", "bfloat16")
        return bool(value.shape) and rng.random() < (0.8 if last or given else share)

    return replace(
        program, mesh=mesh, specs={name: _spec(rng, value.shape, mesh) for name, value in program.values.items() if wanted(value)}
    )


def _spec(rng: random.Random, shape: Sequence[int], mesh: Sequence[int]) -> DimAxes:
    """Axes that divide the shape, each on a random dim or on none."""
    dims: list[list[str]] = [[] for _ in shape]
    left = list(shape)
    for axis in rng.sample(range(len(mesh)), len(mesh)):
        fits = [dim for dim, size in enumerate(left) if size % mesh[axis] == 0]
        if fits and rng.random() < 0.75:
            dim = rng.choice(fits)
            dims[dim].append(AXES[axis])
            left[dim] //= mesh[axis]
    return tuple(map(tuple, dims))
