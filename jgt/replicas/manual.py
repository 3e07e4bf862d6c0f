"""A shard_map of every replica: under a vmap over axes of the mesh (`Replicas.map`), and with axes left to the partitioner.

JAX maps a shard_map by adding the axes of the vmap to its specs, so they have to be among its manual axes, and inside its arrays keep a
dim of one replica. A shard_map inside of it, which is manual over further axes, would be mapped in the same way and refused, because the
axes of the vmap are manual already. Here the outer one gets a rule of its own: the dim of replicas is split where it begins and added
where it ends, and between the two each replica has the program that it would have alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    replicas: the axes of the vmap with their sizes. in_specs, out_specs: as of jax.shard_map, of one replica's arrays. The call raises
    ValueError for a vmap with another number of entries.
    """
    if not replicas:
        return manual(fn, axes, in_specs, out_specs)
    num_replicas = math.prod(replicas.values())
    run = custom_vmap(manual(fn, axes, in_specs, out_specs))

    def of_all(count: int, is_mapped: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        if count != num_replicas:
            names = ", ".join(replicas)
            raise ValueError(
                f"a vmap with spmd_axis_name {names} around a pipelined function has {count} entries, and the mesh {num_replicas} devices "
                "along it. Map over as many, with one vmap"
            )

        def of_one(*local: Any) -> Any:
            own = jax.tree.map(lambda x, mapped: x.reshape(x.shape[1:]) if mapped else x, local, tuple(is_mapped))
            return jax.tree.map(lambda x: x[None], fn(*own))

        specs = jax.tree.broadcast(in_specs, args)
        ahead = jax.tree.map(lambda spec, mapped: _lifted(spec, replicas) if mapped else spec, specs, tuple(is_mapped))
        behind = jax.tree.map(lambda spec: _lifted(spec, replicas), out_specs)
        results = manual(of_one, (*replicas, *axes), ahead, behind)(*args)
        return results, jax.tree.map(lambda _: True, results)

    run.def_vmap(of_all)
    return cast("Callable[..., _R]", run)


def _lifted(spec: PartitionSpec, replicas: Iterable[str]) -> PartitionSpec:
    return PartitionSpec(tuple(replicas), *spec)
