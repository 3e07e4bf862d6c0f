"""`jgt train FILE [key.sub=value ...]`, the same as `python -m train`: one YAML file is one run.

JAX and the packages around it take seconds to import, and wrong input should be answered at once. So the order here is fixed: read the
command line and the config without JAX, report every problem in them, and only then import. XLA reads its flags when JAX first asks for
devices, and the other processes have to be joined before that; so flags come before processes, and processes before everything else.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from jgt import document, find_command
from jgt.document import InputError

from .checkpoint.signature import read_key
from .config import Run, load
from .files.ends import EndError, Exit
from .files.streams import discard_unwritten, say, say_lines
from .processes.cluster import Cluster, cluster_problems, find_cluster, flag_problems
from .records.step_range import read_step_range
from .run.directory.identity import Resume, check_places, read_resume
from .settings.code.names import exits_are_failures
from .settings.command_line import RunParser, join_seconds, read_token, whole_number

_SUSPENDED_SECONDS = 600
"""How long all processes of a run may be suspended together."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: a `train.files.ends.Exit`, or the value of --stopped-code. Some failures end the process instead of returning."""
    arguments = parser().parse_args(argv)
    with _signals_answered(arguments.stopped_code):
        # Expected failures are one line; only an error that may be a bug shows its traceback.
        try:
            return _main(arguments)
        except InputError as error:
            say_lines(error.problems)
            code = Exit.INPUT
        except (EndError, OSError) as error:
            say(str(error))
            code = error.code if isinstance(error, EndError) else Exit.FAILED
        except BaseException:
            say_lines([traceback.format_exc().rstrip("\n")])
            code = Exit.FAILED
        # Only after an error. A run that ended well has its peers, and JAX's own shutdown can wait for them.
        if "jax" in sys.modules:
            from .processes.processes import exit_if_distributed

            exit_if_distributed(code)
        return code


@exits_are_failures()
def _main(arguments: argparse.Namespace) -> int:
    _check_surroundings()
    flags = (arguments.coordinator, arguments.processes, arguments.process)
    cluster = find_cluster(*flags)
    run = load_run(arguments, 1 if cluster is None else cluster.num_processes, (*flag_problems(*flags), *cluster_problems(cluster)))
    # Before the run directory is looked at: printing a config must work anywhere.
    if arguments.print_config:
        # The reader of a pipe may leave before the end.
        with contextlib.suppress(BrokenPipeError):
            print(document.dump(run.resolved()), end="", flush=True)
        return Exit.DONE
    resume = check_resume(run, arguments)
    read_key(run.config.checkpoint.key, f"{run.where('checkpoint.key')}: checkpoint.key")
    if run.config.train.auto:
        # Without a layout to choose, a start needs no search and nothing that a search imports.
        plan = find_command("plan")
        assert plan is not None
        # A cluster that decides its size later has several processes.
        run = plan.load().auto(run, arguments, 1 if cluster is None else cluster.num_processes or 2, say)
    profiled = read_step_range(arguments.profile, run.steps if run.config.train.epochs is None else None)
    with garbage_collection_paused():
        from .processes.compiled import programs_on_trial
        from .records.clock import process_started
        from .run.opened import dry_run
        from .run.replay import replay
        from .run.train import train
        from .setup.xla import configure_xla

    # stderr may not be a file, as in a test, or may be closed.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        faulthandler.enable()
    for warning in configure_xla(run.config, is_from_file=run.is_from_file("xla.cache")):
        say(warning)
    with programs_on_trial():
        _join(run, arguments, cluster)
        if arguments.dry_run:
            dry_run(run)
        elif arguments.replay is not None:
            replay(run, arguments.replay, resume)
        else:
            return train(run, resume, profiled=profiled, begun=process_started(), stopped_code=arguments.stopped_code)
    return Exit.DONE


def load_run(arguments: argparse.Namespace, num_processes: int | None, problems: Sequence[str]) -> Run:
    """The run that a command line describes. problems: those already found. Raises InputError with all problems."""
    problems = (*problems, *read_token(arguments.token_file)[1])
    return load(arguments.config, arguments.overrides, code=arguments.code, num_processes=num_processes, problems=problems)


def check_resume(run: Run, arguments: argparse.Namespace) -> Resume:
    """The start that the run resumes from. Raises InputError if it cannot resume from there, or if its own directory cannot be one."""
    resume = read_resume(arguments.resume, arguments.allow_change, run.config.run.checkpoints)
    check_places(run, resume, allow_command=arguments.allow_command)
    return resume


