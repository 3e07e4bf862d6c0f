"""The sites of a program: its named tensors, and the values that are computed in a signal and read outside.

An `Evaluation` has the value at each site, and adds probes to them, which are zeros: the derivative of the results by a probe is the
cotangent at the site. The body of a scan has one site for all layers, whose values and probes are stacked.

A program that was rewritten by rules has the sites of the original, in the same order. So the two can be compared site by site.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from jgt.api.stepwise import Path, Result
from jgt.program import jaxpr as jx
from jgt.program.equations import is_call, is_remat, is_scan, subprograms
from jgt.program.jaxpr import Atom, Equation, Program
from jgt.program.places import Place, place_of
from jgt.program.tracing import tensor_name


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


def sites_of(program: Program) -> dict[TapSite, Result]:
    """The sites of a program, in order, each with the result of an equation that it is."""
    found: dict[TapSite, Result] = {}
    counts: dict[tuple[str, str], int] = {}
    for result, signal, tensor, loop in _sites(program, Place(), itertools.count(1)):
        number = counts[signal, tensor] = counts.get((signal, tensor), -1) + 1
        found[TapSite(signal, tensor, number, loop)] = result
    return found


def _sites(program: Program, around: Place, loops: Iterator[int], loop: int = 0, path: Path = ()) -> Iterator[tuple[Result, str, str, int]]:
    inner = jx.body(program)
    readers: dict[Atom, list[Place]] = {var: [around] for var in inner.outvars if jx.is_var(var)}
    for equation in reversed(inner.eqns):
        # A constraint repeats a value, so its readers are readers of that value.
        places = readers.get(equation.outvars[0], []) if _is_constraint(equation) else [place_of(equation, around)]
        for atom in equation.invars:
            if jx.is_var(atom):
                readers.setdefault(atom, []).extend(places)
    for number, equation in enumerate(inner.eqns):
        place, name, here = place_of(equation, around), tensor_name(equation), (*path, number)
        if is_scan(equation) or is_call(equation) or is_remat(equation):
            inside = loop or (next(loops) if is_scan(equation) else 0)
            yield from (site for part in subprograms(equation) for site in _sites(part, place, loops, inside, here))
        for n, var in enumerate(() if _is_constraint(equation) else equation.outvars):
            leaves = bool(place.path) and any(not reader.inside(place.signals) for reader in readers.get(var, ()))
            if (name is not None or leaves) and not jx.is_dropped(var) and jx.is_real(var):
                yield (here, n), place.path, name or "", loop


def _is_constraint(equation: Equation) -> bool:
    if equation.primitive.name.startswith("custom_vjp_call"):
        return len(equation.invars) == 1 and all(map(_is_constraint, jx.body(next(iter(subprograms(equation)))).eqns))
    return equation.primitive.name == "sharding_constraint"
