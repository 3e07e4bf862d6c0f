# pyright: basic
"""The layouts that the equations of a program ask for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jax.sharding import NamedSharding

from jgt.program import jaxpr as jx
from jgt.program.dims import Dims
from jgt.program.equations import is_call, subprograms
from jgt.program.jaxpr import Equation, Program
from jgt.program.places import in_rule, is_manual, manual_mesh

ON_A_DEVICE = frozenset({"mpmd_map", "pallas_call"})
"""Primitives whose programs are those of one device, and name no mesh."""


@dataclass(frozen=True, kw_only=True)
class OwnLayout:
    """A layout that a program asks for.

    signal, name: the region and the name of the tensor in the erased program.
    dims, shape: the axes that it gives to each dim, and their sizes.
    where: the file:line of the program.
    argument: the number of the program's argument with this layout, if it is an argument.
    is_derived: whether JAX derives it, for a matmul on Explicit axes.
    problem: a property of the layout that rules cannot express.
    """

    signal: str
    name: str
    dims: Dims
    shape: tuple[int, ...]
    where: str
    argument: int | None = None
    is_derived: bool = False
    problem: str = ""


def equations(program: Program) -> Iterator[Equation]:
    for equation in jx.body(program).eqns:
        yield equation
        if not is_manual(equation) and equation.primitive.name not in ON_A_DEVICE:
            for part in subprograms(equation):
                yield from equations(part)


def requests_of(equation: Equation) -> list[tuple[int, NamedSharding]]:
    """The results of an equation that it asks a layout for, with that layout."""
    if manual_mesh(equation) is not None or in_rule(equation):
        return []
    params = equation.params
    if is_call(equation):
        return [(n, s) for n, s in enumerate(params["out_shardings"]) if isinstance(s, NamedSharding)]
    one = params.get("dst_sharding", params.get("out_sharding", params.get("sharding")))
    # Constants are made where they are used, and of most broadcasts JAX derives the layout itself.
    is_derived = equation.primitive.name in ("broadcast_in_dim", "iota")
    return [(0, one)] if isinstance(one, NamedSharding) and one.mesh.axis_names and not is_derived else []
