"""Lookups in tables whose rows are split over devices: what they give is whole along its positions, and so is its gradient.

Rules may split a table's rows over an axis, and what the embedding returns along the sequence over the same axis. Left alone, XLA's
partitioner splits the positions of the lookup like its result, and adds gradients of some positions on each device to the rows that it
holds. In a region where the batch's axes are manual, and with a further axis that splits neither, the groups of devices that it forms for
this sum do not fit each other, and it aborts the process. So the rows [batch, seq, embed] are pinned right after the lookup: whole along
batch and sequence, and along `embed` as the table is. Devices then sum up the rows and keep their part, which is a reduce-scatter, and
gather the gradient of a microbatch's positions. Inputs may be split along the sequence too, so the numbers of the rows are pinned before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jgt.program import jaxpr as jx
from jgt.program.constraints import constraint_equations
from jgt.program.dims import Dims, sharding_dims
from jgt.program.equations import outer_operands, outer_results, subprograms
from jgt.program.jaxpr import Atom, Equation, Program, Var

_FREE = PartitionSpec.UNCONSTRAINED
_KEEPS_DIMS = ("convert_element_type", "copy", "name")


def with_whole_positions(program: Program, tables: Mapping[Var, Dims], sharding: Callable[[PartitionSpec], NamedSharding]) -> Program:
    """Returns the program with each lookup in a split table pinned. tables has the axes of each argument's dims."""
    inner = jx.body(program)
    dims, rename = dict(tables), dict[Var, Atom]()
    eqns: list[Equation] = []

    def pinned(var: Var, spec: PartitionSpec, like: Equation) -> Var:
        more, new = constraint_equations(var, sharding(spec), sharding(spec), like)
        eqns.extend(more)
        return new

    for equation in inner.eqns:
        invars = [rename.get(a, a) if jx.is_var(a) else a for a in equation.invars]
        if found := dict(_lookups(equation, dims)):
            invars = [pinned(a, PartitionSpec(), equation) if jx.is_var(a) and _is_index(a) else a for a in invars]
        eqns.append(equation.replace(invars=invars))
        rename |= {var: pinned(var, spec, equation) for var, spec in found.items()}
    outvars = [rename.get(a, a) if jx.is_var(a) else a for a in inner.outvars]
    return jx.with_body(program, eqns=eqns, outvars=outvars)


def _is_index(var: Var) -> bool:
    return bool(jx.shape_of(var)) and jnp.issubdtype(jx.dtype_of(var), jnp.integer)


def _lookups(equation: Equation, dims: dict[Var, Dims]) -> Iterator[tuple[Var, PartitionSpec]]:
    """The results of an equation that are rows of a split table, with their spec. Follows tables in `dims`."""
    table = equation.invars[0] if equation.invars else None
    if table is not None and jx.is_var(table) and table in dims:
        if equation.primitive.name in _KEEPS_DIMS:
            dims[equation.outvars[0]] = dims[table]
        elif equation.primitive.name == "sharding_constraint":
            dims[equation.outvars[0]] = sharding_dims(equation.params["sharding"], len(dims[table]))
        elif equation.primitive.name == "gather":
            numbers = equation.params["dimension_numbers"]
            looked_up: tuple[int, ...] = numbers.start_index_map
            if any(dims[table][d] for d in looked_up):
                rank = len(jx.shape_of(equation.outvars[0]))
                yield (
                    equation.outvars[0],
                    PartitionSpec(*[_FREE if d in numbers.offset_dims else None for d in range(rank)]),
                )
    for program in subprograms(equation):
        yield from _inside(equation, program, dims)


def _inside(equation: Equation, program: Program, dims: Mapping[Var, Dims]) -> Iterator[tuple[Var, PartitionSpec]]:
    """The same of what a program inside an equation looks up and returns."""
    inner = jx.body(program)
    pairs = zip(outer_operands(equation, program), inner.invars, strict=True)
    known = {var: dims[outer] for outer, var in pairs if outer is not None and jx.is_var(outer) and outer in dims}
    looked_up = dict(lookup for e in inner.eqns for lookup in _lookups(e, known)) if known else {}
    for outer, atom in zip(outer_results(equation, program), inner.outvars, strict=True):
        if outer is not None and jx.is_var(atom) and atom in looked_up:
            yield outer, looked_up[atom]
