"""The scan over the layers of a model, which a traced program shows without a word in the model.

`recomputed` puts a policy of `jax.checkpoint` around the bodies of the scans that go over stacked parameters [layers, ...]. What is kept
changes no result.

`with_turns` adds work to each turn of the scan over the most bytes, so that XLA runs it beside the layers' own. XLA starts and ends a
collective in the same loop body, or outside of all loops. So the devices wait for a collective that precedes or follows a scan over layers,
unless each turn of the scan runs a part of it, which needs nothing that the turn computes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import jax

from jgt.program import jaxpr as jx
from jgt.program.constraints import wrap_in_checkpoint
from jgt.program.dims import Dims
from jgt.program.equations import is_scan, map_subprograms, scan_sizes, subprograms
from jgt.program.jaxpr import Equation, Var
from jgt.program.parts import Flat, flatten, inlined
from jgt.program.tracing import evaluate, trace
from jgt.replacements.gradients import with_parameters_followed

_F = TypeVar("_F", bound=Callable[..., object])
_R = TypeVar("_R")
_Parts = TypeVar("_Parts")
_Arrays = list[jax.Array]


def recomputed(fn: _F, policy: Callable[..., bool], *, missing: Exception) -> _F:
    """fn(params, ...) whose layers keep for the backward pass what the policy says, and compute the rest again.

    Raises `missing` where fn is called, if no scan goes over its parameters.
    """

    @functools.wraps(fn)
    def run(params: object, *args: object, **kwargs: object) -> object:
        given = params, args, kwargs
        num_layers = 0

        def call(params: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
            return fn(params, *args, **kwargs)

        def change(equation: Equation, known: Mapping[Var, Dims]) -> list[Equation] | None:
            nonlocal num_layers
            if not is_scan(equation):
                return None
            if not any(jx.is_var(a) and a in known for a in equation.invars[sum(scan_sizes(equation)) :]):
                return [equation]
            num_layers += 1
            return [map_subprograms(equation, lambda body: wrap_in_checkpoint(body, policy, in_scan=True))]

        program, tree = trace(call, *given)
        known: dict[Var, Dims] = dict.fromkeys(jx.body(program).invars[: len(jax.tree.leaves(params))], ())
        changed = with_parameters_followed(program, known, change)
        if not num_layers:
            raise missing
        return jax.tree.unflatten(tree, evaluate(changed, jax.tree.leaves(given)))

    return cast(_F, run)


def num_turns(fn: Callable[..., object], *args: object) -> int:
    """The length of the scan over layers in fn(*args); 0 without one."""
    flat = flatten(trace(fn, *args)[0])
    number = _layers(flat)
    return 0 if number is None else flat.eqns[number].params["length"]


def with_turns(fn: Callable[..., _R], args: Sequence[object], parts: _Parts, of_turn: Callable[[_Parts], _Arrays]) -> tuple[_R, _Arrays]:
    """fn(*args), and the results of `of_turn`, which each turn of the scan over layers calls with its own of the parts [turns, ...]."""
    if not parts:
        return fn(*args), []
    program, tree = trace(fn, *args)
    flat = flatten(program)
    number = _layers(flat)
    assert number is not None, "only a scan has turns"
    results, own = _run(flat, number, jax.tree.leaves(args), parts, of_turn), len(flat.outvars)
    return jax.tree.unflatten(tree, results[:own]), results[own:]


def _layers(flat: Flat) -> int | None:
    """The number of the equation that is the scan over layers."""

    def scanned(equation: Equation) -> int:
        fixed = sum(scan_sizes(equation))
        return sum(math.prod(jx.shape_of(a)) for a in equation.invars[fixed:])

    scans = [n for n, equation in enumerate(flat.eqns) if is_scan(equation)]
    return max(scans, key=lambda n: scanned(flat.eqns[n]), default=None)


def _run(flat: Flat, number: int, leaves: Sequence[jax.Array], parts: _Parts, of_turn: Callable[[_Parts], _Arrays]) -> _Arrays:
    """The results of a program whose scan gets the parts too, and then the results of `of_turn`."""
    scan, (flat_parts, tree) = flat.eqns[number], cast("tuple[_Arrays, Any]", jax.tree.flatten(parts))
    (body,) = subprograms(scan)
    num_consts, num_carry = scan_sizes(scan)
    first, count = num_consts + num_carry, len(scan.invars)

    def loop(*operands: jax.Array) -> _Arrays:
        constants, carry = operands[:num_consts], list(operands[num_consts:first])

        def turn(carry: _Arrays, both: tuple[_Arrays, _Arrays]) -> tuple[_Arrays, tuple[_Arrays, _Arrays]]:
            xs, own = both
            after = evaluate(body, [*constants, *carry, *xs])
            return after[:num_carry], (after[num_carry:], of_turn(jax.tree.unflatten(tree, own)))

        params = {name: scan.params[name] for name in ("length", "reverse", "unroll")}
        carry, (ys, sums) = jax.lax.scan(turn, carry, (list(operands[first:count]), list(operands[count:])), **params)
        return [*carry, *ys, *sums]

    program, _ = trace(loop, *[a.aval for a in scan.invars], *[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat_parts])
    inner = jx.body(program)
    inputs = [jx.new_var_like(v) for v in inner.invars[count:]]
    made = [jx.new_var_like(cast(Var, v)) for v in inner.outvars[len(scan.outvars) :]]
    eqns = inlined(program, scan, [*scan.invars, *inputs], [*scan.outvars, *made])
    whole = replace(flat, eqns=(*flat.eqns[:number], *eqns, *flat.eqns[number + 1 :]), outvars=(*flat.outvars, *made))
    new = jx.program_of(whole.program, [*whole.invars, *whole.consts, *inputs], whole.eqns, whole.outvars)
    return evaluate(new, [*leaves, *whole.consts.values(), *flat_parts])
