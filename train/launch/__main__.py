"""`jgt launch --processes N [--restarts K] -- FILE ...`: one run on several processes of this machine.

The launcher must outlive every failure of the processes that it starts, so it imports no JAX and opens no device. It reads the run's
config as the processes will read it: wrong input is reported once, before anything is started, and not once by each process. What follows
`--` is passed on to each process, with the flags that join them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jgt import CommandParser
from jgt.document import InputError

from ..__main__ import check_resume, load_run
from ..__main__ import parser as train_parser
from ..config import Run
from ..files.ends import EndError, Exit
from ..files.streams import discard_unwritten, say_lines
from ..run.directory.folder import metrics_port
from ..settings.command_line import seconds, whole_number
from .group import environments, report
from .supervisor import Launcher, Policy, supervise

_MAX_PROCESSES = 1_024
"""More than the devices of any machine; each process takes seconds to start and hundreds of megabytes."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of the run; 2 for wrong input, in which case nothing was started, and 1 if another run uses the directory."""
    argv = sys.argv[1:] if argv is None else list(argv)
    # The first one separates. A later `--` belongs to the arguments of the run.
    at = argv.index("--") if "--" in argv else len(argv)
    flags, arguments = argv[:at], argv[at + 1 :]
    options = parser().parse_args(flags)
    try:
        run = _check(arguments, options)
        policy = Policy(processes=options.processes, restarts=options.restarts, min_processes=options.min_processes or options.processes)
        launcher = Launcher(arguments, run, grace_seconds=options.grace, fewer=policy.min_processes < policy.processes)
        with metrics_port(run, None), launcher:
            return supervise(policy, launcher, report)
    except InputError as error:
        say_lines(error.problems)
        return Exit.INPUT
    except EndError as error:
        report(str(error))
        return error.code
    finally:
        discard_unwritten()


def _check(arguments: list[str], options: argparse.Namespace) -> Run:
    """The run that the processes will read. Raises InputError."""
    parsed = train_parser().parse_args(arguments)
    problems = [] if parsed.process is None else ["command line: --process: must not be given, because the launcher numbers the processes"]
    if options.processes > _MAX_PROCESSES:
        problems.append(f"command line: --processes: is {options.processes:,}. A launcher starts at most {_MAX_PROCESSES:,}")
    if (options.min_processes or 0) > options.processes:
        problems.append(f"command line: --min-processes: is {options.min_processes}, more than --processes {options.processes}")
    # Read for all processes, because a mesh is checked against their devices.
    run = load_run(parsed, options.processes, problems)
    check_resume(run, parsed)
    if options.min_processes and options.min_processes < options.processes:
        _check_exchanges(run)
    environments(options.processes, virtual=run.config.devices.virtual_cpu is not None)
    return run


def _check_exchanges(run: Run) -> None:
    """Raises InputError if a run with phases saves nothing from which another number of replicas can continue."""
    sync, every, problems = run.config.sync, run.config.checkpoint.every, list[str]()
    if sync is None:
        return
    if every % sync.every:
        remedy = f"Save every {-(-every // sync.every) * sync.every} steps, or leave out --min-processes"
        why = f"is not a multiple of sync.every {sync.every}, and fewer processes (--min-processes) can only continue from an exchange"
        problems.append(f"{run.where('checkpoint.every')}: checkpoint.every: {every} {why}. {remedy}")
    if sync.fragments > 1:
        why = "fragments are never exchanged all at once, and fewer processes (--min-processes) can only continue from such an exchange"
        problems.append(f"{run.where('sync.fragments')}: sync.fragments: {sync.fragments} {why}. Use 1, or leave out --min-processes")
    if problems:
        raise InputError(problems)


def parser() -> CommandParser:
    """The command line of the launcher, up to the `--`."""
    description = "Starts the processes of one run on this machine, and restarts them from the newest checkpoint when one fails."
    parser = CommandParser("jgt launch", description)
    parser.usage = "jgt launch --processes N [--restarts K] [--min-processes M] [--grace SECONDS] -- FILE ..."
    parser.add_argument("--processes", type=whole_number(), required=True, metavar="N", help="number of processes")
    parser.add_argument(
        "--restarts", type=whole_number(low=0), default=3, metavar="K", help="how many restarts in a row may bring no newer checkpoint (3)"
    )
    parser.add_argument("--min-processes", type=whole_number(), metavar="M", help="after a process is lost, restart with one less, to M")
    parser.add_argument("--grace", type=seconds, default=10.0, metavar="SECONDS", help="time for the others to end after a failure (10)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
