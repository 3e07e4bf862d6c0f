"""`jax.lax.ragged_dot` in the functions of experts, as programs that multiply each row by the matrix of its group alone.

    y = jax.lax.ragged_dot(rows, weights, sizes)     # rows [n, k], weights [e, k, m], sizes [e] → [n, m]

The first sizes[0] rows belong to group 0, the next sizes[1] to group 1, and so on. How long the groups are is known only when the program
runs, and XLA multiplies every row by the matrices of all groups on CPUs and on NVIDIA GPUs: e times the work. So the function that a model
passes to `signal.experts` is traced, and `with_grouped_matmuls` puts one of two programs in the place of each ragged_dot:

- JAX's own kernels for Hopper, in bf16, where widths are multiples of a tile. They come without a derivative, which is written out here.
- Otherwise a loop over blocks of b rows, one ordinary matmul each. A block begins at the first row of its group, or behind the group's
  block before it. Only the last block of a group reaches into other groups, whose rows are masked there.

A model that brings its derivative along (eight bits) calls `jax.lax.ragged_dot_general` in it, also with transposed matrices and for the
gradient of weights, where the rows of each group are contracted. These are replaced, too.

Rows behind the last group belong to none. Their results are not to be read: they are 0, or with Mosaic's kernels what was in memory.
Whatever is in these rows, and in their cotangents, does not reach the gradients of weights. Invariant: each row's result, and its gradient,
depends on that row and its group's matrix only.

n rows, k and m their widths, e groups, b rows of a block.
"""

from __future__ import annotations

import importlib
import re
import types
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.typing import DTypeLike

from jgt.program import jaxpr as jx
from jgt.program import scopes
from jgt.program.backward import map_backward
from jgt.program.equations import map_subprograms
from jgt.program.jaxpr import Equation, Program
from jgt.program.parts import inlined

_Matmul = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(rows [n, k], sizes [e], weights [e, k, m]) → [n, m], in the type of rows."""
_Residuals = tuple[jax.Array, jax.Array, jax.Array]


def with_grouped_matmuls(program: Program) -> Program:
    """The program with each ragged_dot replaced, also in the derivatives that functions bring along."""
    eqns: list[Equation] = []
    for equation in jx.body(program).eqns:
        if equation.primitive.name == "ragged_dot_general" and (run := _program_of(equation)) is not None:
            new = jax.make_jaxpr(run)(*[jx.struct_of(a) for a in equation.invars])
            eqns += inlined(new, equation, equation.invars, equation.outvars)
            continue
        changed = map_subprograms(equation, with_grouped_matmuls)
        eqns.append(map_backward(changed, lambda rule, _: with_grouped_matmuls(rule)))
    return jx.with_body(program, eqns=eqns, outvars=jx.body(program).outvars)


def _program_of(equation: Equation) -> Callable[..., jax.Array] | None:
    """A function from rows, weights and sizes to the result of an equation; None for other dims than above."""
    numbers, dtype = equation.params["ragged_dot_dimension_numbers"], jx.dtype_of(equation.outvars[0])
    (left, right), batch = numbers.dot_dimension_numbers
    parts: tuple[Sequence[int], ...] = (left, right, numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions, *batch)
    dims = tuple(tuple(part) for part in parts)
    if dims not in (_ROWS, _TRANSPOSED, _OUTER):
        return None

    def run(rows: jax.Array, other: jax.Array, sizes: jax.Array) -> jax.Array:
        if dims == _OUTER:
            return _outer_by_blocks(rows, other, sizes, dtype)
        # In the model's own type the result has a derivative.
        if dims == _ROWS and rows.dtype == other.dtype == dtype:
            return grouped(rows, sizes, other)
        return _by_blocks(rows, sizes, other, dtype, is_transposed=dims == _TRANSPOSED)

    return run


# The contracted dims of both sides, the rows' dim, the groups' dim, and the batch dims of both sides.
_ROWS = ((1,), (1,), (0,), (0,), (), ())
_TRANSPOSED = ((1,), (2,), (0,), (0,), (), ())
_OUTER = ((0,), (0,), (0,), (), (), ())


class _ByRows(Protocol):
    """Each row by its group's matrix, or by the transposed one: [n, m] → [n, k]."""

    def __call__(self, rows: jax.Array, sizes: jax.Array, weights: jax.Array, dtype: DTypeLike, *, is_transposed: bool) -> jax.Array: ...


