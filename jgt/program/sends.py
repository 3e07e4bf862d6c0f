"""What a traced program sends in its own words: the collectives of shard_map and of regions.

Such a collective is an equation with the mesh axes in it, so what a device sends follows from its operands and the ring algorithms, before
XLA has seen the program. Only the size of a number on the wire depends on XLA's backend: some send bf16 as it is, some widen it.

Invariant: bytes are those that one device sends in one run of the equation. The caller multiplies by the trips of the loops around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import jax.numpy as jnp

from jgt.program import jaxpr as jx
from jgt.program.jaxpr import Atom, Equation

_Axes = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Three things that XLA's backends do differently.

    sends_narrow: bf16 travels as bf16; otherwise every float travels in at least 4 bytes. scatters: forms reduce-scatters; otherwise
    an all-reduce takes its place, each device keeps a part, and a partial sum that was split so has to be gathered again. adds_first:
    adds partial sums to each other and reduces the result; otherwise it reduces each.
    """

    sends_narrow: bool
    scatters: bool
    adds_first: bool

    def bytes_of(self, atom: Atom) -> int:
        """The bytes of a value as the backend sends it."""
        return math.prod(jx.shape_of(atom)) * self.item_bytes(atom)

    def item_bytes(self, atom: Atom) -> int:
        """The bytes of one number of a value as the backend sends it."""
        dtype = jx.dtype_of(atom)
        is_widened = not self.sends_narrow and jnp.issubdtype(dtype, jnp.floating)
        return max(dtype.itemsize, 4) if is_widened else dtype.itemsize


CPU = Backend(sends_narrow=False, scatters=False, adds_first=False)
GPU = Backend(sends_narrow=True, scatters=True, adds_first=True)

_ON_DEVICES = "on_devices"
"""The primitive of `jgt.replacements`."""

_ALL_GATHERS = ("all_gather", "all_gather_invariant")
_RINGS: dict[str, Callable[[int], Fraction]] = {
    **dict.fromkeys(("psum", "psum_invariant"), lambda n: Fraction(2 * (n - 1), n)),
    **dict.fromkeys(_ALL_GATHERS, lambda n: Fraction(n - 1)),
    **dict.fromkeys(("reduce_scatter", "all_to_all"), lambda n: Fraction(n - 1, n)),
    "ppermute": lambda n: Fraction(1),
}
"""What a device sends in each collective of shard_map over n devices, as a multiple of its operand's bytes."""


def all_reduced(axes: Sequence[str], mesh: Mapping[str, int]) -> Fraction:
    """What a device sends in an all-reduce over mesh axes, as a multiple of its operand's bytes."""
    return _RINGS["psum"](math.prod(mesh[axis] for axis in axes))


def is_gather(equation: Equation) -> bool:
    """Whether an equation is an all-gather of shard_map."""
    return equation.primitive.name in _ALL_GATHERS


def is_sum(equation: Equation) -> bool:
    """Whether an equation adds up an array over dims of its own, which the partitioner may have split over devices."""
    return equation.primitive.name in ("reduce", "reduce_sum", "psum")


def is_on_devices(equation: Equation) -> bool:
    """Whether an equation is a region, whose plan sends what its sums need."""
    return equation.primitive.name == _ON_DEVICES


def sent(equation: Equation, mesh: Mapping[str, int], backend: Backend) -> tuple[_Axes, Fraction] | None:
    """The mesh axes of a collective and the bytes that a device sends in it; None if the equation sends nothing itself."""
    if is_on_devices(equation):
        return equation.params["plan"].sent(equation, mesh, backend.bytes_of)
    ring = _RINGS.get(equation.primitive.name)
    if ring is None:
        return None
    named = equation.params.get("axes", equation.params.get("axis_name", ()))
    axes = tuple(a for a in mesh if a in (named if isinstance(named, tuple | list) else (named,)) and mesh[a] > 1)
    if not axes:
        return None
    size = sum(backend.bytes_of(v) for v in equation.invars if jx.dtype_of(v) is not None)
    return axes, size * ring(math.prod(mesh[a] for a in axes))
