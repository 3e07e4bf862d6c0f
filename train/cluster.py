"""How the processes of one run find each other: flags, or a cluster that JAX recognises. Read without JAX."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass

_LAUNCHERS = {"SLURM_NTASKS": ("SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID"), "OMPI_COMM_WORLD_SIZE": ()}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """How this process joins the others: by address, or (coordinator None) by JAX's own cluster detection."""

    coordinator: str | None = None
    num_processes: int | None = None
    process: int | None = None


def find_cluster(coordinator: str | None, num_processes: int | None, process: int | None) -> Cluster | None:
    """The cluster that flags (checked by `flag_problems`) or the environment name; None for a single process."""
    if num_processes is not None:
        return Cluster(coordinator=coordinator, num_processes=num_processes, process=process)
    # Slurm sets the number of tasks in a batch script's shell too; the other three belong to a task of srun.
    for variable, others in _LAUNCHERS.items():
        size = os.environ.get(variable, "1")
        if size.isdigit() and int(size) > 1 and all(name in os.environ for name in others):
            return Cluster(num_processes=int(size))
    if "KUBERNETES_SERVICE_HOST" in os.environ and "JOB_COMPLETION_INDEX" in os.environ:
        return Cluster()
    return None


def cluster_problems(cluster: Cluster | None) -> Iterator[str]:
    """What JAX's own detection of this cluster lacks."""
    if cluster == Cluster() and importlib.util.find_spec("kubernetes") is None:
        yield (
            "environment: JOB_COMPLETION_INDEX: this is one process of a Kubernetes job, and JAX finds the others only with the package "
            "kubernetes. Install it (pip install 'jax[k8s]'), or give --coordinator, --processes and --process"
        )


def flag_problems(coordinator: str | None, num_processes: int | None, process: int | None) -> Iterator[str]:
    """Half a set of flags, or a number out of range."""
    flags = {"--coordinator": coordinator, "--processes": num_processes, "--process": process}
    missing = [name for name, value in flags.items() if value is None]
    if 0 < len(missing) < len(flags):
        yield f"command line: {', '.join(missing)}: missing. {', '.join(flags)} belong together"
    if num_processes is not None and num_processes < 1:
        yield f"command line: --processes: must be at least 1, not {num_processes}"
    elif num_processes is not None and process is not None and not 0 <= process < num_processes:
        yield f"command line: --process: must be between 0 and {num_processes - 1} (--processes {num_processes}), not {process}"
    if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
        yield f"command line: --coordinator: {coordinator!r} has no port. Write HOST:PORT, for example localhost:8476"
