"""Functions of whole matrices, applied to sharded stacks of matrices.

Muon orthogonalises each weight matrix, which needs all of its rows and columns, but a stack of layers' matrices [layers, m, n]
is sharded over m and n. Gathering the whole stack on every device would compute each matrix once per device. Instead the axes move
from m and n to the stack dim: each device gets some of the matrices whole, computes them, and sends the results back by the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jgt.program.dims import Dims, partition_spec
from jgt.program.places import vmapped_axes

MatrixFn = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The steps from the layout of a stack [stack, ..., m, n] to one in which only its first dims are split.

    The stack dim is reshaped to [parts, rows], where `parts` is the number of parts in its own layout, and rows are padded by `padding`.
    layouts: the axes of the dims [parts, rows, ..., m, n] after each step. A step is either a slice or an all-to-all of the axes of
    one dim; asked for everything in a single step, XLA gathers the whole stack on every device.
    """

    parts: int
    padding: int
    layouts: tuple[Dims, ...]


def on_whole_matrices(fn: MatrixFn, x: jax.Array, dims: Dims, mesh: Mesh | AbstractMesh) -> jax.Array:
    """fn(x) for a function of matrices [..., m, n] that treats each matrix independently and maps a zero matrix to itself.

    x [stack, ..., m, n] has the axes `dims` before and after. In between, the stack is split over all axes of the mesh that can
    share it, so that nothing is computed twice. Axes that a vmap around the call has taken are left to it. A single matrix is left to
    XLA's partitioner.
    """
    if x.ndim < 3 or mesh.size == 1:
        return fn(x)
    taken = vmapped_axes()
    spread = spread_of(x.shape, dims, {axis: size for axis, size in mesh.shape.items() if axis not in taken})
    there = [NamedSharding(mesh, partition_spec(layout)) for layout in spread.layouts]
    rows = x.shape[0] // spread.parts
    x = x.reshape(spread.parts, rows, *x.shape[1:])
    # [parts, rows, ..., m, n]. The padding consists of zero matrices, which fn maps to themselves.
    y = jnp.pad(x, [(0, 0), (0, spread.padding), *[(0, 0)] * (x.ndim - 2)])
    for sharding in there:
        y = jax.lax.with_sharding_constraint(y, sharding)
    y = fn(y)
    for sharding in reversed(there):
        y = jax.lax.with_sharding_constraint(y, sharding)
    return y[:, :rows].reshape(-1, *x.shape[2:])


def spread_of(shape: Sequence[int], dims: Dims, mesh: Mapping[str, int]) -> Spread:
    """The steps for a stack of this shape whose dims have these axes, on a mesh of these sizes."""
    first, inner = dims[0], dims[1:-2]
    parts = math.prod(mesh[axis] for axis in first)
    rows = shape[0] // parts
    used = {axis for axes in dims for axis in axes}
    idle = [axis for axis in mesh if axis not in used]
    matrix = [axis for axes in dims[-2:] for axis in axes]
    # The axes of the matrix come first. They have to leave its dims in any case, and an all-to-all sends less than a
    # gather.
    shared = _sharing([*matrix, *idle], mesh, rows)
    # The slice comes first: less is sent after it.
    split = tuple(axis for axis in idle if axis in shared)
    layouts: list[Dims] = [(first, (), *inner, *dims[-2:]), (first, split, *inner, *dims[-2:])]
    for dim in (-2, -1):
        last = list(layouts[-1])
        split += tuple(axis for axis in dims[dim] if axis in shared)
        last[1], last[dim] = split, ()
        layouts.append(tuple(last))
    distinct = [layout for i, layout in enumerate(layouts) if i == 0 or layout != layouts[i - 1]]
    return Spread(parts=parts, padding=-rows % math.prod(mesh[axis] for axis in split), layouts=tuple(distinct))


def _sharing(axes: Sequence[str], mesh: Mapping[str, int], rows: int) -> set[str]:
    """The axes that leave each device the fewest rows. Ties go to the smallest product of sizes, then to the first axes."""
    # Sets of axes by the product of their sizes: two sets with the same product leave each device equally many rows.
    best: dict[int, tuple[str, ...]] = {1: ()}
    for axis in axes:
        # The older entry wins (`| best`), so ties go to the axes that come first.
        best = {product * mesh[axis]: (*names, axis) for product, names in best.items()} | best
    return set(best[min(best, key=lambda product: (-(-rows // product), product))])
