"""Replicas as a dim of arrays: [replicas, ...], split over the axes of the mesh between them.

A rule says that the batch is split over `pod` and `fsdp`, and XLA then adds up gradients over both wherever a gradient is made. A slow
axis needs something else: each pod computes with its own rows, and what crosses pods is decided by the program and not by the
partitioner. So a pod becomes an index. `map` is jax.vmap over that index with `spmd_axis_name`, by which JAX splits the new dim of every
value over the axis, and `jgt.shard` leaves the axis out of the constraints that it adds. The partitioner then has nothing to send between
pods, and inside a pod it has the program that it had before. A shard_map that is manual over the axis alone would be silent too, but XLA
partitions the gradients of tables in another way there, which sends up to a third more inside of a pod.

Whatever is mapped must be a function of its rows alone: a mean over the batch would become one over the rows of a replica.

Replicas add up what they have in f32, in bf16, or in blocks of int8. No collective adds up eight-bit numbers. Instead each replica sends
part r of its numbers to replica r (all-to-all), which adds them up in f32 and sends the sum to all (all-gather). Both ways 256 numbers
travel as int8 with one scale in f32, their largest absolute value over 127: 0.254 of the bytes of a sum in f32. ZeRO++ (arXiv 2306.10209,
section 3.3) does the same inside of a node. All replicas convert the same bytes back, so the sums have equal bits everywhere. A block with
a number that is not finite is NaN afterwards, so that a guard sees it.

Every device exchanges its own shard with the devices that hold the same shard of other replicas, in a shard_map over all axes, since the
partitioner must not lay out anything anew. A device's arrays are one vector, so that short ones fill blocks too; only arrays that are split
over the same axes travel together, or devices that hold the same array would round it with different neighbours.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jgt.program import scopes
from jgt.program.dims import num_parts, sharding_dims
from jgt.replacements.layers import num_turns, with_turns

BLOCK = 256
_TOP = 127.0
_R = TypeVar("_R")
_Arrays = list[jax.Array]


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """The replicas along `axes` of a mesh, major to minor. batch: the axes that split the rows of a batch; `axes` are some of them."""

    mesh: Mesh | AbstractMesh
    axes: tuple[str, ...]
    batch: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.axes or not set(self.axes) <= set(self.batch) or not set(self.batch) <= set(self.mesh.axis_names):
            raise ValueError(f"replicas along {self.axes} need these axes among those of the batch {self.batch}, and the mesh needs both")

    @property
    def count(self) -> int:
        """The number of replicas, R."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def name(self) -> str:
        """The name of the dim that `map` maps over."""
        return f"replicas over {' '.join(self.axes)}"

    def map(self, fn: Callable[..., _R], in_axes: Any = 0, out_axes: Any = 0) -> Callable[..., _R]:
        """fn for each replica: arguments and results are [R, ...]. in_axes, out_axes: jax.vmap's; None for what all replicas share."""
        return jax.vmap(fn, in_axes=in_axes, out_axes=out_axes, axis_name=self.name, spmd_axis_name=self.axes)

    def rows(self, batch: _R) -> _R:
        """The rows of each replica, [b, ...] → [R, b / R, ...]. None of them moves to another device."""
        sizes = [self.mesh.shape[axis] for axis in self.batch]
        own = [dim for dim, axis in enumerate(self.batch) if axis in self.axes]
        order = [*own, *(dim for dim in range(len(sizes)) if dim not in own)]

        def split(x: jax.Array) -> jax.Array:
            if own == list(range(len(own))):
                return x.reshape(self.count, -1, *x.shape[1:])
            # One dim for each axis of the batch, first the replicas' axes.
            x = x.reshape(*sizes, -1, *x.shape[1:])
            return x.transpose(*order, *range(len(sizes), x.ndim)).reshape(self.count, -1, *x.shape[len(sizes) + 1 :])

        return jax.tree.map(split, batch)

    def lift(self, sharding: NamedSharding) -> NamedSharding:
        """The sharding of [R, ...], from the sharding of what each replica has."""
        return NamedSharding(sharding.mesh, PartitionSpec(self.axes, *sharding.spec), memory_kind=sharding.memory_kind)

    def add_up(self, x: jax.Array, dtype: DTypeLike, place: NamedSharding | None = None) -> jax.Array:
        """The sum over replicas, [R, ...] → [...]. dtype: the type in which it travels, and the result's.

        place: the sharding of the result. With it, a plan counts the sum as what replicas send, without it as the gradient of a parameter.
        """
        x = x.astype(dtype)
        numbers = None if place is None else math.prod(place.shard_shape(x.shape[1:]))
        with contextlib.nullcontext() if numbers is None else scopes.over_replicas(self.axes, numbers):
            # Not by jnp.sum, which would widen bf16 to f32.
            return jax.lax.reduce(x, jnp.zeros((), dtype), jax.lax.add, (0,))

    def exchange(self, tree: object, shardings: object, wire: Literal["f32", "bf16", "int8"]) -> Any:
        """The sum over replicas of each array of a tree, [R, ...] → [...] in f32, which travels as `wire` says.

        shardings: the results', which split all dims evenly.
        """
        leaves, structure = cast("tuple[_Arrays, Any]", jax.tree.flatten(tree))
        places: list[NamedSharding] = jax.tree.leaves(shardings)
        if wire != "int8":
            dtype = jnp.dtype(jnp.bfloat16 if wire == "bf16" else jnp.float32)
            sums = [self.add_up(x, dtype, place).astype(jnp.float32) for x, place in zip(leaves, places, strict=True)]
            return jax.lax.with_sharding_constraint(jax.tree.unflatten(structure, sums), shardings)
        groups = block_groups(leaves, places)

        def on_device(*local: jax.Array) -> _Arrays:
            # Each local array is [1, ...].
            sums = list(local)
            for group in groups:
                for i, total in zip(group, self._summed_in_int8([local[i][0].astype(jnp.float32) for i in group]), strict=True):
                    sums[i] = total
            for i in set(range(len(local))).difference(*groups):
                # An array that fills no block.
                sums[i] = cast(jax.Array, jax.lax.psum(local[i][0].astype(jnp.float32), self.axes))
            return sums

        lifted, whole = tuple(self.lift(place).spec for place in places), [place.spec for place in places]
        with scopes.over_replicas(self.axes):
            sums = jax.shard_map(on_device, mesh=self.mesh, in_specs=lifted, out_specs=whole, check_vma=False)(*leaves)
        return jax.tree.unflatten(structure, sums)

    def _summed_in_int8(self, arrays: _Arrays) -> _Arrays:
        """The sums of a device's arrays over replicas, in a shard_map over all axes."""
        flat = jnp.concatenate([x.reshape(-1) for x in arrays])
        # [replicas, blocks, BLOCK]: part r goes to replica r.
        parts = jnp.pad(flat, (0, -flat.size % (self.count * BLOCK))).reshape(self.count, -1, BLOCK)
        own = [cast(jax.Array, jax.lax.all_to_all(x, self.axes, 0, 0)) for x in _to_int8(parts)]
        total = jnp.sum(_from_int8(*own), axis=0)  # [blocks, BLOCK]
        gathered = [cast(jax.Array, jax.lax.all_gather(x, self.axes)) for x in _to_int8(total)]
        whole = _from_int8(*gathered).reshape(-1)
        ends = [0, *itertools.accumulate(x.size for x in arrays)]
        return [whole[start:end].reshape(x.shape) for x, (start, end) in zip(arrays, itertools.pairwise(ends), strict=True)]

    def differentiate_beside_sums(
        self,
        loss: Callable[[Any, Any, Any], tuple[jax.Array, object]],
        params: object,
        variables: object,
        rows: object,
        waiting: object,
        *,
        gradients: object,
        sums: object,
        region: Callable[[], contextlib.AbstractContextManager[object]],
    ) -> tuple[jax.Array, Any, Any]:
        """The values [R] and gradients f32[R, ...] of loss(params, variables, rows of a replica), and the sums f32[...] of what waits.

        Each turn of the loss's scan over layers adds up a part of the arrays that wait, [R, ...], in their type, so that XLA runs the sums
        beside the layers. Arrays without a dim that the number of turns divides are added up outside of the scan. gradients, sums:
        shardings, without R. region: the region of the sums.
        """
        flat, structure = cast("tuple[_Arrays, Any]", jax.tree.flatten(waiting))
        places: list[NamedSharding] = jax.tree.leaves(sums)
        cuts = _LayerCuts(
            replicas=self, shapes=[x.shape[1:] for x in flat], places=places, turns=self._turns(loss, params, variables, rows)
        )

        def of_turn(parts: list[_Arrays]) -> _Arrays:
            with region():
                return cuts.of_turn(parts)

        def differentiated(rows: object, parts: list[_Arrays]) -> tuple[jax.Array, Any, _Arrays]:
            def run(params: object) -> tuple[jax.Array, _Arrays]:
                (value, _), made = with_turns(loss, (params, variables, rows), parts, of_turn)
                return value, made

            (value, made), by_params = jax.value_and_grad(run, has_aux=True)(params)
            return value, jax.tree.map(_in_f32, by_params), made

        values, made, parts = self.map(differentiated, (0, 0), (0, 0, None))(rows, cuts.cut(flat))
        made = jax.lax.with_sharding_constraint(made, jax.tree.map(self.lift, gradients))
        joined = cuts.join(parts) | {n: self.add_up(flat[n], flat[n].dtype, places[n]) for n in cuts.uncut}
        whole = jax.lax.with_sharding_constraint([joined[n].astype(jnp.float32) for n in range(len(flat))], places)
        return values, made, jax.tree.unflatten(structure, whole)

    def _turns(self, loss: Callable[..., object], params: object, variables: object, rows: object) -> int:
        """The length of the loss's scan over layers."""
        lengths: list[int] = []

        def probe(rows: object) -> jax.Array:
            lengths.append(num_turns(loss, params, variables, rows))
            return jnp.zeros(())

        # Under the map, where the loss is traced anyway.
        jax.eval_shape(self.map(probe), rows)
        return lengths[0]


