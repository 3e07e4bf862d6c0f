"""Weights that travel in eight bits: gathered, when the model uses them, as blocks of int8 with one scale each.

With ZeRO-3 each device stores a part of a weight, and all devices bring the parts together before they multiply their rows with them.
If they round the parts to eight bits first, they send half of the bytes of bf16 (ZeRO++, arXiv 2306.10209, section 3.1). The forward pass
and its recompute both use the rounded weights. The rounding is a custom_vjp whose backward pass is the identity, so the gradient at the
rounded weights updates the exact ones, and is reduced as without a rule. Checkpoints and the optimizer see only the exact weights.

A block is a run of numbers along one dim within what one device has, so that the scale of a block is its device's own. The constraints
around the int8 array make XLA gather it in this type: pinned to where the weight is stored, then to where it is used.

A weight is gathered where it is used: inside the scan that slices its layer off the stack, and inside the `jax.checkpoint` around its use.
In each program that reads it, it is gathered once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jgt.program import jaxpr as jx
from jgt.program.constraints import traced_equations
from jgt.program.dims import Dims, num_parts, partition_spec
from jgt.program.jaxpr import Equation, Program, Var
from jgt.replicas import BLOCK, restored, rounded

GATHERED = "gathered_in_int8"
"""The name of the call that gathers a weight; it survives differentiation."""


@dataclass(frozen=True, kw_only=True)
class Gather:
    """How one weight is made whole, by the dims that its use sees.

    stored, whole: the mesh axes of each dim before and after. dim, block: of these many numbers along this dim is a block.
    """

    stored: Dims
    whole: Dims
    dim: int
    block: int


def block_of(shape: Sequence[int], dims: Dims, sizes: Mapping[str, int]) -> tuple[int, int] | None:
    """The dim and the length of the blocks of an array with these mesh axes; None if no dim has blocks of 128 to 256 numbers on a device.

    Shorter blocks would make more than half of bf16's bytes, because each has a scale in f32.
    """
    found: list[tuple[int, int, int]] = []
    for dim, (size, axes) in enumerate(zip(shape, dims, strict=True)):
        local, rest = divmod(size, num_parts(axes, sizes))
        length = 0 if rest else next((n for n in range(BLOCK, BLOCK // 2 - 1, -1) if local % n == 0), 0)
        found += [(length, dim, length)] if length else []
    # Of equal ones the last dim, whose numbers are neighbours in memory.
    _, dim, length = max(found, default=(0, 0, 0))
    return (dim, length) if length else None


@dataclass(frozen=True, kw_only=True)
class WithGathers:
    """A program whose weights are gathered in eight bits. problems: by argument number, why a weight could not be."""

    program: Program
    problems: Mapping[int, str]


def with_gathers(program: Program, gathers: Mapping[int, Gather], mesh: Mesh | AbstractMesh) -> WithGathers:
    """The program with these of its arguments gathered where they are used. mesh: of the constraints."""
    walk = _Walk(mesh)
    invars = jx.body(program).invars
    new = walk.program(program, {invars[number]: (number, gather) for number, gather in gathers.items()})
    missed = {number: "is not read in any place that could be found" for number in gathers if number not in walk.placed}
    return WithGathers(program=new, problems={**missed, **walk.problems})


@dataclass(frozen=True)
class GatherPolicy:
    """A policy of jax.checkpoint that keeps everything but gathered weights: what is made of arrays of these shapes alone."""

    shapes: frozenset[tuple[int, ...]]

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> bool:
        arrays = [aval.shape for aval in avals if aval.shape]
        return not (arrays and all(shape in self.shapes for shape in arrays))


def policy_of(program: Program) -> GatherPolicy | None:
    """The policy of a region around a program that gathers weights itself; None if it does not. Without it, each layer would keep them."""
    shapes = frozenset(_gathered_shapes(program))
    return GatherPolicy(shapes) if shapes else None


def _gathered_shapes(program: Program) -> Iterator[tuple[int, ...]]:
    """The shapes of weights that a program gathers, of their blocks and of the scales of these."""
    for equation in jx.body(program).eqns:
        inside = [one for part in jx.subprograms(equation) for one in jx.body(part).eqns] if jx.has_custom_derivative(equation) else []
        for one in filter(is_gathered, inside):
            yield jx.shape_of(one.outvars[0])
            yield from _pinned_shapes(one)
        if jx.is_call(equation):
            yield from _gathered_shapes(*jx.subprograms(equation))


def _pinned_shapes(equation: Equation) -> list[tuple[int, ...]]:
    """The shapes of numbers and of scales in the call that gathers a weight."""
    (inner,) = jx.subprograms(equation)
    return list(dict.fromkeys(jx.shape_of(e.outvars[0]) for e in jx.body(inner).eqns if e.primitive.name == "sharding_constraint"))


def is_gathered(equation: Equation) -> bool:
    """Whether an equation is the call that gathers a weight."""
    return jx.is_call(equation) and equation.params.get("name") == GATHERED and bool(equation.invars)


def share_of(equation: Equation) -> Fraction:
    """The bytes that travel for each number of a weight in this call: one, and the share of a scale in f32."""
    numbers, scales = _pinned_shapes(equation)
    return 1 + Fraction(4 * math.prod(scales), math.prod(numbers))


_Waiting = dict[Var, tuple[int, Gather]]


class _Walk:
    """One walk through a program. placed: the arguments that were gathered, by number. problems: why others could not be."""

    def __init__(self, mesh: Mesh | AbstractMesh):
        self._mesh = mesh
        self.placed: set[int] = set()
        self.problems: dict[int, str] = {}

    def program(self, program: Program, waiting: _Waiting) -> Program:
        """The program with the waiting variables gathered before the first equation that reads them."""
        eqns: list[Equation] = []
        gathered: dict[Var, Var] = {}
        for equation in jx.body(program).eqns:
            inside = self._inside(equation, waiting)
            here = [a for a in equation.invars if jx.is_var(a) and a in waiting and a not in inside]
            for var in dict.fromkeys(here):
                if var not in gathered:
                    eqns += self._placed(var, *waiting[var], equation, gathered)
            if not inside and not any(var in gathered for var in here):
                eqns.append(equation)
                continue
            invars = [gathered.get(a, a) if jx.is_var(a) and a not in inside else a for a in equation.invars]
            eqns.append(equation.replace(invars=invars, params=self._entered(equation, inside) or equation.params))
        return jx.with_body(program, eqns=eqns, outvars=jx.body(program).outvars)

    def _placed(self, var: Var, number: int, gather: Gather, like: Equation, gathered: dict[Var, Var]) -> list[Equation]:
        """The equations that gather a variable before this one reads it."""
        if why := _why_not(like, var, gather):
            self.problems.setdefault(number, why)
            return []
        self.placed.add(number)
        eqns, gathered[var] = traced_equations(_gathering(gather, self._mesh), var, like)
        return eqns

    def _inside(self, equation: Equation, waiting: _Waiting) -> _Waiting:
        """The operands that are gathered inside the program of an equation: those of calls and checkpoints, and what a scan goes over."""
        if not (jx.is_call(equation) or jx.is_remat(equation) or jx.is_scan(equation)):
            return {}
        (inner,) = jx.subprograms(equation)
        found: _Waiting = {}
        for outer, var in zip(jx.outer_operands(equation, inner), jx.body(inner).invars, strict=True):
            # What each pass of a loop reads again is gathered before the loop.
            if outer is None or not jx.is_var(outer) or outer not in waiting:
                continue
            if not jx.is_scan(equation) or len(jx.shape_of(var)) < len(jx.shape_of(outer)):
                found[outer] = waiting[outer]
        return found

    def _entered(self, equation: Equation, inside: _Waiting) -> dict[str, Any] | None:
        """The params of an equation whose program gathers these operands."""

        def change(inner: Program) -> Program:
            pairs = zip(jx.outer_operands(equation, inner), jx.body(inner).invars, strict=True)
            return self.program(
                inner, {var: inside[outer] for outer, var in pairs if outer is not None and jx.is_var(outer) and outer in inside}
            )

        return jx.map_subprograms(equation, change)


def _why_not(equation: Equation, var: Var, gather: Gather) -> str:
    """Why a weight cannot be gathered before an equation that reads it; empty if it can."""
    if len(jx.shape_of(var)) != len(gather.stored):
        return "is a stack of layers that no scan goes over, and would be gathered as a whole"
    if equation.primitive.name == "gather":
        return "is a table whose rows are looked up, and only the rows travel"
    return ""


def _gathering(gather: Gather, mesh: Mesh | AbstractMesh) -> Callable[[jax.Array], jax.Array]:
    """From a weight to its rounded values, gathered. The derivative is the identity's."""

    def pinned(x: jax.Array, dims: Dims) -> jax.Array:
        dims = (*dims[: gather.dim + 1], (), *dims[gather.dim + 1 :])
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, partition_spec(dims)))

    def gathered_in_int8(x: jax.Array) -> jax.Array:
        blocks = x.reshape(*x.shape[: gather.dim], -1, gather.block, *x.shape[gather.dim + 1 :])
        parts = rounded(blocks.astype(jnp.float32), gather.dim + 1)
        whole = [pinned(pinned(part, gather.stored), gather.whole) for part in parts]
        return restored(*whole).reshape(x.shape).astype(x.dtype)

    assert gathered_in_int8.__name__ == GATHERED
    # The call's name says to a plan what travels.
    forward = cast("Callable[[jax.Array], jax.Array]", jax.jit(gathered_in_int8))

    def with_residuals(x: jax.Array) -> tuple[jax.Array, None]:
        return forward(x), None

    def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
        return (cotangent,)

    gathered = cast("jax.custom_vjp[jax.Array]", jax.custom_vjp(forward))
    gathered.defvjp(with_residuals, backward)
    return gathered
