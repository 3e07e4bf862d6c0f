"""One run on several processes: started by a cluster that JAX recognises, or by --coordinator and its kin."""

from __future__ import annotations

import os
from dataclasses import dataclass

import jax

from jgt.document import InputError
from jgt.mesh.devices import use_virtual_cpu


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """How this process joins the others: by address, or (coordinator None) by JAX's own cluster detection."""

    coordinator: str | None = None
    num_processes: int | None = None
    process: int | None = None


def find_cluster(coordinator: str | None, num_processes: int | None, process: int | None) -> Cluster | None:
    """The cluster that flags or the environment name; None for a single process. Raises InputError for half a set."""
    flags = {"--coordinator": coordinator, "--processes": num_processes, "--process": process}
    given = [name for name, value in flags.items() if value is not None]
    if given:
        missing = [name for name in flags if name not in given]
        if missing:
            raise InputError([f"command line: {', '.join(missing)}: missing. {', '.join(flags)} belong together"])
        assert num_processes is not None and process is not None
        if not 0 <= process < num_processes:
            raise InputError([f"command line: --process {process}: must be between 0 and {num_processes - 1} (--processes {num_processes})"])
        return Cluster(coordinator=coordinator, num_processes=num_processes, process=process)
    for variable in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        size = os.environ.get(variable, "1")
        if size.isdigit() and int(size) > 1:
            return Cluster(num_processes=int(size))
    if "KUBERNETES_SERVICE_HOST" in os.environ and "JOB_COMPLETION_INDEX" in os.environ:
        return Cluster()
    return None


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
