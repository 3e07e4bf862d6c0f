"""`python -m train.launch --processes N [--restarts K] -- --config FILE ...`: one run on several processes of this machine."""

from __future__ import annotations

import argparse
import re
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from jgt.document import InputError
from train.__main__ import parser as train_parser
from train.config import Run, load
from train.flags import natural_number, whole_number
from train.folder import LOGS, check_folder, read_resume
from train.launch.devices import environments
from train.launch.group import End, Group
from train.launch.supervisor import Policy, supervise
from train.steps import FOLDER, Steps

_LAST_LINES = 20


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of the run; 2 where the input is wrong, before anything is started."""
    own, arguments = _split(sys.argv[1:] if argv is None else list(argv))
    options = _parser().parse_args(own)
    try:
        run = _check(arguments, options)
        policy = Policy(processes=options.processes, restarts=options.restarts, min_processes=options.min_processes or options.processes)
        launcher = Launcher(arguments, run, grace_seconds=options.grace)
    except InputError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    with launcher:
        return supervise(policy, launcher, _say)


class Launcher:
    """The groups of one run, one after another. SIGTERM and SIGINT are passed on; there is no restart after one."""

    def __init__(self, arguments: list[str], run: Run, *, grace_seconds: float):
        self._arguments = arguments
        self._virtual = run.config.devices.virtual_cpu is not None
        self._logs = run.config.run.path / LOGS
        self._steps = Steps(run.config.run.path / FOLDER)
        self._grace_seconds = grace_seconds
        self._group: Group | None = None
        self._stopped = threading.Event()
        self._passed_on = False

    def __enter__(self) -> Launcher:
        self._before = {number: signal.signal(number, self._pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, processes: int, *, again: bool) -> End:
        """Starts a group and waits for its end; shows the last lines of a process that failed and writes to a file."""
        arguments = _without_never(self._arguments) if again else self._arguments
        self._group = Group(arguments, environments(processes, virtual=self._virtual), self._logs)
        if self._stopped.is_set() and not self._passed_on:
            self._group.send(signal.SIGTERM)
        end = self._group.wait(self._grace_seconds)
        # A signal from now on is for the next one.
        self._group = None
        if end.first:
            log = self._logs / f"process-{end.first}.log"
            lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
            print("\n".join([f"--- the end of {log}", *lines, "---"]), file=sys.stderr)
        return end

    def newest_step(self) -> int:
        """The step of the newest checkpoint, 0 for none."""
        return max(self._steps.listed(), default=0)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal asked for the end."""
        return self._stopped.is_set()

    def pause(self, seconds: float) -> bool:
        """Waits; whether to go on then."""
        return not self._stopped.wait(seconds)

    def _pass_on(self, number: int, frame: Any) -> None:
        self._stopped.set()
        if self._group is not None:
            self._passed_on = True
            self._group.send(signal.SIGTERM)


def _check(arguments: list[str], options: argparse.Namespace) -> Run:
    """The run that the processes will read, so that wrong input is told once."""
    parsed = train_parser().parse_args(arguments)
    problems = [] if parsed.process is None else ["command line: --process: the launcher gives it to each process"]
    if (options.min_processes or 0) > options.processes:
        problems.append(f"command line: --min-processes: is {options.min_processes}, more than --processes {options.processes}")
    run = load(parsed.config, parsed.overrides, num_processes=options.processes, problems=problems)
    check_folder(run, read_resume(parsed.resume, parsed.allow_change))
    environments(options.processes, virtual=run.config.devices.virtual_cpu is not None)
    return run


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def _without_never(arguments: list[str]) -> list[str]:
    """The arguments of a restart, which goes on from what the first start saved."""
    return re.sub(r"\0--resume[\0=]never(?=\0)", "", "\0".join(["", *arguments, ""])).split("\0")[1:-1]


def _say(text: str) -> None:
    print(f"jgt launch: {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train.launch",
        usage="python -m train.launch --processes N [--restarts K] [--min-processes M] [--grace SECONDS] -- --config FILE ...",
        description="Starts the processes of one run on this machine, and starts them again from the newest checkpoint when one fails.",
    )
    parser.add_argument("--processes", type=whole_number, required=True, metavar="N", help="how many processes")
    parser.add_argument("--restarts", type=natural_number, default=3, metavar="K", help="at most so many in a row without a newer checkpoint (3)")
    parser.add_argument("--min-processes", type=whole_number, metavar="M", help="after a process is lost go on with one less, down to M")
    parser.add_argument("--grace", type=float, default=10.0, metavar="SECONDS", help="time for the others to end by themselves (10)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
