"""Arguments for a comparison, drawn where the caller gives only shapes: numbers that reach the boundaries of what they choose.

What XLA computes wrongly along a split dim is often at its ends: a slice that has to be clamped, an update behind the last row. So an
integer that starts slices, or names the rows of an update, is in turn the first place, the last one, one behind it and a negative one: JAX
says what each of them means. One that only reads rows of a table is in the table, because any other is the caller's mistake. Integers that
choose nothing are small and not negative: they may count, mask or select.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jgt.program import jaxpr as jx
from jgt.program.dataflow import is_random_key
from jgt.program.equations import outer_operands, subprograms
from jgt.program.jaxpr import Program

_NUM_DRAWS = 5
_MOST = 4
"""Integers that choose nothing are below this number."""
_FIRST_START = {"dynamic_slice": 1, "dynamic_update_slice": 2}
"""The first operand that is a start, of operations on slices."""


def draws(program: Program, given: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> list[list[jax.Array]]:
    """Arrays for the arguments of a program, one list or several: arrays that are given, and numbers in the place of shapes."""
    num_draws = 1
    if any(isinstance(x, jax.ShapeDtypeStruct) and jnp.issubdtype(x.dtype, jnp.integer) for x in given):
        num_draws = _NUM_DRAWS
    return [[_drawn(program, x, n, draw) for n, x in enumerate(given)] for draw in range(num_draws)]


def noise(shape: Sequence[int], dtype: DTypeLike, number: int) -> jax.Array:
    """Random numbers around zero."""
    return jnp.asarray(np.random.default_rng(number).standard_normal(shape, np.float32), dtype)


def _drawn(program: Program, x: jax.Array | jax.ShapeDtypeStruct, number: int, draw: int) -> jax.Array:
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(number), x.shape) if x.shape else jax.random.key(number)
    random: Any = np.random.default_rng(number)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return noise(x.shape, x.dtype, number)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.asarray(random.standard_normal(x.shape) + 1j * random.standard_normal(x.shape), x.dtype)
    if x.dtype == bool:
        return jnp.asarray(random.integers(0, 2, x.shape) == 1)
    if is_random_key(program, number):
        return jnp.asarray(random.integers(0, 2**16, x.shape), x.dtype)
    ends = [end for end in _ends(program, number) if end >= 0 or jnp.issubdtype(x.dtype, jnp.signedinteger)]
    if not x.shape:
        return jnp.asarray(ends[(draw + number) % len(ends)], x.dtype)
    # Some are anywhere between the ends, and in each draw others are the ends.
    inside: Any = random.integers(0, max(ends) + 1, x.shape)
    mixed = np.where(random.integers(0, 2, x.shape) == 0, np.resize(np.roll(ends, -draw), x.shape), inside)
    return jnp.asarray(mixed, x.dtype)


def _ends(program: Program, number: int) -> list[int]:
    """The numbers that an integer argument has at the boundaries of what it chooses."""
    chosen = list(_chosen(program, number))
    if not chosen:
        return list(range(_MOST))
    if not all(is_read for is_read, _ in chosen):
        last = max(last for is_read, last in chosen if not is_read)
        return [last + 1, 0, -1, last, -last - 6]
    last = min(last for _, last in chosen)
    return [0, last]


def _chosen(program: Program, number: int) -> Iterator[tuple[bool, int]]:
    """The last place that an argument, or integers made of it, can choose in each operation; and whether it only reads there."""
    reached = {jx.body(program).invars[number]}
    for equation in jx.body(program).eqns:
        at = [n for n, atom in enumerate(equation.invars) if jx.is_var(atom) and atom in reached]
        sizes = [jx.shape_of(atom) for atom in equation.invars]
        name, params = equation.primitive.name, equation.params
        if name in _FIRST_START and any(n >= _FIRST_START[name] for n in at):
            window = params["slice_sizes"] if name == "dynamic_slice" else sizes[1]
            dims = [n - _FIRST_START[name] for n in at if n >= _FIRST_START[name]]
            yield from ((False, sizes[0][dim] - window[dim]) for dim in dims)
        elif name == "gather" and 1 in at:
            dims = params["dimension_numbers"].start_index_map
            yield from ((True, sizes[0][dim] - params["slice_sizes"][dim]) for dim in dims)
        elif name.startswith("scatter") and 1 in at:
            yield from ((False, sizes[0][dim] - 1) for dim in params["dimension_numbers"].scatter_dims_to_operand_dims)
        elif at:
            for inner in subprograms(equation):
                for n, outer in enumerate(outer_operands(equation, inner)):
                    if outer is not None and jx.is_var(outer) and outer in reached:
                        yield from _chosen(inner, n)
            reached.update(var for var in equation.outvars if jx.is_integer(var))
