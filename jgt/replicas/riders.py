"""Sums that ride along in the scan over layers, so that XLA runs them beside the layers' own work.

XLA starts and ends a collective in the same loop body, or outside of all loops. A sum over replicas that stands beside a scan over layers
is thus not hidden by it: the devices wait for it, before the scan or after it. Here each turn of the scan adds up one part of the arrays,
which needs nothing that the turn computes. Of the scans in a program, the one that goes over the most bytes is taken: the layers.

A part is a run of entries along a dim that no mesh axis splits. Arrays without a dim that the number of layers divides stay outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jgt.program import jaxpr as jx
from jgt.program.dims import num_parts, sharding_dims
from jgt.program.jaxpr import Equation, Var
from jgt.program.parts import Flat, flatten

_R = TypeVar("_R")
Added = Callable[[jax.Array], jax.Array]


def with_riders(
    fn: Callable[..., _R], args: Sequence[Any], riders: Sequence[jax.Array], places: Sequence[NamedSharding], added: Added
) -> tuple[_R, list[jax.Array]]:
    """fn(*args), and `added` of each rider. Added part by part in the turns of the scan over layers, where there is one.

    places: the shardings of the riders. added: a function of a part, the same for every entry of the other dims.
    """
    leaves, tree = jax.tree.flatten(tuple(args))

    def of_leaves(*leaves: Any) -> _R:
        return fn(*jax.tree.unflatten(tree, leaves))

    program, out_tree = jx.trace(of_leaves, *leaves)
    flat = flatten(program)
    number = _layers(flat)
    turns = 0 if number is None else flat.eqns[number].params["length"]
    dims = [_dim_of(x.shape, place, turns) for x, place in zip(riders, places, strict=True)]
    inside = [n for n, dim in enumerate(dims) if dim is not None]
    found = {n: added(x) for n, x in enumerate(riders) if n not in inside}
    if number is None or not inside:
        return fn(*args), [found[n] for n in range(len(riders))]
    cut = [_cut(riders[n], cast(int, dims[n]), turns) for n in inside]
    results = _run(flat, number, leaves, cut, added)
    own = len(flat.outvars)
    for n, x in zip(inside, results[own:], strict=True):
        found[n] = _joined(x, cast(int, dims[n]))
    return jax.tree.unflatten(out_tree, results[:own]), [found[n] for n in range(len(riders))]


def _layers(flat: Flat) -> int | None:
    """The number of the equation that is the scan over layers."""

    def scanned(equation: Equation) -> int:
        fixed = sum(jx.scan_sizes(equation))
        return sum(math.prod(jx.shape_of(a)) for a in equation.invars[fixed:])

    scans = [n for n, equation in enumerate(flat.eqns) if jx.is_scan(equation)]
    return max(scans, key=lambda n: scanned(flat.eqns[n]), default=None)


def _run(flat: Flat, number: int, leaves: Sequence[Any], riders: Sequence[jax.Array], added: Added) -> list[jax.Array]:
    """The results of a program whose scan takes the riders along, and then what became of them."""
    scan = flat.eqns[number]
    (body,) = jx.subprograms(scan)
    num_consts, num_carry = jx.scan_sizes(scan)
    first, count = num_consts + num_carry, len(scan.invars)

    def loop(*operands: jax.Array) -> list[jax.Array]:
        constants, carry = operands[:num_consts], list(operands[num_consts:first])

        def turn(carry: list[jax.Array], both: tuple[list[jax.Array], list[jax.Array]]) -> tuple[list[jax.Array], Any]:
            xs, parts = both
            after = jx.evaluate(body, [*constants, *carry, *xs])
            return after[:num_carry], (after[num_carry:], [added(x) for x in parts])

        params = {name: scan.params[name] for name in ("length", "reverse", "unroll")}
        carry, (ys, sums) = jax.lax.scan(turn, carry, (list(operands[first:count]), list(operands[count:])), **params)
        return [*carry, *ys, *sums]

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in riders]
    program, _ = jx.trace(loop, *[a.aval for a in scan.invars], *shapes)
    inner = jx.body(program)
    inputs = [jx.new_var_like(v) for v in inner.invars[count:]]
    made = [jx.new_var_like(cast(Var, v)) for v in inner.outvars[len(scan.outvars) :]]
    eqns = jx.inlined(program, scan, [*scan.invars, *inputs], [*scan.outvars, *made])
    whole = replace(flat, eqns=(*flat.eqns[:number], *eqns, *flat.eqns[number + 1 :]), outvars=(*flat.outvars, *made))
    new = jx.program_of(whole.program, [*whole.invars, *whole.consts, *inputs], whole.eqns, whole.outvars)
    return jx.evaluate(new, [*leaves, *whole.consts.values(), *riders])


def _dim_of(shape: tuple[int, ...], place: NamedSharding, turns: int) -> int | None:
    """The dim along which an array is cut into a part for each turn; None if there is none."""
    dims = enumerate(zip(shape, sharding_dims(place, len(shape)), strict=True))
    free = (dim for dim, (size, axes) in dims if turns > 1 and size % turns == 0 and num_parts(axes, place.mesh.shape) == 1)
    return next(free, None)


def _cut(x: jax.Array, dim: int, turns: int) -> jax.Array:
    return jnp.moveaxis(x.reshape(*x.shape[:dim], turns, -1, *x.shape[dim + 1 :]), dim, 0)


def _joined(x: jax.Array, dim: int) -> jax.Array:
    x = jnp.moveaxis(x, 0, dim)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])
