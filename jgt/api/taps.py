"""The values of a program's named tensors and of what leaves its signals, and their cotangents.

`tapped` runs a program and returns, beside its results, the value at each *site*: each named tensor, and each value that is computed in a
signal and read outside. To each value it adds a probe, an array of zeros: the derivative of the results by a probe is the cotangent at the
site. The body of a scan has one site for all layers, whose values and probes are stacked.

A program that was rewritten by rules has the sites of the original, in the same order. So the two can be compared site by site.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax

from jgt.program import jaxpr as jx
from jgt.program.jaxpr import Atom, Equation, Program, Var
from jgt.program.places import Place, place_of


@dataclass(frozen=True, order=True)
class TapSite:
    """A place in a program.

    signal: the path of the signals around it. tensor: the name of a tensor; empty for a value that leaves the signal. number: how many
    sites before it have the same signal and tensor. loop: the number of the outermost scan around it, counted from 1; 0 for none.
    """

    signal: str
    tensor: str
    number: int = 0
    loop: int = 0

    def __str__(self) -> str:
        return f"{f'tensor {self.tensor}' if self.tensor else 'output'} of signal {self.signal or '(none)'}"


def sites_of(program: Program) -> dict[Var, TapSite]:
    """The sites of a program, in order, by the variables of the values."""
    found: dict[Var, TapSite] = {}
    counts: dict[tuple[str, str], int] = {}
    for var, signal, tensor, loop in _sites(program, Place(), itertools.count(1)):
        number = counts[signal, tensor] = counts.get((signal, tensor), -1) + 1
        found[var] = TapSite(signal, tensor, number, loop)
    return found


def _sites(program: Program, around: Place, loops: Iterator[int], loop: int = 0) -> Iterator[tuple[Var, str, str, int]]:
    inner = jx.body(program)
    readers: dict[Atom, list[Place]] = {var: [around] for var in inner.outvars if jx.is_var(var)}
    for equation in reversed(inner.eqns):
        # A constraint repeats a value, so its readers are readers of that value.
        places = readers.get(equation.outvars[0], []) if _is_constraint(equation) else [place_of(equation, around)]
        for atom in equation.invars:
            if jx.is_var(atom):
                readers.setdefault(atom, []).extend(places)
    for equation in inner.eqns:
        place, name = place_of(equation, around), jx.tensor_name(equation)
        if _is_entered(equation):
            inside = loop or (next(loops) if jx.is_scan(equation) else 0)
            yield from (site for part in jx.subprograms(equation) for site in _sites(part, place, loops, inside))
        for var in () if _is_constraint(equation) else equation.outvars:
            leaves = bool(place.path) and any(not reader.inside(place.signals) for reader in readers.get(var, ()))
            if (name is not None or leaves) and not jx.is_dropped(var) and jx.is_real(var):
                yield var, place.path, name or "", loop


def _is_constraint(equation: Equation) -> bool:
    if equation.primitive.name.startswith("custom_vjp_call"):
        return len(equation.invars) == 1 and all(map(_is_constraint, jx.body(next(iter(jx.subprograms(equation)))).eqns))
    return equation.primitive.name == "sharding_constraint"


def _is_entered(equation: Equation) -> bool:
    return jx.is_scan(equation) or jx.is_call(equation) or jx.is_remat(equation)


def tapped(
    program: Program, sites: Mapping[Var, TapSite], args: Sequence[Any], probes: Mapping[TapSite, Any] | None = None
) -> tuple[list[Any], dict[TapSite, Any]]:
    """The results of a program, and the value at each of its sites. probes: the arrays that are added there; None adds nothing.

    Without probes, the value comes from the constraint on it, if there is one. A second reader of what a constraint reads would change
    the layout: Shardy gives a value the layout of its constraint only if nothing else reads it.
    """
    inner, taps = jx.body(program), dict[TapSite, Any]()
    repeated: dict[Atom, TapSite] = {**sites}
    known: dict[Atom, Any] = {**jx.constants(program), **dict(zip(inner.invars, args, strict=True))}

    def value(atom: Atom) -> Any:
        return known[atom] if jx.is_var(atom) else cast(Any, atom).val

    for equation in inner.eqns:
        values = [value(atom) for atom in equation.invars]
        if jx.is_scan(equation):
            results, below = _scan(equation, sites, values, probes)
        elif _is_entered(equation):
            results, below = tapped(next(iter(jx.subprograms(equation))), sites, values, probes)
        else:
            operands = [atom for atom in equation.invars if jx.is_var(atom)]
            alone = jx.program_of(program, list(dict.fromkeys(operands)), [equation], equation.outvars)
            results, below = jx.evaluate(alone, [known[atom] for atom in dict.fromkeys(operands)]), {}
        taps |= below
        for var, result in zip(equation.outvars, results, strict=True):
            known[var] = result
            if (site := sites.get(var)) is not None:
                known[var] = taps[site] = result if probes is None else result + probes[site]
            elif probes is None and _is_constraint(equation) and (site := repeated.get(equation.invars[0])) is not None:
                taps[site], repeated[var] = result, site
    return [value(atom) for atom in inner.outvars], taps


def _scan(
    equation: Equation, sites: Mapping[Var, TapSite], values: Sequence[Any], probes: Mapping[TapSite, Any] | None
) -> tuple[list[Any], dict[TapSite, Any]]:
    body = equation.params["jaxpr"]
    num_constants, num_carried = jx.scan_sizes(equation)
    first = num_constants + num_carried
    inside = [sites[var] for var in _variables(body) if var in sites]

    def step(carried: Any, item: Any) -> Any:
        scanned, probes = item
        results, taps = tapped(body, sites, [*values[:num_constants], *carried, *scanned], probes)
        return results[:num_carried], (results[num_carried:], taps)

    items = (list(values[first:]), None if probes is None else {site: probes[site] for site in inside})
    options = {"length": equation.params["length"], "reverse": equation.params["reverse"]}
    carried, (scanned, taps) = jax.lax.scan(step, list(values[num_constants:first]), items, **options)
    return [*carried, *scanned], taps


def _variables(program: Program) -> Iterator[Var]:
    """The variables of a program and of those in its equations."""
    for equation in jx.body(program).eqns:
        yield from equation.outvars
        if _is_entered(equation):
            yield from (var for part in jx.subprograms(equation) for var in _variables(part))
