"""Where a program uses its parameters: the signals around their consumers, and how many scans slice them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jgt import jaxpr as jx
from jgt.jaxpr import Place, Program, Var


@dataclass(frozen=True)
class Use:
    """The signals under which a parameter is used, and how many of its leading dims scans slice off."""

    signals: tuple[str, ...]
    num_sliced: int


def parameter_uses(program: Program, num_parameters: int) -> list[Use]:
    """The use of each of a program's first `num_parameters` arguments.

    A parameter that is only cast, transposed or reshaped is followed to where it meets another array.
    """
    found: list[set[tuple[str, int]]] = [set() for _ in range(num_parameters)]
    tags = {var: {(index, 0)} for index, var in enumerate(jx.body(program).invars[:num_parameters])}
    _follow(program, Place(), tags, found)
    return [_use(entries) for entries in found]


Tags = dict[Var, set[tuple[int, int]]]  # variable → (parameter it derives from, dims sliced off)


def _follow(program: Program, around: Place, tags: Tags, found: list[set[tuple[str, int]]]) -> None:
    for equation in jx.body(program).eqns:
        tagged = [a for a in equation.invars if jx.is_var(a) and a in tags]
        if not tagged:
            continue
        place = jx.place_of(equation, around)
        programs = [p for _, p in jx.subprograms(equation)]
        for inner in programs:
            _follow_into(equation, inner, place, tags, found)
        if programs:
            continue
        for index, sliced in _all(tags[var] for var in tagged):
            found[index].add((place.path, sliced))
        if sum(1 for a in equation.invars if getattr(a.aval, "shape", ())) <= 1:
            for out in equation.outvars:
                tags.setdefault(out, set()).update(_all(tags[var] for var in tagged))


def _follow_into(equation: jx.Equation, inner: Program, place: Place, tags: Tags, found: list[set[tuple[str, int]]]) -> None:
    inner_tags: Tags = {}
    for outer, var in zip(jx.operands(equation, inner), jx.body(inner).invars, strict=True):
        if outer is not None and jx.is_var(outer) and outer in tags:
            sliced = len(outer.aval.shape) - len(var.aval.shape)
            inner_tags[var] = {(index, n + sliced) for index, n in tags[outer]}
    if not inner_tags:
        return
    _follow(inner, place, inner_tags, found)
    for outer, var in zip(jx.results(equation, inner), jx.body(inner).outvars, strict=True):
        if outer is not None and jx.is_var(var) and var in inner_tags:
            sliced = len(outer.aval.shape) - len(var.aval.shape)
            tags.setdefault(outer, set()).update((index, n - sliced) for index, n in inner_tags[var])


def _all(sets: Iterable[set[tuple[int, int]]]) -> set[tuple[int, int]]:
    return set().union(*sets)


def _use(entries: set[tuple[str, int]]) -> Use:
    signals = sorted({signal for signal, _ in entries})
    innermost = tuple(s for s in signals if s and not any(other.startswith(f"{s}/") for other in signals))
    return Use(innermost, _sliced([n for signal, n in entries if signal in innermost or not innermost]))


def _sliced(counts: Sequence[int]) -> int:
    return max(counts, default=0)
