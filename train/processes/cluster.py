"""The cluster that a process belongs to, found in flags or in the environment before JAX is imported."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass

# The variable with the number of processes, and the variables that JAX's own detection of the same launcher needs. Open MPI first, as in
# JAX: within a Slurm job its processes inherit the variables of Slurm's task, which counts the nodes and not the processes.
_OPEN_MPI = "OMPI_COMM_WORLD_SIZE"
_LAUNCHERS = {_OPEN_MPI: (), "SLURM_NTASKS": ("SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")}
_ADDRESS_OF_MPIRUN = "OMPI_MCA_orte_hnp_uri"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The way in which this process joins the others: the coordinator's address, or, if that is None, JAX's own cluster detection."""

    coordinator: str | None = None
    num_processes: int | None = None
    process: int | None = None


def find_cluster(coordinator: str | None, num_processes: int | None, process: int | None) -> Cluster | None:
    """The cluster that the flags (checked by `flag_problems`) or the environment describe; None for a single process."""
    if num_processes is not None:
        return Cluster(coordinator=coordinator, num_processes=num_processes, process=process)
    # Slurm sets SLURM_NTASKS in the shell of a batch script too. The other variables exist only in a task that srun started.
    for variable, others in _LAUNCHERS.items():
        size = os.environ.get(variable, "1")
        if size.isdigit() and int(size) > 1 and all(name in os.environ for name in others):
            return Cluster(num_processes=int(size))
    # Kubernetes gives an index to the pods of an Indexed job only.
    if "KUBERNETES_SERVICE_HOST" in os.environ and "JOB_COMPLETION_INDEX" in os.environ:
        return Cluster()
    return None


def cluster_problems(cluster: Cluster | None) -> Iterator[str]:
    """Problems that JAX's detection of this cluster would fail on."""
    if cluster == Cluster() and importlib.util.find_spec("kubernetes") is None:
        yield (
            "environment: JOB_COMPLETION_INDEX: this is one process of a Kubernetes job, and JAX finds the others only with the package "
            "kubernetes. Install it (pip install 'jax[k8s]'), or give --coordinator, --processes and --process"
        )
    if cluster is not None and cluster.coordinator is None and _OPEN_MPI in os.environ and _ADDRESS_OF_MPIRUN not in os.environ:
        yield (
            f"environment: {_OPEN_MPI}: this is one process of mpirun, and JAX finds the others only under Open MPI 4. Under a later "
            f"version let a shell write the flags: mpirun ... sh -c 'jgt train FILE --coordinator HOST:PORT --processes ${_OPEN_MPI} "
            "--process $OMPI_COMM_WORLD_RANK'"
        )


def flag_problems(coordinator: str | None, num_processes: int | None, process: int | None) -> Iterator[str]:
    """Problems with the flags that describe a cluster: some of them missing, or a value out of range."""
    flags = {"--coordinator": coordinator, "--processes": num_processes, "--process": process}
    missing = [name for name, value in flags.items() if value is None]
    if 0 < len(missing) < len(flags):
        yield f"command line: {', '.join(missing)}: missing. {', '.join(flags)} belong together"
    if num_processes is not None and num_processes < 1:
        yield f"command line: --processes: must be at least 1, not {num_processes}"
    elif num_processes is not None and process is not None and not 0 <= process < num_processes:
        yield f"command line: --process: must be between 0 and {num_processes - 1} (--processes {num_processes}), not {process}"
    if coordinator is not None:
        yield from _address_problems(coordinator)


def _address_problems(coordinator: str) -> Iterator[str]:
    # The last colon counts, because an IPv6 address contains colons.
    host, _, port = coordinator.rpartition(":")
    if not port.isdecimal():
        yield f"command line: --coordinator: {coordinator!r} has no port. Write HOST:PORT, for example localhost:8476"
    elif not host or len(port) > 5 or not 1 <= int(port) <= 65_535:
        yield f"command line: --coordinator: {coordinator!r} is not HOST:PORT with a port from 1 to 65,535, for example localhost:8476"
