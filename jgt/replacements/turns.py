"""Work that is added to each turn of the scan over layers, so that XLA runs it beside the layers' own.

XLA starts and ends a collective in the same loop body, or outside of all loops. So the devices wait for a collective that precedes or
follows a scan over layers, unless each turn of the scan runs a part of it, which needs nothing that the turn computes. The scan over the
most bytes of a program is taken as the layers'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import jax

from jgt.program import jaxpr as jx
from jgt.program.jaxpr import Equation, Var
from jgt.program.parts import Flat, flatten, inlined

_R = TypeVar("_R")
_Arrays = list[jax.Array]


def num_turns(fn: Callable[..., Any], *args: Any) -> int:
    """The length of the scan over layers in fn(*args); 0 without one."""
    flat = flatten(jx.trace(fn, *args)[0])
    number = _layers(flat)
    return 0 if number is None else flat.eqns[number].params["length"]


def with_turns(fn: Callable[..., _R], args: Sequence[Any], parts: Any, of_turn: Callable[[Any], _Arrays]) -> tuple[_R, _Arrays]:
    """fn(*args), and the results of `of_turn`, which each turn of the scan over layers calls with its own of the parts [turns, ...]."""
    if not parts:
        return fn(*args), []
    program, tree = jx.trace(fn, *args)
    flat = flatten(program)
    number = _layers(flat)
    assert number is not None, "only a scan has turns"
    results, own = _run(flat, number, jax.tree.leaves(args), parts, of_turn), len(flat.outvars)
    return jax.tree.unflatten(tree, results[:own]), results[own:]


def _layers(flat: Flat) -> int | None:
    """The number of the equation that is the scan over layers."""

    def scanned(equation: Equation) -> int:
        fixed = sum(jx.scan_sizes(equation))
        return sum(math.prod(jx.shape_of(a)) for a in equation.invars[fixed:])

    scans = [n for n, equation in enumerate(flat.eqns) if jx.is_scan(equation)]
    return max(scans, key=lambda n: scanned(flat.eqns[n]), default=None)


def _run(flat: Flat, number: int, leaves: Sequence[Any], parts: Any, of_turn: Callable[[Any], _Arrays]) -> _Arrays:
    """The results of a program whose scan gets the parts too, and then the results of `of_turn`."""
    scan, (flat_parts, tree) = flat.eqns[number], cast("tuple[_Arrays, Any]", jax.tree.flatten(parts))
    (body,) = jx.subprograms(scan)
    num_consts, num_carry = jx.scan_sizes(scan)
    first, count = num_consts + num_carry, len(scan.invars)

    def loop(*operands: jax.Array) -> _Arrays:
        constants, carry = operands[:num_consts], list(operands[num_consts:first])

        def turn(carry: _Arrays, both: tuple[_Arrays, _Arrays]) -> tuple[_Arrays, tuple[_Arrays, _Arrays]]:
            xs, own = both
            after = jx.evaluate(body, [*constants, *carry, *xs])
            return after[:num_carry], (after[num_carry:], of_turn(jax.tree.unflatten(tree, own)))

        params = {name: scan.params[name] for name in ("length", "reverse", "unroll")}
        carry, (ys, sums) = jax.lax.scan(turn, carry, (list(operands[first:count]), list(operands[count:])), **params)
        return [*carry, *ys, *sums]

    program, _ = jx.trace(loop, *[a.aval for a in scan.invars], *[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat_parts])
    inner = jx.body(program)
    inputs = [jx.new_var_like(v) for v in inner.invars[count:]]
    made = [jx.new_var_like(cast(Var, v)) for v in inner.outvars[len(scan.outvars) :]]
    eqns = inlined(program, scan, [*scan.invars, *inputs], [*scan.outvars, *made])
    whole = replace(flat, eqns=(*flat.eqns[:number], *eqns, *flat.eqns[number + 1 :]), outvars=(*flat.outvars, *made))
    new = jx.program_of(whole.program, [*whole.invars, *whole.consts, *inputs], whole.eqns, whole.outvars)
    return jx.evaluate(new, [*leaves, *whole.consts.values(), *flat_parts])