def _differentiable(by_rows: _ByRows, outer: Callable[..., jax.Array]) -> _Matmul:
    """outer(rows [n, k], cotangents [n, m], sizes, dtype): each group's rows, transposed, by their cotangents, [e, k, m]."""

    def run(rows: jax.Array, sizes: jax.Array, weights: jax.Array) -> jax.Array:
        return by_rows(rows, sizes, weights, rows.dtype, is_transposed=False)

    def forward(rows: jax.Array, sizes: jax.Array, weights: jax.Array) -> tuple[jax.Array, _Residuals]:
        return run(rows, sizes, weights), (rows, sizes, weights)

    def backward(residuals: _Residuals, cotangent: jax.Array) -> tuple[jax.Array, None, jax.Array]:
        rows, sizes, weights = residuals
        by_row = by_rows(cotangent, sizes, weights, rows.dtype, is_transposed=True)
        return by_row, None, outer(rows, cotangent, sizes, weights.dtype).astype(weights.dtype)

    matmul = cast("jax.custom_vjp[jax.Array]", jax.custom_vjp(run))
    matmul.defvjp(forward, backward)
    return matmul


# -- blocks ------------------------------------------------------------------------------------------------------------


def block_rows(num_rows: int, num_groups: int) -> int:
    """The rows of a block: a power of two.

    Each block reads its group's whole matrix, so there should be few of them, but each group's last block computes rows in vain. An eighth
    of a group of middle size wastes one in sixteen.
    """
    eighth = num_rows // (8 * num_groups)
    return min(max(32, min(1 << max(eighth.bit_length() - 1, 0), 512)), num_rows)


def _by_blocks(rows: jax.Array, sizes: jax.Array, weights: jax.Array, dtype: DTypeLike, *, is_transposed: bool) -> jax.Array:
    """See `_ByRows`. dtype: the type of the results, to which both sides are cast."""
    b = block_rows(rows.shape[0], sizes.shape[0])
    contracted, width = (2, weights.shape[1]) if is_transposed else (1, weights.shape[2])

    def step(block: _Block, results: jax.Array) -> jax.Array:
        x = jax.lax.dynamic_slice_in_dim(rows, block.at, b).astype(dtype)
        # It keeps its dim of groups: a rule's spec for the weights has that dim.
        matrix = jax.lax.dynamic_slice_in_dim(weights, block.group, 1).astype(dtype)
        y = jax.lax.dot_general(x[None], matrix, (((2,), (contracted,)), ((0,), (0,))))[0]
        # Rows of other groups are left to other blocks.
        y = jnp.where(block.mask, y, jax.lax.dynamic_slice_in_dim(results, block.at, b))
        return jax.lax.dynamic_update_slice_in_dim(results, y, block.at, 0)

    return _over_blocks(step, jnp.zeros((rows.shape[0], width), dtype), sizes, rows.shape[0], b)


