"""One run on several processes: JAX's devices, and its link to the other processes."""

from __future__ import annotations

import jax

from jgt.mesh.devices import use_virtual_cpu
from train.cluster import Cluster


def start(cluster: Cluster | None, virtual_cpu: int | None) -> None:
    """Gives JAX its devices and joins the other processes. Call it before anything asks JAX for devices."""
    if virtual_cpu is not None:
        use_virtual_cpu(virtual_cpu)
    if cluster is None:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if cluster.coordinator is None:
        jax.distributed.initialize()
    else:
        jax.distributed.initialize(cluster.coordinator, cluster.num_processes, cluster.process)
