"""`jgt launch --processes N [--restarts K] -- FILE ...`: one run on several processes of this machine.

The launcher must outlive every failure of the processes that it starts, so it imports no JAX and opens no device. It reads the run's
config as the processes will read it: wrong input is reported once, before anything is started, and not once by each process. What follows
`--` is passed on to each process, with the flags that join them.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from jgt.command.parser import CommandParser
from jgt.document import InputError

from ..__main__ import parser as train_parser
from ..checkpoint.steps import FOLDER, Steps
from ..code.files import read_code
from ..command_line import natural_number, read_token, seconds, whole_number
from ..config import Run, load
from ..run.folder import LOGS, earlier_files
from ..run.identity import check_places, read_resume
from .group import End, Group, environments
from .supervisor import Policy, supervise

_LAST_LINES = 20
_MAX_PROCESSES = 1_024
"""More than the devices of any machine; each process takes seconds to start and hundreds of megabytes."""
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of the run; 2 for wrong input, in which case nothing was started."""
    flags, arguments = _split(sys.argv[1:] if argv is None else list(argv))
    options = parser().parse_args(flags)
    try:
        run = _check(arguments, options)
        policy = Policy(processes=options.processes, restarts=options.restarts, min_processes=options.min_processes or options.processes)
        launcher = Launcher(arguments, run, grace_seconds=options.grace, fewer=policy.min_processes < policy.processes)
    except InputError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    with launcher:
        return supervise(policy, launcher, _say)


class Launcher:
    """Runs the groups of one run, one after another. It passes signals on to them. After one that stops the run, nothing restarts.

    fewer: groups may have different numbers of processes.
    """

    def __init__(self, arguments: list[str], run: Run, *, grace_seconds: float, fewer: bool = False):
        self._arguments, self._fewer = arguments, fewer
        self._virtual = run.config.devices.virtual_cpu is not None
        self._logs = run.config.run.path / LOGS
        self._folder = run.config.run.path
        self._steps = Steps(self._folder / FOLDER)
        # Empty without `--resume never`: an earlier run then stays and goes on.
        self._earlier = frozenset() if _without_never(arguments) == arguments else earlier_files(self._folder)
        self._grace_seconds = grace_seconds
        self._group: Group | None = None
        self._stopped = threading.Event()
        self._passed_on = False

    def __enter__(self) -> Launcher:
        self._before = {number: signal.signal(number, self._pass_on) for number in _PASSED_ON if not _is_ignored(number)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, processes: int, *, again: bool) -> End:
        """Starts a group and waits for its end. Prints the last lines of the process that failed first, if it writes to a file."""
        # `--resume never` would discard what the first start saved; but not before that start has moved the earlier run away.
        arguments = _without_never(self._arguments) if again and not self._is_to_be_moved() else self._arguments
        self._group = Group(arguments, environments(processes, virtual=self._virtual, fewer=self._fewer), self._logs)
        # A signal that came while the group was being started found no group to pass it on to.
        if self._stopped.is_set() and not self._passed_on:
            self._group.send(signal.SIGTERM)
        end = self._group.wait(self._grace_seconds)
        # A signal that comes from now on is for the next group.
        self._group = None
        # Not for the first process (0), whose output is on the terminal already.
        if end.first:
            log = self._logs / f"process-{end.first}.log"
            lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
            print("\n".join([f"--- the end of {log}", *lines, "---"]), file=sys.stderr)
        return end

    def newest_step(self) -> int:
        """The step of the newest checkpoint; 0 if there is none, or if the disk cannot be read."""
        try:
            return 0 if self._is_to_be_moved() else max(self._steps.listed(), default=0)
        except OSError:
            return 0

    @property
    def is_stopped(self) -> bool:
        """Whether a signal asked the launcher to end the run."""
        return self._stopped.is_set()

    def pause(self, seconds: float) -> bool:
        """Waits. Returns whether to continue: a signal ends the wait."""
        return not self._stopped.wait(seconds)

    def _is_to_be_moved(self) -> bool:
        """Whether `--resume never` has still to move an earlier run away."""
        return not self._earlier.isdisjoint(earlier_files(self._folder))

    def _pass_on(self, number: int, frame: Any) -> None:
        if number == signal.SIGUSR1:
            if self._group is not None:
                self._group.send(number)
            return
        self._stopped.set()
        if self._group is not None:
            self._passed_on = True
            # SIGTERM also for Ctrl-C and SIGHUP: the processes stop after a step and save it.
            self._group.send(signal.SIGTERM)


