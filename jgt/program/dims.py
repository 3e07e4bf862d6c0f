"""The mesh axes that shard each dim of an array, and how to convert them from and to JAX's specs and the YAML's.

`[[data, fsdp], null]` in a rules file is `(("data", "fsdp"), ())` here and `PartitionSpec(("data", "fsdp"), None)` in JAX.
A PartitionSpec may omit trailing dims and write one axis in two ways. A tuple of tuples always has one entry for each dim, so that
dims can be compared, sliced and extended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from jax.sharding import NamedSharding, PartitionSpec

Dims = tuple[tuple[str, ...], ...]
"""The mesh axes of each dim, major to minor; () for a dim that is not sharded."""


def partition_spec(dims: Dims, *, free: int = 0) -> PartitionSpec:
    """JAX's spec of these dims. The first `free` dims are left to the partitioner; a vmap puts such dims in front."""
    named = [axes[0] if len(axes) == 1 else axes or None for axes in dims[free:]]
    # UNCONSTRAINED and not None: None would replicate the dim that a vmap added, whatever it was mapped over.
    return PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * free, *named)


def sharding_dims(sharding: NamedSharding, rank: int) -> Dims:
    """The dims of the sharding of an array of this rank; () also for a dim that the sharding leaves to the partitioner."""
    entries: Sequence[object] = [*sharding.spec, *[None] * rank][:rank]
    return tuple((e,) if isinstance(e, str) else cast(tuple[str, ...], e) if isinstance(e, tuple) else () for e in entries)


def show_dims(dims: Dims) -> str:
    """Dims as the YAML writes them: `[data, [fsdp, tensor], null]`."""
    return "[" + ", ".join("null" if not axes else axes[0] if len(axes) == 1 else f"[{', '.join(axes)}]" for axes in dims) + "]"
