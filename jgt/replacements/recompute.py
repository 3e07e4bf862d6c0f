"""A policy of `jax.checkpoint` around the layers of a model that somebody else wrote.

A model's layers are a scan that goes over stacked parameters [layers, ...]. A traced program shows which scans do, so the policy can be put
around their bodies without a word in the model. What is kept changes no result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax

from jgt.document import InputError
from jgt.program import jaxpr as jx
from jgt.program.constraints import wrap_in_checkpoint
from jgt.program.jaxpr import Equation, Program, Var

_F = TypeVar("_F", bound=Callable[..., Any])
_SAME = ("convert_element_type", "copy", "name", "sharding_constraint")


def recomputed(fn: _F, policy: Callable[..., bool], *, missing: str) -> _F:
    """fn(params, ...) whose layers keep for the backward pass what the policy says, and compute the rest again.

    Raises InputError with `missing` where fn is called, if no scan goes over its parameters.
    """

    @functools.wraps(fn)
    def run(params: Any, *args: Any, **kwargs: Any) -> Any:
        given = params, args, kwargs

        def call(params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return fn(params, *args, **kwargs)

        program, tree = jx.trace(call, *given)
        walk = _Walk(policy)
        changed = walk.program(program, set(jx.body(program).invars[: len(jax.tree.leaves(params))]))
        if not walk.num_layers:
            raise InputError([missing])
        return jax.tree.unflatten(tree, jx.evaluate(changed, jax.tree.leaves(given)))

    return cast(_F, run)


class _Walk:
    """One walk through a program. num_layers: the number of scans over parameters that it met."""

    def __init__(self, policy: Callable[..., bool]):
        self._policy = policy
        self.num_layers = 0

    def program(self, program: Program, params: set[Var]) -> Program:
        """The program with its layers changed. params: the parameters among its arguments; casts of them are added."""
        eqns = [self._equation(equation, params) for equation in jx.body(program).eqns]
        return jx.with_body(program, eqns=eqns, outvars=jx.body(program).outvars)

    def _equation(self, equation: Equation, params: set[Var]) -> Equation:
        operands = [jx.is_var(a) and a in params for a in equation.invars]
        if equation.primitive.name in _SAME and operands[0]:
            params.add(equation.outvars[0])
        if jx.is_scan(equation) and any(operands[sum(jx.scan_sizes(equation)) :]):
            self.num_layers += 1
            return self._changed(equation, lambda body: wrap_in_checkpoint(body, self._policy, in_scan=True))
        if any(operands) and (jx.is_call(equation) or jx.is_remat(equation)):
            return self._changed(equation, lambda inner: self._entered(equation, inner, params))
        return equation

    def _entered(self, equation: Equation, inner: Program, params: set[Var]) -> Program:
        pairs = zip(equation.invars, jx.body(inner).invars, strict=True)
        known = {var for a, var in pairs if jx.is_var(a) and a in params}
        new = self.program(inner, known)
        params.update(var for var, atom in zip(equation.outvars, jx.body(inner).outvars, strict=True) if jx.is_var(atom) and atom in known)
        return new

    def _changed(self, equation: Equation, change: Callable[[Program], Program]) -> Equation:
        params = jx.map_subprograms(equation, change)
        return equation if params is None else equation.replace(params=params)
