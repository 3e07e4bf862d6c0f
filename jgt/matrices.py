"""Functions of whole matrices on stacks of them that are sharded: every device brings its own matrices together, and no two the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jgt.rewrite import Dims, partition_spec

MatrixFn = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a stack [stack, ..., m, n] comes from its own layout to one where its first dim alone is split, and back.

    The first dim stands as [parts, rows], parts being those of its own layout; rows are padded. layouts: the dims' axes of
    [parts, rows, ..., m, n], one move after the other, each of one kind: a slice, or an all-to-all of the axes of one dim. In a
    single one XLA would bring the whole stack to every device.
    """

    parts: int
    padding: int
    layouts: tuple[Dims, ...]


def on_whole_matrices(fn: MatrixFn, x: jax.Array, dims: Dims, mesh: Mesh | AbstractMesh) -> jax.Array:
    """fn(x), which maps matrices [..., m, n] to matrices of that shape, each by itself; a zero matrix to itself.

    x [stack, ..., m, n] has the axes `dims` before and after. In between the stack is split over all axes of the mesh that can
    share it, so that nothing is computed twice. A single matrix is left to the partitioner.
    """
    if x.ndim < 3 or mesh.size == 1:
        return fn(x)
    spread = spread_of(x.shape, dims, mesh.shape)
    there = [NamedSharding(mesh, partition_spec(layout)) for layout in spread.layouts]
    rows = x.shape[0] // spread.parts
    x = x.reshape(spread.parts, rows, *x.shape[1:])
    y = jnp.pad(x, [(0, 0), (0, spread.padding), *[(0, 0)] * (x.ndim - 2)])
    for sharding in there:
        y = jax.lax.with_sharding_constraint(y, sharding)
    y = fn(y)
    for sharding in reversed(there):
        y = jax.lax.with_sharding_constraint(y, sharding)
    return y[:, :rows].reshape(-1, *x.shape[2:])


def spread_of(shape: Sequence[int], dims: Dims, mesh: Mapping[str, int]) -> Spread:
    """The way of a stack of this shape whose dims have these axes, over a mesh of these sizes."""
    first, inner = dims[0], dims[1:-2]
    parts = math.prod(mesh[axis] for axis in first)
    rows = shape[0] // parts
    used = {axis for axes in dims for axis in axes}
    idle = [axis for axis in mesh if axis not in used]
    matrix = [axis for axes in dims[-2:] for axis in axes]
    shared = _sharing([*matrix, *idle], mesh, rows)
    # A slice first: what is sent after it is less.
    split = tuple(axis for axis in idle if axis in shared)
    layouts = [(first, (), *inner, *dims[-2:]), (first, split, *inner, *dims[-2:])]
    for dim in (-2, -1):
        last = list(layouts[-1])
        split += tuple(axis for axis in dims[dim] if axis in shared)
        last[1], last[dim] = split, ()
        layouts.append(tuple(last))
    distinct = [layout for i, layout in enumerate(layouts) if i == 0 or layout != layouts[i - 1]]
    return Spread(parts=parts, padding=-rows % math.prod(mesh[axis] for axis in split), layouts=tuple(distinct))


def _sharing(axes: Sequence[str], mesh: Mapping[str, int], rows: int) -> set[str]:
    """The axes that leave a device the fewest rows: of those the smallest product, and of the same product the first axes."""
    found: dict[int, tuple[str, ...]] = {1: ()}
    for axis in axes:
        found = {product * mesh[axis]: (*names, axis) for product, names in found.items()} | found
    return set(found[min(found, key=lambda product: (-(-rows // product), product))])