def _is_ignored(number: signal.Signals) -> bool:
    # nohup ignores SIGHUP for what it starts, and that is to stay so.
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def _check(arguments: list[str], options: argparse.Namespace) -> Run:
    """The run that the processes will read. Raises InputError."""
    parsed = train_parser().parse_args(arguments)
    problems = [] if parsed.process is None else ["command line: --process: must not be given, because the launcher numbers the processes"]
    problems += read_token(parsed.token_file)[1]
    if options.processes > _MAX_PROCESSES:
        problems.append(f"command line: --processes: is {options.processes:,}. A launcher starts at most {_MAX_PROCESSES:,}")
    if (options.min_processes or 0) > options.processes:
        problems.append(f"command line: --min-processes: is {options.min_processes}, more than --processes {options.processes}")
    # With all processes, because a mesh is checked against their devices.
    run = load(parsed.config, parsed.overrides, code=read_code(parsed.code), num_processes=options.processes, problems=problems)
    check_places(run, read_resume(parsed.resume, parsed.allow_change, run.config.run.path))
    if options.min_processes and options.min_processes < options.processes:
        _check_exchanges(run)
    environments(options.processes, virtual=run.config.devices.virtual_cpu is not None)
    return run


def _check_exchanges(run: Run) -> None:
    """Raises InputError if a run with phases saves nothing from which another number of replicas can continue."""
    sync, every, problems = run.config.sync, run.config.checkpoint.every, list[str]()
    if sync is not None and every % sync.every:
        remedy = f"Save every {-(-every // sync.every) * sync.every} steps, or leave out --min-processes"
        why = f"is not a multiple of sync.every {sync.every}, and fewer processes (--min-processes) can only continue from an exchange"
        problems.append(f"{run.where('checkpoint.every')}: checkpoint.every: {every} {why}. {remedy}")
    if sync is not None and sync.fragments > 1:
        why = "fragments are never exchanged all at once, and fewer processes (--min-processes) can only continue from such an exchange"
        problems.append(f"{run.where('sync.fragments')}: sync.fragments: {sync.fragments} {why}. Use 1, or leave out --min-processes")
    if problems:
        raise InputError(problems)


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    # The first one separates. A later `--` belongs to the arguments of the run.
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def _without_never(arguments: list[str]) -> list[str]:
    """The arguments without `--resume never`."""
    # Joined by NUL, which no argument can contain, so that one pattern covers both `--resume never` and `--resume=never`.
    return re.sub(r"\0--resume[\0=]never(?=\0)", "", "\0".join(["", *arguments, ""])).split("\0")[1:-1]


def _say(text: str) -> None:
    print(f"jgt launch: {text}", file=sys.stderr, flush=True)


def parser() -> CommandParser:
    """The command line of the launcher, up to the `--`."""
    description = "Starts the processes of one run on this machine, and restarts them from the newest checkpoint when one fails."
    parser = CommandParser("jgt launch", description)
    parser.usage = "jgt launch --processes N [--restarts K] [--min-processes M] [--grace SECONDS] -- FILE ..."
    parser.add_argument("--processes", type=whole_number, required=True, metavar="N", help="number of processes")
    parser.add_argument(
        "--restarts", type=natural_number, default=3, metavar="K", help="how many restarts in a row may bring no newer checkpoint (3)"
    )
    parser.add_argument("--min-processes", type=whole_number, metavar="M", help="after a process is lost, restart with one less, down to M")
    parser.add_argument("--grace", type=seconds, default=10.0, metavar="SECONDS", help="time for the others to end after a failure (10)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
