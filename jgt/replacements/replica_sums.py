"""Sums over replicas, [R, ...] → [...], in the type in which numbers travel: f32, bf16, or blocks of int8.

No collective adds up eight-bit numbers. Instead each replica sends part r of its numbers to replica r (all-to-all), which adds them up in
f32 and sends the sum to all (all-gather). Both ways 256 numbers travel as int8 with one scale in f32, their largest absolute value over
127: 0.254 of the bytes of a sum in f32. ZeRO++ (arXiv 2306.10209, section 3.3) does the same inside of a node. All replicas convert the
same bytes back, so the sums have equal bits everywhere. A block with a number that is not finite is NaN afterwards, so that a guard sees
it.

Every device exchanges its own shard with the devices that hold the same shard of other replicas, in a shard_map over all axes, since the
partitioner must not lay out anything anew. A device's arrays are one vector, so that short ones fill blocks too; only arrays that are
split over the same axes share blocks, or devices that hold the same array would round it with different neighbours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jgt.program import scopes
from jgt.program.dims import sharding_dims
from jgt.replacements.replicas import Replicas

WireType = Literal["f32", "bf16", "int8"]
BLOCK = 256
_TOP = 127.0
_Arrays = list[jax.Array]


def exchange(tree: Any, replicas: Replicas, shardings: Any, wire: WireType) -> Any:
    """The sum over replicas of each array of a tree, [R, ...] → [...] in f32. shardings: the results', which split all dims evenly."""
    leaves, structure = cast("tuple[_Arrays, Any]", jax.tree.flatten(tree))
    places: list[NamedSharding] = jax.tree.leaves(shardings)
    if wire != "int8":
        dtype = jnp.dtype(jnp.bfloat16 if wire == "bf16" else jnp.float32)
        sums = [replicas.add_up(x, dtype, place).astype(jnp.float32) for x, place in zip(leaves, places, strict=True)]
        return jax.lax.with_sharding_constraint(jax.tree.unflatten(structure, sums), shardings)
    groups = block_groups(leaves, places)

    def on_device(*local: jax.Array) -> _Arrays:
        # Each local array is [1, ...].
        sums = list(local)
        for group in groups:
            for i, total in zip(group, _summed([local[i][0].astype(jnp.float32) for i in group], replicas), strict=True):
                sums[i] = total
        for i in set(range(len(local))).difference(*groups):
            # An array that fills no block.
            sums[i] = cast(jax.Array, jax.lax.psum(local[i][0].astype(jnp.float32), replicas.axes))
        return sums

    lifted, whole = tuple(replicas.lift(place).spec for place in places), [place.spec for place in places]
    with scopes.over_replicas(replicas.axes):
        sums = jax.shard_map(on_device, mesh=replicas.mesh, in_specs=lifted, out_specs=whole, check_vma=False)(*leaves)
    return jax.tree.unflatten(structure, sums)


def block_groups(leaves: Sequence[Any], places: Sequence[NamedSharding]) -> list[list[int]]:
    """The numbers of the arrays [R, ...] that travel in blocks, by the axes that split them; others fill no block on a device."""
    groups: dict[frozenset[str], list[int]] = {}
    for index, (x, place) in enumerate(zip(leaves, places, strict=True)):
        shape = x.shape[1:]
        if math.prod(place.shard_shape(shape)) >= BLOCK:
            axes = frozenset(axis for axes in sharding_dims(place, len(shape)) for axis in axes if place.mesh.shape[axis] > 1)
            groups.setdefault(axes, []).append(index)
    return list(groups.values())


def _summed(arrays: _Arrays, replicas: Replicas) -> _Arrays:
    """The sums of a device's arrays over replicas, in a shard_map over all axes."""
    flat = jnp.concatenate([x.reshape(-1) for x in arrays])
    # [replicas, blocks, BLOCK]: part r goes to replica r.
    parts = jnp.pad(flat, (0, -flat.size % (replicas.count * BLOCK))).reshape(replicas.count, -1, BLOCK)
    own = [cast(jax.Array, jax.lax.all_to_all(x, replicas.axes, 0, 0)) for x in _to_int8(parts)]
    total = jnp.sum(_from_int8(*own), axis=0)  # [blocks, BLOCK]
    gathered = [cast(jax.Array, jax.lax.all_gather(x, replicas.axes)) for x in _to_int8(total)]
    whole = _from_int8(*gathered).reshape(-1)
    ends = [0, *itertools.accumulate(x.size for x in arrays)]
    return [whole[start:end].reshape(x.shape) for x, (start, end) in zip(arrays, itertools.pairwise(ends), strict=True)]


def _to_int8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Numbers [..., block] in int8, and the scale of each block, [..., 1]."""
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / _TOP
    return jnp.round(x / jnp.where(scale == 0, 1.0, scale)).astype(jnp.int8), scale


def _from_int8(numbers: jax.Array, scales: jax.Array) -> jax.Array:
    """The inverse of `_to_int8`, in f32."""
    # A scale that is not finite makes the block NaN, whatever the numbers are: infinity times zero is NaN, too.
    return numbers.astype(jnp.float32) * jnp.where(jnp.isfinite(scales), scales, jnp.nan)