def parser() -> RunParser:
    """The command line of a run."""
    parser = RunParser("jgt train", "Trains the model of a YAML file. The same command again resumes the run from its newest checkpoint.")
    parser.add_argument("--dry-run", action="store_true", help="do everything up to the first step, and print a table of bytes per device")
    replay = "recompute a logged step twice, and say whether data, code or machine is at fault"
    parser.add_argument("--replay", type=whole_number(), metavar="STEP", help=replay)
    parser.add_argument("--profile", metavar="A:B", help="record steps A to B, and print a table of device time by signal")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config and stop")
    resume = "auto: from the newest checkpoint; never: from step 0; PATH: from another run, or from one of its checkpoints"
    parser.add_argument("--resume", default="auto", metavar="auto|never|PATH|URL", help=resume)
    change = "a key that may differ from the resumed run: of model, data or lora, run.seed, optimizer.name, code, checkpoint.weights"
    parser.add_argument("--allow-change", action="append", default=[], metavar="KEY", help=change)
    parser.add_argument("--allow-command", action="store_true", help="run the program of alerts.command, and the tasks of eval.include")
    stopped = "exit code if a signal stops the run before its last step (0)"
    # The system keeps eight bits of a code: 256 would become 0.
    parser.add_argument("--stopped-code", type=whole_number(high=255), default=Exit.DONE, metavar="N", help=stopped)
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens; needs --processes and --process")
    parser.add_argument("--processes", type=int, metavar="N", help="number of processes of the run")
    parser.add_argument("--process", type=int, metavar="I", help="number of this process, from 0")
    parser.add_argument("--token-file", metavar="FILE", help="a secret of this run's processes; without it, the variable JGT_TOKEN")
    return parser


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Imports run faster inside: modules consist of a million objects that are never garbage.

    Everything that exists at the end is left out of later collections too.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


@contextlib.contextmanager
def _signals_answered(stopped_code: int) -> Iterator[None]:
    """Answers signals until the watch does (`train.processes.watch`), which takes over for as long as there is something to save."""

    def stop(number: int, frame: object) -> None:
        say(f"{signal.Signals(number).name}: there is nothing to save")
        discard_unwritten()
        os._exit(stopped_code)

    # Only the main thread may set handlers. nohup ignores SIGHUP, and that is to stay so.
    is_main = threading.current_thread() is threading.main_thread()
    stops = [number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in stops} if is_main else {}
    if is_main:
        # It asks for a save. Without a handler it would end the process.
        before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_surroundings() -> None:
    try:
        Path.cwd()
    except OSError:
        raise InputError(["environment: the working directory is gone. Change to a folder that exists"]) from None


def _join(run: Run, arguments: argparse.Namespace, cluster: Cluster | None) -> None:
    """Makes this process one of the run's processes."""
    from .processes.connect import start_jax
    from .processes.join import Membership, facts_of
    from .setup.xla import open_devices

    is_watched = not arguments.dry_run and arguments.replay is None
    # JAX ends a process whose peers are silent too, but without a reason or stacks, and after a suspension of all processes. Where there
    # is a watch, it is quicker and knows about suspensions, so JAX's own limit only has to be there.
    heartbeat_seconds = int(2 * run.config.watchdog.peer_seconds) + (_SUSPENDED_SECONDS if is_watched else 10)
    token, wait_seconds = read_token(arguments.token_file)[0], join_seconds(run.config.watchdog.join_seconds)
    member = Membership(facts=facts_of(run.config.run.name, run.resolved()), token=token, seconds=wait_seconds)
    start_jax(cluster, run.config.devices.virtual_cpu, heartbeat_seconds, run.where("devices.virtual_cpu"), member)
    # A driver may hang, or another process may not have announced its devices. So training opens its own under its watch.
    if not is_watched:
        open_devices()


def run_process(argv: Sequence[str] | None = None) -> int:
    """As `main`, for a process that ends with this code: what was printed is out, and threads that remain cannot hold it for long."""
    code = main(argv)
    discard_unwritten()
    # Without JAX the run never began, and no thread was started.
    if "jax" in sys.modules:
        # From here on a Ctrl-C would only be a traceback of JAX's shutdown.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        from .processes.processes import limit_exit

        limit_exit(code)
    return code


if __name__ == "__main__":
    sys.exit(run_process())
