"""The command line of `jgt doctor`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jgt import CommandParser
from jgt.document import InputError

from ..launch.group import environments, free_port
from ..processes.cluster import Cluster, cluster_problems, find_cluster, flag_problems
from ..settings.command_line import seconds, whole_number
from .devices import ask_devices
from .machine import Diagnosis, Machine


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0: no fault. 1: a fault. 2: the input is wrong."""
    arguments = parser().parse_args(argv)
    try:
        found = list(_examine(arguments))
    except InputError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps([one._asdict() for one in found], indent=1))
    else:
        for one in found:
            print(f"{one.state:5} {one.what}: {one.text}")
    return int(any(one.state == "fault" for one in found))


def parser() -> CommandParser:
    """The command line of `jgt doctor`."""
    made = CommandParser("jgt doctor", "Examines this machine and its devices before a run, and lets all devices add numbers together.")
    made.add_argument("--processes", type=whole_number(), metavar="N", help="start N processes here, as jgt launch does; or see --process")
    made.add_argument("--process", type=whole_number(low=0), metavar="I", help="be process I of N, on several machines; with --coordinator")
    made.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens, as for jgt train")
    made.add_argument("--dir", default=".", metavar="DIR", help="the folder of the run directory (here)")
    made.add_argument("--seconds", type=seconds, default=120.0, metavar="S", help="the time for the devices' answer (120)")
    made.add_argument("--json", action="store_true", help="print one JSON list")
    return made


def _examine(arguments: argparse.Namespace) -> Iterator[Diagnosis]:
    is_here = arguments.process is None and arguments.coordinator is None
    flags = (arguments.coordinator, None if is_here else arguments.processes, arguments.process)
    cluster = find_cluster(*flags)
    if problems := [*flag_problems(*flags), *cluster_problems(cluster)]:
        raise InputError(problems)
    port = int(arguments.coordinator.rpartition(":")[2]) if arguments.coordinator and arguments.process == 0 else None
    yield from Machine(folder=Path(arguments.dir), port=port).examine()
    clusters: list[Cluster | None] = [cluster]
    if is_here and (count := arguments.processes or 1) > 1:
        address = f"localhost:{free_port()}"
        clusters = [Cluster(coordinator=address, num_processes=count, process=n) for n in range(count)]
    variables = environments(len(clusters), virtual=False) if cluster is None else [dict(os.environ)]
    yield from ask_devices(clusters, variables, arguments.seconds)


if __name__ == "__main__":
    sys.exit(main())
