"""Matmuls of rows that are sorted by group, each group with a matrix of its own, as a mixture of experts needs them.

    y = grouped(rows, sizes, weights)     # rows [n, k], sizes [e], weights [e, k, m] → [n, m]

The first sizes[0] rows belong to group 0, the next sizes[1] to group 1, and so on. How long the groups are is known only when the program
runs. `jax.lax.ragged_dot` says the same, but XLA multiplies every row by the matrices of all groups on CPUs and on NVIDIA GPUs: e times
the work. So there are two other programs here, and `choose_grouped` takes the first that a device can run:

- `by_mosaic`: the kernels for Hopper in JAX's own wheel. They come without a derivative, which is written out here.
- `grouped`: a loop over blocks of b rows, one ordinary matmul each. A block begins at the first row of its group, or behind the group's
  block before it. Only the last block of a group reaches into other groups, whose rows are masked there.

`grouped_in_eight_bits` is the same loop with the types of `eight_bits.py`. Each row has a scale of its own, because its result must not
depend on other rows, and each group's matrix has one. The gradient of weights is a sum over rows, so their scales cannot be taken out of
it: there each block has one.

Rows behind the last group belong to none. Their results are not to be read: they are 0, or of Mosaic's kernels what was in memory. Whatever
is in these rows, and in their cotangents, does not reach the gradients of weights. Invariant: each row's result, and its gradient, depends
on that row and its group's matrix only.

n rows, k and m their widths, e groups, b rows of a block.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
from flax import traceback_util
from jax.sharding import AxisType

from . import eight_bits

# A plan names the source line of each matmul. Without this it would be a line of this file for all of them, not the model's.
traceback_util.register_exclusion(__file__)

GroupedMatmul = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(rows [n, k], sizes [e], weights [e, k, m]) → [n, m], in the type of rows."""
_Residuals = tuple[jax.Array, jax.Array, jax.Array]


class _ByRows(Protocol):
    """Each row by its group's matrix, or by the transposed one: [n, m] → [n, k]."""

    def __call__(self, rows: jax.Array, sizes: jax.Array, weights: jax.Array, *, is_transposed: bool) -> jax.Array: ...


def _differentiable(by_rows: _ByRows, outer: GroupedMatmul) -> GroupedMatmul:
    """outer(rows [n, k], cotangents [n, m], sizes): each group's rows, transposed, by their cotangents, [e, k, m]."""

    @jax.custom_vjp
    def matmul(rows: jax.Array, sizes: jax.Array, weights: jax.Array) -> jax.Array:
        return by_rows(rows, sizes, weights, is_transposed=False)

    def forward(rows: jax.Array, sizes: jax.Array, weights: jax.Array) -> tuple[jax.Array, _Residuals]:
        return matmul(rows, sizes, weights), (rows, sizes, weights)

    def backward(residuals: _Residuals, cotangent: jax.Array) -> tuple[jax.Array, None, jax.Array]:
        rows, sizes, weights = residuals
        of_rows = by_rows(cotangent, sizes, weights, is_transposed=True)
        return of_rows.astype(rows.dtype), None, outer(rows, cotangent, sizes).astype(weights.dtype)

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


def _by_blocks(rows: jax.Array, sizes: jax.Array, weights: jax.Array, *, is_transposed: bool) -> jax.Array:
    def dot(x: jax.Array, group: jax.Array, contracted: int) -> jax.Array:
        # With its dim of groups: a rule's spec for the weights has that dim.
        matrix = jax.lax.dynamic_slice_in_dim(weights, group, 1).astype(x.dtype)
        return jax.lax.dot_general(x[None], matrix, (((2,), (contracted,)), ((0,), (0,))))[0]

    return _each_block(dot, rows, sizes, weights, rows.dtype, is_transposed=is_transposed)


