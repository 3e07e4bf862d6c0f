"""Replicas as a dim of arrays: [replicas, ...], split over the axes of the mesh between them.

A rule says that the batch is split over `pod` and `fsdp`, and XLA then adds up gradients over both wherever a gradient is made. A slow
axis needs something else: each pod computes with its own rows, and what crosses pods is decided by the program and not by the
partitioner. So a pod becomes an index. `map` is jax.vmap over that index with `spmd_axis_name`, by which JAX splits the new dim of every
value over the axis, and `jgt.shard` leaves the axis out of the constraints that it adds. The partitioner then has nothing to send between
pods, and inside a pod it has the program that it had before. A shard_map that is manual over the axis alone would be silent too, but XLA
partitions the gradients of tables in another way there, which sends up to a third more inside of a pod.

Whatever is mapped must be a function of its rows alone: a mean over the batch would become one over the rows of a replica.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jgt.program import scopes

_R = TypeVar("_R")


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
    def _name(self) -> str:
        """The name of the dim that `map` maps over."""
        return f"replicas over {' '.join(self.axes)}"

    def map(self, fn: Callable[..., _R], in_axes: Any = 0, out_axes: Any = 0) -> Callable[..., _R]:
        """fn for each replica: arguments and results are [R, ...]. in_axes, out_axes: jax.vmap's; None for what all replicas share."""
        return jax.vmap(fn, in_axes=in_axes, out_axes=out_axes, axis_name=self._name, spmd_axis_name=self.axes)

    def sum(self, x: jax.Array, num_devices: int) -> jax.Array:
        """Inside of `map`: the sum over all replicas, in the type of x, which is shared by `num_devices` devices of each replica."""
        with scopes.over_replicas(self.axes, x.size // num_devices):
            return cast(jax.Array, jax.lax.psum(x, self._name))

    def rows(self, batch: Any) -> Any:
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

    def add_up(self, x: jax.Array, dtype: Any, place: NamedSharding | None = None) -> jax.Array:
        """The sum over replicas, [R, ...] → [...]. dtype: the type in which it travels, and the result's.

        place: the sharding of the result. With it, a plan counts the sum as what replicas send, without it as the gradient of a parameter.
        """
        x = x.astype(dtype)
        numbers = None if place is None else math.prod(place.shard_shape(x.shape[1:]))
        with contextlib.nullcontext() if numbers is None else scopes.over_replicas(self.axes, numbers):
            # Not by jnp.sum, which would widen bf16 to f32.
            return jax.lax.reduce(x, jnp.zeros((), dtype), jax.lax.add, (0,))