def block_groups(leaves: Sequence[jax.Array], places: Sequence[NamedSharding]) -> list[list[int]]:
    """The numbers of the arrays [R, ...] that travel in blocks, by the axes that split them; others fill no block on a device."""
    groups: dict[frozenset[str], list[int]] = {}
    for index, (x, place) in enumerate(zip(leaves, places, strict=True)):
        shape = x.shape[1:]
        if math.prod(place.shard_shape(shape)) >= BLOCK:
            axes = frozenset(axis for axes in sharding_dims(place, len(shape)) for axis in axes if place.mesh.shape[axis] > 1)
            groups.setdefault(axes, []).append(index)
    return list(groups.values())


def _in_f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _to_int8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Numbers [..., block] in int8, and the scale of each block, [..., 1]."""
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / _TOP
    return jnp.round(x / jnp.where(scale == 0, 1.0, scale)).astype(jnp.int8), scale


def _from_int8(numbers: jax.Array, scales: jax.Array) -> jax.Array:
    """The inverse of `_to_int8`, in f32."""
    # A scale that is not finite makes the block NaN, whatever the numbers are: infinity times zero is NaN, too.
    return numbers.astype(jnp.float32) * jnp.where(jnp.isfinite(scales), scales, jnp.nan)


class _LayerCuts:
    """Arrays of replicas, [R, ...] each, that are cut into a part for each turn of a scan.

    A part is a run of entries along a dim that no mesh axis splits. The parts of arrays that are split over the same axes travel as one,
    since the sum of each would be several kernels in each turn. shapes, places: the arrays', without R. turns: the length of the scan; 0
    without one. groups: for such axes, the number of each array and the dim along which it is cut.
    """

    def __init__(self, *, replicas: Replicas, shapes: Sequence[tuple[int, ...]], places: Sequence[NamedSharding], turns: int):
        self._replicas, self._shapes, self._places, self._turns = replicas, shapes, places, turns
        self.groups: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        for n, (shape, place) in enumerate(zip(shapes, places, strict=True)):
            dims, sizes = sharding_dims(place, len(shape)), place.mesh.shape
            free = (d for d, (size, axes) in enumerate(zip(shape, dims, strict=True)) if size % turns == 0 and num_parts(axes, sizes) == 1)
            dim = next(free, None) if turns > 1 else None
            if dim is not None:
                named = {axis for axes in dims for axis in axes if sizes[axis] > 1}
                self.groups.setdefault(tuple(axis for axis in place.mesh.axis_names if axis in named), []).append((n, dim))
        self._numbers = [n for cuts in self.groups.values() for n, _ in cuts]

    @property
    def uncut(self) -> list[int]:
        """The numbers of the arrays that cannot be cut."""
        return [n for n in range(len(self._places)) if n not in self._numbers]

    def cut(self, arrays: Sequence[jax.Array]) -> list[_Arrays]:
        """The parts of each group's arrays on each device: [R, turns, devices, numbers]. Nothing moves to another device."""

        def on_device(*local: jax.Array) -> list[_Arrays]:
            return [[_cut(local[n][0], dim, self._turns)[None, :, None] for n, dim in cuts] for cuts in self.groups.values()]

        lifted = tuple(self._replicas.lift(place).spec for place in self._places)
        made = [[PartitionSpec(self._replicas.axes, None, axes or None)] * len(cuts) for axes, cuts in self.groups.items()]
        return jax.shard_map(on_device, mesh=self._replicas.mesh, in_specs=lifted, out_specs=made, check_vma=False)(*arrays)

    def of_turn(self, parts: list[_Arrays]) -> _Arrays:
        """The sum of each group, [devices, numbers], from the parts of one turn. To be called inside of `Replicas.map`."""
        return [self._sum(jnp.concatenate(arrays, axis=-1), axes) for arrays, axes in zip(parts, self.groups, strict=True)]

    def _sum(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        replicas = self._replicas
        with scopes.over_replicas(replicas.axes, x.size // math.prod(replicas.mesh.shape[axis] for axis in axes)):
            return cast(jax.Array, jax.lax.psum(x, replicas.name))

    def join(self, sums: Sequence[jax.Array]) -> dict[int, jax.Array]:
        """The arrays [...] by number, from the sums of all turns, [turns, devices, numbers]."""

        def on_device(*local: jax.Array) -> _Arrays:
            arrays: _Arrays = []
            for whole, cuts in zip(local, self.groups.values(), strict=True):
                own = [self._places[n].shard_shape(self._shapes[n]) for n, _ in cuts]
                ends = [0, *itertools.accumulate(math.prod(shape) // self._turns for shape in own)]
                for (_, dim), shape, (start, end) in zip(cuts, own, itertools.pairwise(ends), strict=True):
                    arrays.append(_joined(whole[:, 0, start:end], dim, shape, self._turns))
            return arrays

        made = tuple(PartitionSpec(None, axes or None) for axes in self.groups)
        specs = [self._places[n].spec for n in self._numbers]
        arrays = jax.shard_map(on_device, mesh=self._replicas.mesh, in_specs=made, out_specs=specs, check_vma=False)(*sums)
        return dict(zip(self._numbers, arrays, strict=True))


def _cut(x: jax.Array, dim: int, turns: int) -> jax.Array:
    """[turns, numbers]: each turn has a run of entries along a dim."""
    return jnp.moveaxis(x.reshape(*x.shape[:dim], turns, -1, *x.shape[dim + 1 :]), dim, 0).reshape(turns, -1)


def _joined(x: jax.Array, dim: int, shape: tuple[int, ...], turns: int) -> jax.Array:
    """The inverse of `_cut`."""
    parts = x.reshape(turns, *shape[:dim], shape[dim] // turns, *shape[dim + 1 :])
    return jnp.moveaxis(parts, 0, dim).reshape(shape)
