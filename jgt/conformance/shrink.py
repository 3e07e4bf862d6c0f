"""Makes a wrong program smaller, one edit at a time, as long as it stays wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations

from jgt.conformance.program import AXES, NAME, DrawnArgument, DrawnProgram

StillWrong = Callable[[DrawnProgram], DrawnProgram | None]
"""Returns the program, with the shapes that it has, if it is wrong in the same way; otherwise None."""


def shrunk(program: DrawnProgram, still_wrong: StillWrong, is_over: Callable[[], bool] = lambda: False) -> DrawnProgram:
    """Returns the smallest wrong program that edits lead to. is_over: whether there is no time left."""
    tried: set[str] = set()
    goes_on = True
    while goes_on:
        goes_on = False
        for candidate in _edits(program):
            if is_over():
                return program
            smaller = candidate.pruned()
            if repr(smaller) in tried or not smaller.inputs:
                continue
            tried.add(repr(smaller))
            if (wrong := still_wrong(smaller)) is not None:
                program, goes_on = wrong, True
                break
    renamed = _renamed(program)
    return still_wrong(renamed) or program


def _edits(program: DrawnProgram) -> Iterator[DrawnProgram]:
    """Smaller programs, those first that leave out most."""
    if program.gradient:
        yield replace(program, gradient=False)
    if len(program.outputs) > 1 or program.outputs != (program.steps[-1].name,):
        yield from (replace(program, outputs=(name,)) for name in program.outputs)
    for step in program.steps[:-1]:
        yield replace(program, outputs=(step.name,))
        # What comes after may have split the step.
        for spec in dict.fromkeys(spec for spec in program.specs.values() if len(spec) == len(step.shape)):
            yield replace(program, outputs=(step.name,), specs={**program.specs, step.name: spec})
    for number in range(len(program.steps)):
        yield from _without_step(program, number)
    yield from _without_specs(program)
    yield from _smaller_meshes(program)
    for first, second in combinations(program.inputs, 2):
        if (first.shape, first.dtype, first.bound) == (second.shape, second.dtype, second.bound):
            yield _instead(program, second.name, first.name)
    yield from _smaller_sizes(program)


def _without_step(program: DrawnProgram, number: int) -> Iterator[DrawnProgram]:
    """An earlier value of the same shape in the place of a step, or an argument."""
    step = program.steps[number]
    if len(program.steps) == 1:
        return
    for value in (*program.inputs, *program.steps[:number]):
        if (value.shape, value.dtype) == (step.shape, step.dtype) and value.name[0] != "k":
            yield _instead(program, step.name, value.name)
    if step.shape and step.name not in program.outputs:
        new = DrawnArgument(name=f"x{50 + number}", shape=step.shape, dtype=step.dtype, seed=50 + number)
        yield _instead(replace(program, inputs=(*program.inputs, new)), step.name, new.name)


def _without_specs(program: DrawnProgram) -> Iterator[DrawnProgram]:
    for name, spec in program.specs.items():
        others = {other: axes for other, axes in program.specs.items() if other != name}
        yield replace(program, specs=others)
        for dim, axes in enumerate(spec):
            for axis in axes:
                less = (*spec[:dim], tuple(other for other in axes if other != axis), *spec[dim + 1 :])
                yield replace(program, specs={**program.specs, name: less})


def _smaller_meshes(program: DrawnProgram) -> Iterator[DrawnProgram]:
    used = {axis for spec in program.specs.values() for axes in spec for axis in axes}
    for number, size in enumerate(program.mesh):
        if AXES[number] not in used and len(program.mesh) > 1:
            moved = {axis: AXES[AXES.index(axis) - (AXES.index(axis) > number)] for axis in AXES}
            specs = {name: tuple(tuple(moved[axis] for axis in axes) for axes in spec) for name, spec in program.specs.items()}
            yield replace(program, mesh=(*program.mesh[:number], *program.mesh[number + 1 :]), specs=specs)
        elif size > 2:
            yield replace(program, mesh=(*program.mesh[:number], size // 2, *program.mesh[number + 1 :]))


def _smaller_sizes(program: DrawnProgram) -> Iterator[DrawnProgram]:
    """Half of a size, wherever its number stands."""
    for size in sorted({size for value in program.inputs for size in value.shape}, reverse=True):
        for less in (2, 4, size // 2):
            if 2 <= less < size:
                inputs = tuple(
                    replace(
                        value,
                        shape=tuple(less if n == size else n for n in value.shape),
                        bound=less if value.bound == size else value.bound,
                    )
                    for value in program.inputs
                )
                steps = tuple(replace(step, code=re.sub(rf"(?<![\w.]){size}(?![\w.])", str(less), step.code)) for step in program.steps)
                yield replace(program, inputs=inputs, steps=steps)


def _instead(program: DrawnProgram, old: str, new: str) -> DrawnProgram:
    """The program in which another value stands for one."""
    inputs = tuple(value for value in program.inputs if value.name != old)
    steps = tuple(step for step in program.steps if step.name != old)
    other = _with_names(replace(program, inputs=inputs, steps=steps), {old: new})
    return replace(other, outputs=tuple(dict.fromkeys(other.outputs)))


def _renamed(program: DrawnProgram) -> DrawnProgram:
    """The program with its values numbered from 0."""
    letters: dict[str, list[str]] = {}
    for name in program.values:
        letters.setdefault(name[0], []).append(name)
    return _with_names(program, {name: f"{letter}{n}" for letter, names in letters.items() for n, name in enumerate(names)})


def _with_names(program: DrawnProgram, names: Mapping[str, str]) -> DrawnProgram:
    """The program with other names, wherever they stand: nothing else in its JSON looks like a name."""
    text = NAME.sub(lambda found: names.get(found[0], found[0]), json.dumps(program.to_json()))
    return DrawnProgram.of_json(json.loads(text))
