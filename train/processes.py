"""One run on several processes: JAX's devices, its link to the other processes, and the small texts they leave each other.

The only file that knows the inside of `jax.distributed`.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Protocol

import jax
from jax._src import distributed

from jgt.document import InputError
from jgt.mesh.devices import use_virtual_cpu
from train.cluster import Cluster

MAX_VIRTUAL_CPU = 1_024
"""JAX's time to start them grows with the square: a second for these, a quarter of an hour for 32 times as many."""
_SHUTDOWN_SECONDS = 60


class Store(Protocol):
    """Texts by name that all processes see."""

    def set(self, name: str, text: str) -> None:
        """Writes a text, over one that is there."""
        ...

    def below(self, folder: str) -> dict[str, str]:
        """The texts whose names start with folder/, by the rest of their names."""
        ...


class CoordinatorStore:
    """The store of JAX's coordination service, which lives in the first process."""

    def __init__(self, client: Any):
        self._client = client

    def set(self, name: str, text: str) -> None:
        """Writes a text, over one that is there."""
        self._client.key_value_set(f"jgt/{name}", text, allow_overwrite=True)

    def below(self, folder: str) -> dict[str, str]:
        """The texts whose names start with folder/, by the rest of their names."""
        prefix = f"jgt/{folder}/"
        return {name.removeprefix(prefix): text for name, text in self._client.key_value_dir_get(prefix)}


def start(cluster: Cluster | None, virtual_cpu: int | None, heartbeat_seconds: int = 100, where: str = "run") -> None:
    """Gives JAX its devices and joins the other processes. Call it before anything asks JAX for devices.

    heartbeat_seconds: after so long without a word JAX itself takes a process for dead, and aborts the others; where: file and
    line of the number of devices. Raises InputError for more of them than JAX starts in reasonable time.
    """
    if virtual_cpu is not None:
        if virtual_cpu > MAX_VIRTUAL_CPU:
            most = f"{MAX_VIRTUAL_CPU:,} is the most that is started; jgt check and jgt plan take any number"
            raise InputError([f"{where}: devices.virtual_cpu: {virtual_cpu:,} is too large; {most}"])
        use_virtual_cpu(virtual_cpu)
    if cluster is None:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX's own service takes SIGTERM for itself.
    jax.config.update("jax_enable_preemption_service", False)
    options: dict[str, Any] = {"heartbeat_timeout_seconds": heartbeat_seconds, "shutdown_timeout_seconds": _SHUTDOWN_SECONDS}
    if cluster.coordinator is None:
        jax.distributed.initialize(**options)
    else:
        # Even then JAX would look for a cluster: under Slurm it would take all but one device of each process away.
        options["cluster_detection_method"] = "deactivate"
        jax.distributed.initialize(cluster.coordinator, cluster.num_processes, cluster.process, **options)


def shared_store() -> Store | None:
    """What the processes of this run share; None where there is only one."""
    client = distributed.global_state.client
    return None if client is None or jax.process_count() == 1 else CoordinatorStore(client)


def leave(code: int) -> None:
    """Ends this process at once if it has others, which a regular end would wait for; else returns."""
    sys.stdout.flush()
    sys.stderr.flush()
    if distributed.global_state.client is not None:
        os._exit(code)
