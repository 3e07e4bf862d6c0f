"""Single equations of a traced program are read here for the parameters that they use and the bytes that they send.

A program slices a layer off a stack of parameters, casts it, transposes it, pins it with a constraint, and then multiplies by it. A `View`
is such a part of one parameter, with the mesh axes over which each dim is split. The trail ends where another array is involved. A scan
over four stacked layers makes four views of a quarter each: one use in all.

Collectives of shard_map, and replaced pieces of program, are equations with the mesh axes in them. The bytes of one device and one run
follow from their operands and the ring algorithms. Only the size of a number on the wire depends on XLA's backend.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import jax.numpy as jnp

from jgt.program import jaxpr as jx
from jgt.program.dims import Dims, sharding_dims
from jgt.program.equations import subprograms
from jgt.program.jaxpr import Atom, Equation, Var
from jgt.replacements.device_plan import plan_of

MeshAxes = tuple[str, ...]


@dataclass(frozen=True)
class View:
    """An array made of one parameter alone.

    index: the number of the parameter. dims: the mesh axes of each dim. share: the part of the parameter (1/4: one of four layers). times:
    how often XLA makes it whole in a step. is_pinned: whether it is the result of a constraint.
    """

    index: int
    dims: Dims
    share: Fraction
    times: Fraction = Fraction(1)
    is_pinned: bool = False

    def axes(self, dims: Iterable[int] | None = None) -> set[str]:
        """The mesh axes of some dims, or of all."""
        return {axis for d in (range(len(self.dims)) if dims is None else dims) for axis in self.dims[d]}


Views = dict[Var, View]


def into(view: View, outer: Var, var: Var, times: Fraction) -> View:
    """A view as an operand of a program inside an equation, which runs `times` in a step."""
    gone = len(jx.shape_of(outer)) - len(jx.shape_of(var))
    # A scan takes slices along leading dims. XLA makes them whole inside the loop, and before it what all runs share.
    share = view.share / max(math.prod(jx.shape_of(outer)[:gone]), 1)
    return View(view.index, view.dims[gone:], share, times if gone else view.times)


def out_of(view: View, atom: Var, outer: Var, times: Fraction) -> View | None:
    """A view as a result of the equation around its program; None if it is something else there. A scan stacks what it keeps."""
    shape = jx.shape_of(outer)
    stacked = shape[: len(shape) - len(jx.shape_of(atom))]
    if shape != (*stacked, *jx.shape_of(atom)):
        return None
    return View(view.index, ((),) * len(stacked) + view.dims, view.share * math.prod(stacked), times)


def through(equation: Equation, views: Mapping[Var, View], times: Fraction) -> tuple[Var, View] | None:
    """The view that an equation takes, and what it makes of it; None if it does more than change its shape, type, layout or name."""
    # Scalars do not count as arrays: a parameter times a constant is still a view of it.
    sources = [a for a in equation.invars if jx.is_var(a) and a in views]
    arrays = [a for a in equation.invars if jx.shape_of(a)]
    if len(sources) != 1 or len(arrays) != 1 or len(equation.outvars) != 1 or any(True for _ in subprograms(equation)):
        return None
    view, before, after = views[sources[0]], jx.shape_of(sources[0]), jx.shape_of(equation.outvars[0])
    dims = _dims_after(equation, view.dims, before, after)
    if dims is None:
        return None
    # Slices are a smaller part of the parameter, but a broadcast is not a larger one.
    share = view.share * min(Fraction(math.prod(after), max(math.prod(before), 1)), Fraction(1))
    is_pinned = equation.primitive.name == "sharding_constraint"
    return sources[0], View(view.index, dims, share, times if is_pinned else view.times, is_pinned)


def contractions(equation: Equation, views: Mapping[Var, View]) -> Iterator[tuple[Var, set[str]]]:
    """The views that an equation multiplies or looks up, each with the mesh axes of the dims that it sums over."""
    summed: Sequence[Iterable[int]] = ()
    if equation.primitive.name == "dot_general":
        summed, _ = equation.params["dimension_numbers"]
    elif equation.primitive.name == "gather":
        # Each device finds the rows that it has, and zeros for the others: their sum is the result.
        summed = (equation.params["dimension_numbers"].start_index_map,)
    # A gather has the table first, then indices, which are not a parameter.
    for atom, dims in zip(equation.invars, summed, strict=False):
        if jx.is_var(atom) and atom in views:
            yield atom, views[atom].axes(dims)


def _dims_after(equation: Equation, dims: Dims, before: tuple[int, ...], after: tuple[int, ...]) -> Dims | None:
    if equation.primitive.name == "sharding_constraint":
        return sharding_dims(equation.params["sharding"], len(after))
    if equation.params.get("permutation") is not None:
        return tuple(dims[int(d)] for d in equation.params["permutation"])
    if len(after) == len(before):
        return dims
    # Layers are taken apart and stacked along leading dims; the dim that a matmul sums over is among the last, which stay.
    ends = zip(reversed(before), reversed(after), strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], ends))
    return ((),) * (len(after) - same) + dims[len(dims) - same :] if same else None


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
