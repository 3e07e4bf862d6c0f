"""Rules for a program that the rules of a file do not fit: which dim of which parameter is split follows from sizes, uses and the mesh.

Rules name parts of the models they were written for. For any other program, `otherwise:` says over which axes its parameters are split, and
nothing else is needed: a parameter is stored in parts and gathered where it is read, so the dim matters little as long as all parts are
equal. Each large parameter is split along one dim that the axes divide; a dim over which the program scans or which it indexes is none, or
each step of the loop would wait for one device. Of several dims the largest counts, and the last of equal ones. Small parameters stay
whole: a message for each would cost more time than their bytes.

The choice depends on nothing else, so every start of a run makes the same.

Axes under `tensor` split matmuls where the program shows along which dims (`jgt.sharding.tensor`). Such a parameter is read in these parts.
Where it shows none, they store parameters in parts as the others do.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

from jgt.program.dims import Dims, even_dims, num_parts
from jgt.program.jaxpr import Program
from jgt.replacements.replacement import ParameterPlace
from jgt.rules import Rules, SpecRule, SplitRule, matches
from jgt.rules.pattern import matches_end
from jgt.rules.rules import ALL_AXES

SMALL = 1 << 16
"""The fewest numbers of a parameter that is split."""
MAX_PADDING = 0.05
_NUMBERED = re.compile(r"(?<![^/])[0-9]+(?![^/])")


def chosen_rules(
    rules: Rules, split: SplitRule, program: Program, places: Sequence[ParameterPlace], sizes: Mapping[str, int], *, pads: bool
) -> Rules:
    """The rules in which every parameter has a spec by `split`, and no signal has any. pads: whether a dim may be padded, by little."""
    axes, tensor = (tuple(axis for axis in named if axis in sizes) for named in (split.params or split.optimizer, split.tensor))
    proposal, reads = None, (ALL_AXES,)
    if num_parts(tensor, sizes) > 1 and all(_is_known(place) for place in places):
        proposal = importlib.import_module("jgt.sharding.tensor.propose").propose(program, places, num_parts(tensor, sizes), SMALL)
    if proposal is not None and proposal.dims:
        dims, reads = proposal.dims, axes
    else:
        dims, axes = dict[str, int](), (*axes, *tensor)
    specs = {place.path: _spec(place, axes, sizes, pads=pads, held=(dims.get(place.path), tensor)) for place in places}
    table = tuple(SpecRule(pattern=pattern, spec=spec, where=split.where) for pattern, spec in _patterns(specs))
    parts = {"params": (), "optimizer": table} if split.optimizer else {"params": table, "reads": reads}
    notes = () if proposal is None else tuple(_notes(proposal.dims, proposal.whole, tensor))
    return replace(Rules(inputs=rules.inputs, own=rules.own, default="replicate", is_chosen=True, notes=notes, where=rules.where), **parts)


def _notes(dims: Mapping[str, int], whole: Mapping[str, str], tensor: Sequence[str]) -> Iterator[str]:
    axes = "+".join(tensor)
    yield f"{axes} splits the matmuls of {len(dims)} parameters"
    yield from dict.fromkeys(f"{_NUMBERED.sub('*', path)} is whole over {axes}: {why}" for path, why in whole.items())


def _is_known(place: ParameterPlace) -> bool:
    # The size of a dim of jax.export's symbolic shapes is an expression.
    return all(isinstance(cast(object, size), int) for size in place.shape)


def _spec(
    place: ParameterPlace, axes: tuple[str, ...], sizes: Mapping[str, int], *, pads: bool, held: tuple[int | None, tuple[str, ...]]
) -> Dims:
    """The axes of the dims that the program uses. held: a dim that has axes already, and these."""
    used = [dim for dim in range(len(place.shape)) if dim not in place.sliced]
    shape = [place.shape[dim] for dim in used]
    whole: Dims = tuple(held[1] if dim == held[0] else () for dim in used)
    if not _is_known(place) or math.prod(place.shape) < SMALL:
        return whole
    found = [whole]
    for dim in sorted((dim for dim in range(len(shape)) if not whole[dim]), key=lambda dim: (-shape[dim], -dim)):
        dims = (*whole[:dim], axes, *whole[dim + 1 :])
        parts = num_parts(axes, sizes)
        padding = -(-shape[dim] // parts) * parts / shape[dim] - 1
        found += [dims] if padding <= pads * MAX_PADDING else [even_dims(dims, shape, sizes)]

    def rank(dims: Dims) -> tuple[int, bool, int]:
        """More parts are better, then none that is padded, then fewer dims that are split."""
        parts = [num_parts(axes, sizes) for axes in dims]
        return math.prod(parts), all(size % n == 0 for size, n in zip(shape, parts, strict=True)), -sum(map(bool, dims))

    return max(found, key=rank)


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
