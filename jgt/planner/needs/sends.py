"""The bytes that a traced program sends in its own words: in collectives of shard_map and of replaced pieces of program.

Such a collective is an equation with the mesh axes in it, so the bytes that a device sends follow from its operands and the ring
algorithms, before XLA has seen the program. Only the size of a number on the wire depends on XLA's backend.

Invariant: bytes are of one device and of one run of the equation. The caller multiplies by the trips of the loops around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import jax.numpy as jnp

from jgt.program import jaxpr as jx
from jgt.program.jaxpr import Atom, Equation
from jgt.replacements.device_plan import plan_of

MeshAxes = tuple[str, ...]


@dataclass(frozen=True)
class Backend:
    """XLA's backend for GPUs or for CPUs.

    On GPUs, bf16 travels as bf16, partial sums are added to each other before they are reduced, and reduce-scatters exist. On CPUs, every
    float travels in at least 4 bytes, each partial sum is reduced, and an all-reduce takes the place of a reduce-scatter: each device
    keeps a part of its result, which a later reader has to gather again.
    """

    is_gpu: bool

    def bytes_of(self, atom: Atom) -> int:
        """The bytes of a value on the wire."""
        return math.prod(jx.shape_of(atom)) * self.item_bytes(atom)

    def item_bytes(self, atom: Atom) -> int:
        """The bytes of one number of a value on the wire."""
        dtype = jx.dtype_of(atom)
        is_widened = not self.is_gpu and jnp.issubdtype(dtype, jnp.floating)
        return max(dtype.itemsize, 4) if is_widened else dtype.itemsize


CPU = Backend(is_gpu=False)
GPU = Backend(is_gpu=True)

_ALL_GATHERS = ("all_gather", "all_gather_invariant")
_RINGS: dict[str, Callable[[int], Fraction]] = {
    **dict.fromkeys(("psum", "psum_invariant"), lambda n: Fraction(2 * (n - 1), n)),
    **dict.fromkeys(_ALL_GATHERS, lambda n: Fraction(n - 1)),
    **dict.fromkeys(("reduce_scatter", "all_to_all"), lambda n: Fraction(n - 1, n)),
    "ppermute": lambda n: Fraction(1),
}
"""The bytes that a device sends in each collective of shard_map over n devices, as a multiple of its operand's."""


def all_reduced(num_devices: int) -> Fraction:
    """The bytes that a device sends in an all-reduce, as a multiple of its operand's."""
    return _RINGS["psum"](num_devices)


def is_gather(equation: Equation) -> bool:
    """Whether an equation is an all-gather of shard_map."""
    return equation.primitive.name in _ALL_GATHERS


def sent(equation: Equation, mesh: Mapping[str, int], backend: Backend) -> tuple[MeshAxes, Fraction] | None:
    """The mesh axes of a collective and the bytes that a device sends in it; None if the equation sends nothing itself."""
    if (plan := plan_of(equation)) is not None:
        return plan.sent(equation, mesh, backend.bytes_of)
    ring = _RINGS.get(equation.primitive.name)
    if ring is None:
        return None
    named = equation.params.get("axes", equation.params.get("axis_name", ()))
    axes = tuple(a for a in mesh if a in (named if isinstance(named, tuple | list) else (named,)) and mesh[a] > 1)
    if not axes:
        return None
    size = sum(backend.bytes_of(v) for v in equation.invars if jx.dtype_of(v) is not None)
    return axes, size * ring(math.prod(mesh[a] for a in axes))
