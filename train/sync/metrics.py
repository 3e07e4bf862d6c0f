"""The metrics of a step with phases: each replica has its own, [R], and a process has those of its devices.

A mean over all replicas would be a collective over the slow axis, and would make all wait for the slowest in every step. So the host
averages what it has: with one process all replicas, otherwise those of its own devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


def fetched(metrics: Mapping[str, jax.Array], *, has_replicas: bool) -> dict[str, Any]:
    """The metrics of a step on the host, by name: means over the replicas of this process; `applied` if all of them applied the update."""
    if not has_replicas:
        return jax.device_get(dict(metrics))
    values = {name: _local(x) for name, x in metrics.items()}
    return {name: np.all(x) if x.dtype == bool else np.mean(x, axis=0) for name, x in values.items()}


def _local(x: jax.Array) -> np.ndarray:
    """The entries of [R, ...] that this process's devices hold."""
    parts = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])
