"""What a process of a run reads from its surroundings, and what it answers: flag values, the cluster it belongs to, its exit code.

Everything here is needed before JAX may be imported, and by programs that never import it, such as the launcher.
"""

from __future__ import annotations

import argparse
import enum
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass


class Exit(enum.IntEnum):
    """Exit codes of `python -m train`. A process killed by a signal has 128 + the signal's number, as in a shell."""

    DONE = 0
    """All steps are done, or the run was asked to stop and its state is saved."""
    FAILED = 1
    """An error of this process."""
    INPUT = 2
    """The input is wrong; another try would end the same way."""
    HUNG = 3
    """No progress for too long."""
    PEER = 4
    """Another process of the run failed or is gone."""
    LOST = 5
    """As DONE, but some of what the run writes about itself could not be written."""


def natural_number(text: str) -> int:
    """A whole number of at least 0, as an argparse type. Raises ArgumentTypeError."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, not {text!r}")
    return int(text)


def whole_number(text: str) -> int:
    """A whole number of at least 1, as an argparse type. Raises ArgumentTypeError."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


# The variable with the number of processes, and the variables that JAX's own detection of the same launcher needs.
_LAUNCHERS = {"SLURM_NTASKS": ("SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID"), "OMPI_COMM_WORLD_SIZE": ()}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """How this process joins the others: by the coordinator's address, or, if that is None, by JAX's own cluster detection."""

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
    """What JAX's detection of this cluster would fail on."""
    if cluster == Cluster() and importlib.util.find_spec("kubernetes") is None:
        yield (
            "environment: JOB_COMPLETION_INDEX: this is one process of a Kubernetes job, and JAX finds the others only with the package "
            "kubernetes. Install it (pip install 'jax[k8s]'), or give --coordinator, --processes and --process"
        )


def flag_problems(coordinator: str | None, num_processes: int | None, process: int | None) -> Iterator[str]:
    """What is wrong with the flags that describe a cluster: some of them missing, or a value out of range."""
    flags = {"--coordinator": coordinator, "--processes": num_processes, "--process": process}
    missing = [name for name, value in flags.items() if value is None]
    if 0 < len(missing) < len(flags):
        yield f"command line: {', '.join(missing)}: missing. {', '.join(flags)} belong together"
    if num_processes is not None and num_processes < 1:
        yield f"command line: --processes: must be at least 1, not {num_processes}"
    elif num_processes is not None and process is not None and not 0 <= process < num_processes:
        yield f"command line: --process: must be between 0 and {num_processes - 1} (--processes {num_processes}), not {process}"
    # The last colon counts, because an IPv6 address has colons of its own.
    if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
        yield f"command line: --coordinator: {coordinator!r} has no port. Write HOST:PORT, for example localhost:8476"