def _each_block(
    dot: Callable[[jax.Array, jax.Array, int], jax.Array],
    rows: jax.Array,
    sizes: jax.Array,
    weights: jax.Array,
    dtype: Any,
    *,
    is_transposed: bool,
) -> jax.Array:
    """Results of this type for all rows. dot(rows of a block, their group, the dim of its matrix to contract)."""
    b = block_rows(rows.shape[0], sizes.shape[0])
    contracted, width = (2, weights.shape[1]) if is_transposed else (1, weights.shape[2])

    def step(block: _Block, results: jax.Array) -> jax.Array:
        y = dot(jax.lax.dynamic_slice_in_dim(rows, block.at, b), block.group, contracted)
        # Rows of other groups are left to other blocks.
        y = jnp.where(block.mask, y, jax.lax.dynamic_slice_in_dim(results, block.at, b))
        return jax.lax.dynamic_update_slice_in_dim(results, y, block.at, 0)

    return _over_blocks(step, jnp.zeros((rows.shape[0], width), dtype), sizes, rows.shape[0], b)


def _outer_by_blocks(rows: jax.Array, cotangent: jax.Array, sizes: jax.Array) -> jax.Array:
    def dot(x: jax.Array, c: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, c, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    return _sum_of_blocks(dot, rows, cotangent, sizes)


def _sum_of_blocks(dot: Callable[[jax.Array, jax.Array], jax.Array], rows: jax.Array, cotangent: jax.Array, sizes: jax.Array) -> jax.Array:
    """For each group, its rows transposed by their cotangents, as `dot` does for a block: [n, k], [n, m] → [e, k, m], f32."""
    b = block_rows(rows.shape[0], sizes.shape[0])

    def step(block: _Block, sums: jax.Array) -> jax.Array:
        # Both sides, because 0 times what is behind the last group may be NaN.
        x, c = (jnp.where(block.mask, jax.lax.dynamic_slice_in_dim(side, block.at, b), 0) for side in (rows, cotangent))
        total = jax.lax.dynamic_index_in_dim(sums, block.group) + dot(x, c)[None]
        return jax.lax.dynamic_update_index_in_dim(sums, total, block.group, 0)

    return _over_blocks(step, jnp.zeros((sizes.shape[0], rows.shape[1], cotangent.shape[1]), jnp.float32), sizes, rows.shape[0], b)


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

    # Half of each group's last block is used. A plan reads from the names how many blocks to count, and how much of them is useful.
    expected = -(-num_rows // b) + num_groups // 2
    with jax.named_scope(f"jgt.trips.{expected}"), jax.named_scope(f"jgt.useful.{num_rows}of{expected * b}"):
        return jax.lax.fori_loop(0, last[-1], lambda number, state: step(block(number), state), start)


grouped = _differentiable(_by_blocks, _outer_by_blocks)
"""Each row of a group by the group's matrix, on any device: [n, k], [e], [e, k, m] → [n, m] in the type of rows."""


# -- blocks in eight bits ----------------------------------------------------------------------------------------------


def _eight_by_blocks(rows: jax.Array, sizes: jax.Array, weights: jax.Array, *, is_transposed: bool) -> jax.Array:
    # Transposed, the rows are cotangents.
    x, of_rows = eight_bits.scaled(rows, jnp.float8_e5m2 if is_transposed else jnp.float8_e4m3fn, over=(1,))
    w, of_groups = eight_bits.scaled(weights, jnp.float8_e4m3fn, over=(1, 2))

    def dot(x: jax.Array, group: jax.Array, contracted: int) -> jax.Array:
        # XLA takes a scale for a part of its own matmul only if it is a scalar.
        matrix, scale = jax.lax.dynamic_slice_in_dim(w, group, 1), of_groups[group].reshape(())
        return eight_bits.scaled_dot((x[None], jnp.float32(1)), (matrix, scale), (0, 2), (0, contracted), rows.dtype)

    y = _each_block(dot, x, sizes, weights, rows.dtype, is_transposed=is_transposed)
    return (y * of_rows).astype(rows.dtype)


def _eight_outer(rows: jax.Array, cotangent: jax.Array, sizes: jax.Array) -> jax.Array:
    def dot(x: jax.Array, c: jax.Array) -> jax.Array:
        sides = eight_bits.scaled(x, jnp.float8_e4m3fn), eight_bits.scaled(c, jnp.float8_e5m2)
        return eight_bits.scaled_dot(*sides, (0,), (0,), jnp.float32)

    return _sum_of_blocks(dot, rows, cotangent, sizes)


grouped_in_eight_bits = _differentiable(_eight_by_blocks, _eight_outer)
"""`grouped` with rows and weights in e4m3, cotangents in e5m2, and sums in f32."""


# -- Mosaic's kernels --------------------------------------------------------------------------------------------------

_TILE = 128
"""Rows and columns of a tile of the result; 64 is contracted at a time."""
_TILES = {"block_m": _TILE, "block_n": _TILE, "block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 8}


def by_mosaic(rows: jax.Array, sizes: jax.Array, weights: jax.Array) -> jax.Array:
    """`grouped` by the kernels for Hopper where these arrays can have them, by blocks otherwise."""
    # XLA cannot split a kernel over devices: over an axis that is left to it, it would run the whole kernel on each of them.
    mesh = jax.sharding.get_abstract_mesh()
    is_split = any(size > 1 and kind != AxisType.Manual for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True))
    widths = weights.shape[1:]
    has_tiles = rows.shape[0] >= _TILE and all(width % _TILE == 0 for width in widths)
    if is_split or not has_tiles or rows.dtype != jnp.bfloat16:
        return grouped(rows, sizes, weights)
    return _mosaic(rows, sizes.astype(jnp.int32), weights.astype(rows.dtype))


def _mosaic_rows(rows: jax.Array, sizes: jax.Array, weights: jax.Array, *, is_transposed: bool) -> jax.Array:
    return _jax_kernels("ragged_dot_mgpu").ragged_dot(rows, weights, group_sizes=sizes, transpose_rhs=is_transposed, **_TILES)


def _mosaic_outer(rows: jax.Array, cotangent: jax.Array, sizes: jax.Array) -> jax.Array:
    # The kernel reads whole tiles, and multiplies rows of one side by 0 that are not in the group.
    in_group = (jnp.arange(rows.shape[0]) < jnp.sum(sizes))[:, None]
    x, c = jnp.where(in_group, rows, 0), jnp.where(in_group, cotangent, 0)
    return _outer_kernel()(x, c, group_sizes=sizes, **_TILES)


_mosaic = _differentiable(_mosaic_rows, _mosaic_outer)


def _jax_kernels(name: str) -> Any:
    # Imported when they are used: it takes most of a second, and machines without a GPU never need them.
    return importlib.import_module(f"jax.experimental.pallas.ops.gpu.{name}")


def _outer_kernel() -> Callable[..., jax.Array]:
    """JAX's kernel for the gradient of weights, for a GPU that need not be there.

    JAX's function asks the first device for its number of multiprocessors, which a CPU cannot answer when a program is compiled for a GPU
    that is only described. The number says how the tiles are dealt out, not which there are, so that of the H100 and H200 will do.
    """
    jax_there = types.SimpleNamespace(**vars(jax))
    jax_there.devices = lambda: [types.SimpleNamespace(core_count=_MULTIPROCESSORS)]
    function = cast(types.FunctionType, _jax_kernels("transposed_ragged_dot_mgpu").transposed_ragged_dot)
    made = types.FunctionType(function.__code__, {**function.__globals__, "jax": jax_there})
    made.__kwdefaults__ = function.__kwdefaults__
    return made


_MULTIPROCESSORS = 132


def choose_grouped(dtype: str, device: Any, *, fp8: bool = False) -> tuple[GroupedMatmul, str]:
    """The grouped matmul for a model with these `model.dtype` and `model.fp8`, and its name as in the log.

    device: as for `choose_attention`.
    """
    if fp8:
        return grouped_in_eight_bits, "blocks of rows in eight bits"
    obstacle = _mosaic_obstacle(dtype, device)
    return (grouped, f"blocks of rows ({obstacle})") if obstacle else (by_mosaic, "Mosaic's kernels")


def _mosaic_obstacle(dtype: str, device: Any) -> str:
    if device is None or device.platform != "gpu" or "NVIDIA" not in device.device_kind:
        return "there is no NVIDIA GPU"
    # Wgmma is an instruction of Hopper alone.
    if (capability := str(getattr(device, "compute_capability", ""))) != "9.0":
        return f"Mosaic's kernels need compute capability 9.0, which is Hopper's, not {capability or 'an unknown one'}"
    return "" if dtype == "bf16" else "Mosaic's kernels need model.dtype: bf16"