def _outer_by_blocks(rows: jax.Array, cotangent: jax.Array, sizes: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The rows of each group, transposed, by their cotangents: [n, k], [n, m] → [e, k, m]. Sums are f32 before they get this type."""
    b = block_rows(rows.shape[0], sizes.shape[0])

    def step(block: _Block, sums: jax.Array) -> jax.Array:
        # Both sides, because 0 times what is behind the last group may be NaN.
        x, c = (jnp.where(block.mask, jax.lax.dynamic_slice_in_dim(side, block.at, b), 0) for side in (rows, cotangent))
        if rows.dtype.itemsize == 1:
            # XLA recognises matmuls in eight bits by a cast in front of them.
            x, c = x.astype(jnp.float32), c.astype(jnp.float32)
        product = jax.lax.dot_general(x, c, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        total = cast(jax.Array, jax.lax.dynamic_index_in_dim(sums, block.group)) + product[None]
        return cast(jax.Array, jax.lax.dynamic_update_index_in_dim(sums, total, block.group, 0))

    zeros = jnp.zeros((sizes.shape[0], rows.shape[1], cotangent.shape[1]), jnp.float32)
    return _over_blocks(step, zeros, sizes, rows.shape[0], b).astype(dtype)


class _Block(NamedTuple):
    """A block: its group, its first row, and which of its rows belong to the group, [b, 1]."""

    group: jax.Array
    at: jax.Array
    mask: jax.Array


def _over_blocks(step: Callable[[_Block, jax.Array], jax.Array], start: jax.Array, sizes: jax.Array, num_rows: int, b: int) -> jax.Array:
    """The state after all blocks, from first to last."""
    num_groups = sizes.shape[0]
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    counts = -(-sizes.astype(jnp.int32) // b)
    last = jnp.cumsum(counts)

    def block(number: jax.Array) -> _Block:
        group = jnp.sum(number >= last, dtype=jnp.int32)
        begin = ends[group] - sizes[group] + (number - last[group] + counts[group]) * b
        # A slice cannot reach over the end, so there it starts among the rows before the block.
        at = jnp.minimum(begin, num_rows - b)
        row = at + jnp.arange(b, dtype=jnp.int32)
        return _Block(group, at, ((row >= begin) & (row < ends[group]))[:, None])

    def turn(number: jax.Array, state: jax.Array) -> jax.Array:
        return step(block(number), state)

    # Half of each group's last block is used. A plan reads from the names how many blocks to count, and how much of them is useful.
    expected = -(-num_rows // b) + num_groups // 2
    with scopes.trips(expected), scopes.useful(Fraction(num_rows, expected * b)):
        return cast(jax.Array, jax.lax.fori_loop(0, last[-1], turn, start))


by_blocks = _differentiable(_by_blocks, _outer_by_blocks)


# -- Mosaic's kernels --------------------------------------------------------------------------------------------------

_TILE = 128
"""Rows and columns of a tile of the result; 64 is contracted at a time."""
_TILES = {"block_m": _TILE, "block_n": _TILE, "block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 8}


# JAX lowers a kernel again for each trace of it, which takes a quarter of a second. An inlined jit traces it once for its shapes.
@partial(jax.jit, static_argnames=("dtype", "is_transposed"), inline=True)
def _mosaic_rows(rows: jax.Array, sizes: jax.Array, weights: jax.Array, dtype: DTypeLike, *, is_transposed: bool) -> jax.Array:
    made = _jax_kernels("ragged_dot_mgpu").ragged_dot(rows, weights, group_sizes=sizes, transpose_rhs=is_transposed, **_TILES)
    return made.astype(dtype)


@partial(jax.jit, static_argnames="dtype", inline=True)
def _mosaic_outer(rows: jax.Array, cotangent: jax.Array, sizes: jax.Array, dtype: DTypeLike) -> jax.Array:
    # The kernel reads whole tiles, and multiplies rows of one side by 0 that are not in the group.
    in_group = (jnp.arange(rows.shape[0]) < jnp.sum(sizes))[:, None]
    x, c = jnp.where(in_group, rows, 0), jnp.where(in_group, cotangent, 0)
    return _outer_kernel()(x, c, group_sizes=sizes, **_TILES).astype(dtype)


by_mosaic = _differentiable(_mosaic_rows, _mosaic_outer)


def _jax_kernels(name: str) -> types.ModuleType:
    # Imported when they are used: it takes most of a second, and machines without a GPU never need them.
    return importlib.import_module(f"jax.experimental.pallas.ops.gpu.{name}")


def _outer_kernel() -> Callable[..., jax.Array]:
    """JAX's kernel for the gradient of weights, for a GPU that need not be there.

    JAX's function asks the first device for its number of multiprocessors, which a CPU cannot answer when a program is compiled for a GPU
    that is only described. The count only affects how tiles are distributed, so the H100's value is safe everywhere.
    """
    jax_there = types.SimpleNamespace(**vars(jax))
    jax_there.devices = lambda: [types.SimpleNamespace(core_count=_MULTIPROCESSORS)]
    function = cast(types.FunctionType, _jax_kernels("transposed_ragged_dot_mgpu").transposed_ragged_dot)
    made = types.FunctionType(function.__code__, {**function.__globals__, "jax": jax_there})
    made.__kwdefaults__ = function.__kwdefaults__
    return made


_MULTIPROCESSORS = 132


def mosaic_obstacle(dtype: Any, device: Any) -> str:
    """Why the devices cannot run Mosaic's kernels on arrays of this type; empty if they can. device: one of them, None if unknown."""
    if device is None or "NVIDIA" not in device.device_kind:
        return "there is no NVIDIA GPU"
    # Wgmma is an instruction of Hopper alone.
    if not _HOPPER.search(device.device_kind):
        return f"Mosaic's kernels are for Hopper, not for {device.device_kind}"
    return "" if dtype == jnp.bfloat16 else "Mosaic's kernels need bf16"


_HOPPER = re.compile(r"\bG?H(20|100|200|800)\b")


def grouped(rows: jax.Array, sizes: jax.Array, weights: jax.Array) -> jax.Array:
    """Each row of a group by the group's matrix, [n, k], [e], [e, k, m] → [n, m]: by Mosaic's kernels where these arrays can have them."""
    # XLA cannot split a kernel over devices: over an axis that is left to it, it would run the whole kernel on each of them.
    mesh = jax.sharding.get_abstract_mesh()
    is_split = any(size > 1 and kind != AxisType.Manual for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True))
    has_tiles = rows.shape[0] >= _TILE and all(width % _TILE == 0 for width in weights.shape[1:])
    # Outside of a mesh the program is for the devices that are there.
    device: Any = mesh.abstract_device or cast(Any, jax.devices()[0])
    if is_split or not has_tiles or mosaic_obstacle(rows.dtype, device):
        return by_blocks(rows, sizes, weights)
    return by_mosaic(rows, sizes.astype(jnp.int32), weights.astype(rows.dtype))
