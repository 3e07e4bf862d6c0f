"""Flag values, the cluster that a process belongs to, and exit codes.

Everything here is needed before JAX may be imported, and by programs that never import it, such as the launcher.
"""

from __future__ import annotations

import argparse
import enum
import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jgt.command.parser import CommandParser
from jgt.document import InputError
from jgt.document.files import read_bytes


class Exit(enum.IntEnum):
    """Exit codes of `jgt train`. A process killed by a signal has 128 + the signal's number, as in a shell."""

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
    UNJOINED = 5
    """The processes of the run have not found each other."""
    LOST = 6
    """As DONE, but some of what the run writes about itself could not be written."""


class RunParser(CommandParser):
    """The parser of a command about a run, whose file is `config` and whose overrides are `overrides`.

    The file follows --config, or is the first argument without an equals sign. is_required: without a file, the process ends with code 2.
    """

    def __init__(self, prog: str, description: str, *, is_required: bool = True):
        super().__init__(prog, description)
        self._is_required = is_required
        self.add_argument("--config", metavar="FILE", help="the run's YAML file, another way to give FILE")
        self.add_argument(
            "overrides",
            nargs="*",
            metavar="FILE key.sub=value",
            help="the run's YAML file, and values that replace the file's, such as train.steps=300",
        )
        code = "a Python file or folder whose code the run's file may name; repeatable"
        self.add_argument("--code", action="append", default=[], metavar="PATH", help=code)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The values of all arguments."""
        arguments = super().parse_args(args, namespace)
        file = next((argument for argument in arguments.overrides if "=" not in argument), None)
        if arguments.config is None and file is not None:
            arguments.config = file
            arguments.overrides.remove(file)
        if arguments.config is None and self._is_required:
            self.error(f"a run's file is missing. Write {self.prog} run.yaml")
        return arguments


class EndError(Exception):
    """A failure that a run expects, such as a save that is impossible. The message says all. code: the exit code."""

    code = Exit.FAILED


TOKEN = "JGT_TOKEN"
"""The variable with the token that all processes of a run share; see `train.processes.join`."""
LAUNCHED = "JGT_LAUNCHED"
"""The variable that the launcher sets for the processes that it starts."""
FEWER = "JGT_FEWER"
"""The variable that it sets with `--min-processes` below `--processes`: a start may have another number of processes than the last one."""

_MAX_NUMBER = 1_000_000_000
_MAX_SECONDS = 1_000_000
_MAX_TOKEN = 4_096
_JOIN_SECONDS, _LOCAL_JOIN_SECONDS = 300.0, 30.0


def natural_number(text: str) -> int:
    """A whole number of at least 0, as an argparse type. Raises ArgumentTypeError."""
    return _number(text, 0, _MAX_NUMBER)


def whole_number(text: str) -> int:
    """A whole number of at least 1, as an argparse type. Raises ArgumentTypeError."""
    return _number(text, 1, _MAX_NUMBER)


def exit_code(text: str) -> int:
    """An exit code of at least 1, as an argparse type. Raises ArgumentTypeError."""
    # The system keeps eight bits of a code: 256 would become 0.
    return _number(text, 1, 255)


def seconds(text: str) -> float:
    """A time of at least 0 seconds, as an argparse type. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    # A comparison with NaN is false.
    if not 0 <= value <= _MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to {_MAX_SECONDS:,}, not {text[:40]!r}")
    return value


def _number(text: str, low: int, high: int) -> int:
    # The length first: Python refuses to read numbers of thousands of digits.
    if not text.isdecimal() or len(text) > 20 or not low <= int(text) <= high:
        raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {high:,}, not {text[:40]!r}")
    return int(text)


def read_token(file: str | None) -> tuple[bytes, list[str]]:
    """The run's token, from a file or else from the environment, and the problems with it. Without either it is empty."""
    if file is None:
        return os.environ.get(TOKEN, "").strip().encode(errors="surrogateescape"), []
    try:
        token = read_bytes(Path(file), _MAX_TOKEN).strip()
    except InputError as error:
        return b"", [f"command line: --token-file: {problem}" for problem in error.problems]
    return token, [] if token else [f"command line: --token-file: {file}: is empty. Write a long random text into it"]


def join_seconds(given: float | None) -> float:
    """The seconds that the processes of a run wait for each other. given: the number in the config."""
    if given is not None:
        return given
    return _LOCAL_JOIN_SECONDS if LAUNCHED in os.environ else _JOIN_SECONDS


def may_have_fewer() -> bool:
    """Whether the launcher may have started this run with another number of processes than before."""
    return FEWER in os.environ


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
