"""`python -m train --config FILE [key.sub=value ...]`: one YAML file is one run. Heavy imports wait for a checked config."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jgt import document
from jgt.document import InputError
from train.cluster import find_cluster, flag_problems
from train.config import Run, load
from train.folder import check_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: done; 1: a failure while running; 2: the input is wrong."""
    arguments = _parser().parse_args(argv)
    try:
        run = _load(arguments)
        if arguments.print_config:
            print(document.dump(run.resolved()), end="")
            return 0
        check_folder(run)
        return _start(run, arguments)
    except InputError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="train", description="Trains the model of a YAML file; run again, it resumes.")
    parser.add_argument("--config", required=True, metavar="FILE", help="the run's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="values that replace the file's, such as train.steps=300")
    parser.add_argument("--dry-run", action="store_true", help="everything up to the first step, with a table of bytes per device")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config and stop")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens; with --processes and --process")
    parser.add_argument("--processes", type=int, metavar="N", help="how many processes share the run")
    parser.add_argument("--process", type=int, metavar="I", help="which of them this one is, from 0")
    return parser


def _load(arguments: argparse.Namespace) -> Run:
    flags = (arguments.coordinator, arguments.processes, arguments.process)
    cluster = find_cluster(*flags)
    return load(
        arguments.config,
        arguments.overrides,
        num_processes=1 if cluster is None else cluster.num_processes,
        problems=tuple(flag_problems(*flags)),
    )


def _start(run: Run, arguments: argparse.Namespace) -> int:
    from train.processes import start

    start(find_cluster(arguments.coordinator, arguments.processes, arguments.process), run.config.devices.virtual_cpu)
    if arguments.dry_run:
        from train.dry_run import dry_run

        dry_run(run)
    else:
        from train.checkpoint import SaveError
        from train.guard import NonFiniteError
        from train.loop import train

        try:
            train(run)
        except (NonFiniteError, SaveError) as error:
            print(f"jgt: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
