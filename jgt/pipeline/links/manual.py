"""A shard_map of every replica: under a vmap over axes of the mesh (`Replicas.map`), and with axes left to the partitioner.

JAX maps a shard_map by adding the axes of the vmap to its specs, so they have to be among its manual axes, and inside its arrays keep a
dim of one replica. A shard_map inside of it, which is manual over further axes, would be mapped in the same way and refused, because the
axes of the vmap are manual already. Here the outer one gets its own batching rule: the dim of replicas is split where it begins and added
where it ends, and between the two each replica has the program that it would have alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec

_R = TypeVar("_R")

Manual = Callable[[Callable[..., Any], Sequence[str], Any, Any], Callable[..., Any]]
"""(fn, axes, in_specs, out_specs) → fn in a shard_map over these axes."""


def manual_of_replicas(
    manual: Manual,
    fn: Callable[..., _R],
    replicas: Mapping[str, int],
    axes: Sequence[str],
    in_specs: tuple[Any, ...],
    out_specs: tuple[Any, ...],
) -> Callable[..., _R]:
    """fn in a shard_map over `axes`, to be called inside of a vmap with the `replicas` as its `spmd_axis_name`, or of none.

    fn sees one replica's arrays, local over `axes`, and returns a tuple. Arguments without a dim of replicas are the same for all of them.
    replicas: the axes of the vmap with their sizes. in_specs, out_specs: jax.shard_map's, for one replica's arrays. The call raises
    ValueError for a vmap with another number of entries.
    """
    if not replicas:
        return manual(fn, axes, in_specs, out_specs)
    run, num_replicas, names = custom_vmap(manual(fn, axes, in_specs, out_specs)), math.prod(replicas.values()), tuple(replicas)

    def lifted(spec: PartitionSpec, is_mapped: bool = True) -> PartitionSpec:
        return PartitionSpec(names, *spec) if is_mapped else spec

    def of_all(count: int, is_mapped: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        if count != num_replicas:
            raise ValueError(
                f"a vmap with spmd_axis_name {', '.join(names)} around a pipelined function has {count} entries, and the mesh "
                f"{num_replicas} devices along it. Map over as many, with one vmap"
            )
        # By argument, as the arguments are: custom_vmap passes a list.
        which = tuple(is_mapped)

        def of_one(*local: Any) -> Any:
            return jax.tree.map(with_dim, fn(*jax.tree.map(without_dim, local, which)))

        ahead = jax.tree.map(lifted, jax.tree.broadcast(in_specs, args), which)
        results = manual(of_one, (*names, *axes), ahead, jax.tree.map(lifted, out_specs))(*args)
        return results, jax.tree.map(_is_mapped, results)

    run.def_vmap(of_all)
    return cast("Callable[..., _R]", run)


def without_dim(x: jax.Array, is_mapped: bool = True) -> jax.Array:
    """An array without the first dim, of size 1, that a map added; the array itself if the map did not."""
    return x.reshape(x.shape[1:]) if is_mapped else x


def with_dim(x: jax.Array) -> jax.Array:
    """An array with a first dim of size 1."""
    return x[None]


def _is_mapped(_: jax.Array) -> bool:
    return True
