"""Matmuls whose operands have dims of size 1, as those of a microbatch of one row.

XLA removes such a dim by a reshape for each matmul, and its partitioner gathers each of these arrays for itself. A value that is split,
and that several matmuls read whole, would be sent once for each of them. Here the dims are removed once for all matmuls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax

from jgt.program import jaxpr as jx
from jgt.program.jaxpr import Atom, Equation, Var
from jgt.program.parts import Flat, inlined
from jgt.program.tracing import result_of, trace


def without_unit_dims(flat: Flat) -> Flat:
    """The same program, in which matmuls read arrays without dims of size 1, but for those of a batch of matmuls."""
    made: dict[tuple[Atom, tuple[int, ...]], Var] = {}
    eqns: list[Equation] = []
    for equation in flat.eqns:
        if equation.primitive is not jax.lax.dot_general_p:
            eqns.append(equation)
            continue
        contracting, batch = equation.params["dimension_numbers"]
        removed = [_unit_dims(atom, of) for atom, of in zip(equation.invars, batch, strict=True)]
        wanted = list(zip(equation.invars, removed, strict=True))
        for atom, dims in wanted:
            if dims and jx.is_var(atom) and (atom, dims) not in made:
                program, _ = trace(partial(jax.lax.squeeze, dimensions=dims), jx.struct_of(atom))
                small = made[atom, dims] = jx.new_var_of(atom, [size for dim, size in enumerate(jx.shape_of(atom)) if dim not in dims])
                eqns += inlined(program, equation, [atom], [small])
        operands = [made.get(one, one[0]) for one in wanted]
        numbers = tuple(tuple(_renumbered(of, dims) for of, dims in zip(each, removed, strict=True)) for each in (contracting, batch))
        shape = jx.shape_of(equation.outvars[0])

        def multiplied(*xs: jax.Array, by: Equation = equation, numbers: object = numbers, shape: Sequence[int] = shape) -> jax.Array:
            return result_of(by, *xs, dimension_numbers=numbers).reshape(shape)

        program, _ = trace(multiplied, *map(jx.struct_of, operands))
        eqns += inlined(program, equation, operands, equation.outvars)
    return replace(flat, eqns=tuple(eqns))


def _unit_dims(atom: Atom, batch: Sequence[int]) -> tuple[int, ...]:
    return tuple(dim for dim, size in enumerate(jx.shape_of(atom)) if size == 1 and dim not in batch)


def _renumbered(dims: Sequence[int], removed: Sequence[int]) -> tuple[int, ...]:
    """The numbers that dims have after others were removed."""
    return tuple(dim - sum(one < dim for one in removed) for dim in dims if dim not in removed)
