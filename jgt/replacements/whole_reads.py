"""Parameters that are split are gathered where the program reads them: the replacement of `reads: whole`.

The partitioner may read a parameter that is split as it is, and split the rows of the batch no more. With names in a model, `out:` prevents
that; this does so in a program without names. A parameter in parts gets a constraint to be whole before the first equation that computes
with it, and its gradient one to be in parts behind it.

A loop over a stack of layers gathers each layer where it is used, and once more in the backward pass, so that no more than a layer is whole
at a time. What a loop reads in every step is gathered once, before it. The cast of a parameter and the slice of a layer come before.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import NamedSharding

from jgt.program import jaxpr as jx
from jgt.program.constraints import constraint_equations, wrap_in_checkpoint
from jgt.program.dims import Dims, partition_spec
from jgt.program.equations import is_call, is_remat, is_scan, map_subprograms, outer_operands, subprograms
from jgt.program.jaxpr import Equation, Program, Var
from jgt.program.places import Place, mesh_around, place_of
from jgt.replacements.replacement import Inserted, Replaced, Site
from jgt.rules.rules import ALL_AXES, Rules

_KEEPS_DIMS = ("convert_element_type", "copy", "name", "optimization_barrier")
_Split = dict[Var, Dims]
"""Variables that are parameters in parts, with the axes of their dims."""


@dataclass(frozen=True)
class WholeReads:
    """A replacement by which the equations of a program read parameters that are whole over the axes of `reads`."""

    rules: Rules

    def apply(self, program: Program, around: Place, site: Site) -> Replaced:
        """See `Replacement`. The whole program of a call is changed at once, because only there it is known what is a parameter."""
        if not site.is_whole or site.mesh.size == 1:
            return Replaced(program=program)
        places = ((var, site.free(place.dims, ())) for var, place in zip(jx.body(program).invars, site.parameters, strict=False))
        axes = frozenset(site.sizes if ALL_AXES in self.rules.reads else self.rules.reads)
        split = {var: dims for var, dims in places if axes.intersection(itertools.chain(*dims))}
        reads = _Reads(self.rules.where, axes, mesh_around() or site.mesh, [])
        return Replaced(program=_gathered(program, split, reads, around, in_layer=False), inserted=reads.inserted)


@dataclass(frozen=True)
class _Reads:
    """The constraints of one call. where: the file:line of the rules. axes: those that no value has after it. mesh: for the shardings."""

    where: str
    axes: frozenset[str]
    mesh: Any
    inserted: list[Inserted]

    def whole(self, var: Var, parts: Dims, equation: Equation, place: Place) -> tuple[list[Equation], Var]:
        """Equations that make a variable whole before an equation that reads it, and the whole variable."""
        rest = tuple(tuple(axis for axis in axes if axis not in self.axes) for axes in parts)
        free, split = (NamedSharding(self.mesh, partition_spec(dims)) for dims in (rest, parts))
        self.inserted.append((self.where, "parameter, read whole", place.path, equation, var, free, split))
        return constraint_equations(var, free, split, equation)


def _gathered(program: Program, split: _Split, reads: _Reads, around: Place, *, in_layer: bool) -> Program:
    """The program that reads whole values of these variables. in_layer: whether it is in a loop, and nothing recomputes it."""
    eqns: list[Equation] = []
    whole: dict[Var, Var] = {}
    for equation in jx.body(program).eqns:
        if not any(jx.is_var(a) and a in split for a in equation.invars):
            eqns.append(equation)
            continue
        kept = _through(equation, split)
        if kept is not None:
            split[equation.outvars[0]] = kept
            eqns.append(equation)
            continue
        inside = _entered(equation, split) or _looked_up(equation, split)
        gathers: list[Equation] = []
        if in_layer:
            whole = {}
        for var in dict.fromkeys(a for a in equation.invars if jx.is_var(a) and a in split):
            if var not in whole and var not in inside:
                new, whole[var] = reads.whole(var, split[var], equation, place_of(equation, around))
                gathers += new
        operands = [whole[a] if jx.is_var(a) and a in whole and a not in inside else a for a in equation.invars]
        reader = _with_inside(equation, inside, reads, around, in_layer=in_layer).replace(invars=operands)
        eqns += [_again_in_backward(program, gathers, reader)] if in_layer and gathers else [*gathers, reader]
    return jx.with_body(program, eqns=eqns, outvars=jx.body(program).outvars)


def _again_in_backward(program: Program, gathers: Sequence[Equation], reader: Equation) -> Equation:
    """An equation and the gathers of what it reads, as a region that keeps nothing but what it is given: the parameter in parts."""
    made = {var for equation in gathers for var in equation.outvars}
    given = list(dict.fromkeys(a for e in (*gathers, reader) for a in e.invars if jx.is_var(a) and a not in made))
    region = wrap_in_checkpoint(jx.program_of(program, given, [*gathers, reader], reader.outvars), None, in_scan=True)
    (equation,) = jx.body(region).eqns
    return equation.replace(invars=[*given], outvars=reader.outvars)


def _through(equation: Equation, split: Mapping[Var, Dims]) -> Dims | None:
    """The axes of the result of an equation that only casts or moves a parameter, or takes a layer of a stack; None: it reads it."""
    first, *others = equation.invars
    if not jx.is_var(first) or first not in split or len(equation.outvars) != 1 or any(jx.shape_of(a) for a in others):
        return None
    dims, old, new = split[first], jx.shape_of(first), jx.shape_of(equation.outvars[0])
    name = equation.primitive.name
    if name in _KEEPS_DIMS:
        return dims
    if name == "transpose":
        permutation: tuple[int, ...] = equation.params["permutation"]
        return tuple(dims[n] for n in permutation)
    if name == "squeeze":
        return tuple(axes for n, axes in enumerate(dims) if n not in equation.params["dimensions"])
    if name in ("slice", "dynamic_slice") and all(a == b for a, b, axes in zip(old, new, dims, strict=True) if axes):
        return dims
    return None


def _entered(equation: Equation, split: Mapping[Var, Dims]) -> _Split:
    """The parameters that the program of an equation reads itself: in calls and checkpoints all, in a loop the stacks that it goes over."""
    is_loop = is_scan(equation)
    if not (is_loop or is_call(equation) or is_remat(equation)):
        return {}
    (inner,) = subprograms(equation)
    pairs = zip(outer_operands(equation, inner), jx.body(inner).invars, strict=True)
    taken = [(a, len(jx.shape_of(a)) - len(jx.shape_of(v))) for a, v in pairs if a is not None and jx.is_var(a) and a in split]
    # A variable that a loop both goes over and reads whole is read whole.
    outside = {a for a, num_removed in taken if is_loop and not num_removed}
    return {a: split[a] for a, _ in taken if a not in outside}


def _looked_up(equation: Equation, split: Mapping[Var, Dims]) -> _Split:
    """The table of an equation that takes fewer numbers from it than it has: these travel, and not the table."""
    table = equation.invars[0]
    is_less = math.prod(jx.shape_of(equation.outvars[0])) < math.prod(jx.shape_of(table))
    return {table: split[table]} if equation.primitive.name == "gather" and jx.is_var(table) and table in split and is_less else {}


def _with_inside(equation: Equation, inside: _Split, reads: _Reads, around: Place, *, in_layer: bool) -> Equation:
    if not inside:
        return equation

    def change(inner: Program) -> Program:
        pairs = zip(outer_operands(equation, inner), jx.body(inner).invars, strict=True)
        own = {v: inside[a][len(inside[a]) - len(jx.shape_of(v)) :] for a, v in pairs if a is not None and jx.is_var(a) and a in inside}
        is_layer = is_scan(equation) or (in_layer and not is_remat(equation))
        return _gathered(inner, own, reads, place_of(equation, around), in_layer=is_layer)

    return map_subprograms(equation, change)
