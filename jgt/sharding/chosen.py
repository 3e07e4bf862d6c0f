"""Rules for a program that the rules of a file do not fit: which dim of which parameter is split follows from sizes, uses and the mesh.

Rules name parts of the models they were written for. For any other program, `otherwise:` says over which axes its parameters are split, and
nothing else is needed: a parameter is stored in parts and gathered where it is read, so the dim matters little as long as all parts are
equal. Each large parameter is split along one dim that the axes divide; a dim over which the program scans or which it indexes is none, or
each step of the loop would wait for one device. Of several dims the largest counts, and the last of equal ones. Small parameters stay
whole: a message for each would cost more time than their bytes.

The choice depends on nothing else, so every start of a run makes the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

from jgt.program.dims import Dims, even_dims, num_parts
from jgt.replacements.replacement import ParameterPlace
from jgt.rules import Rules, SpecRule, SplitRule, matches
from jgt.rules.pattern import matches_end

SMALL = 1 << 16
"""The fewest numbers of a parameter that is split."""
MAX_PADDING = 0.05
_NUMBERED = re.compile(r"(?<![^/])[0-9]+(?![^/])")


def chosen_rules(rules: Rules, split: SplitRule, places: Sequence[ParameterPlace], sizes: Mapping[str, int], *, pads: bool) -> Rules:
    """The rules in which every parameter has a spec by `split`, and no signal has any. pads: whether a dim may be padded, by little."""
    axes = tuple(axis for axis in split.axes if axis in sizes)
    specs = {place.path: _spec(place, axes, sizes, pads=pads) for place in places}
    table = tuple(SpecRule(pattern=pattern, spec=spec, where=split.where) for pattern, spec in _patterns(specs))
    parts = {"params": table, "reads": "whole"} if split.params else {"params": (), "optimizer": table}
    return replace(Rules(inputs=rules.inputs, own=rules.own, default="replicate", is_chosen=True, where=rules.where), **parts)


def _spec(place: ParameterPlace, axes: tuple[str, ...], sizes: Mapping[str, int], *, pads: bool) -> Dims:
    """The axes of the dims that the program uses."""
    used = [dim for dim in range(len(place.shape)) if dim not in place.sliced]
    shape = [place.shape[dim] for dim in used]
    whole: Dims = ((),) * len(shape)
    # The size of a dim of jax.export's symbolic shapes is an expression.
    if not all(isinstance(cast(object, size), int) for size in place.shape) or math.prod(place.shape) < SMALL:
        return whole
    found = [whole]
    for dim in sorted(range(len(shape)), key=lambda dim: (-shape[dim], -dim)):
        dims = (*whole[:dim], axes, *whole[dim + 1 :])
        parts = num_parts(axes, sizes)
        padding = -(-shape[dim] // parts) * parts / shape[dim] - 1
        found += [dims] if padding <= pads * MAX_PADDING else [even_dims(dims, shape, sizes)]
    return max(found, key=lambda dims: (math.prod(num_parts(axes, sizes) for axes in dims), -sum(map(bool, dims))))


def _patterns(specs: Mapping[str, Dims]) -> Iterator[tuple[str, Dims]]:
    """Patterns that give each path its spec. Paths that differ in the number of a layer alone are one pattern if their specs are equal."""
    folded = {path: _NUMBERED.sub("*", path) for path in specs}
    same = {pattern: {specs[path] for path in specs if matches(pattern, path)} for pattern in {*folded.values()}}
    table = {folded[path] if len(same[folded[path]]) == 1 else path: spec for path, spec in specs.items()}
    split = [pattern for pattern, spec in table.items() if any(spec)]
    # A pattern matches the end of a path, so the longest come first; a parameter that is whole needs a line where a shorter one matches.
    for pattern in sorted(table, key=lambda pattern: -pattern.count("/")):
        if pattern in split or any(matches_end(other, pattern) for other in split):
            yield pattern or "**", table[pattern]
