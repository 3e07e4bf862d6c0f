"""`python -m train --config FILE [key.sub=value ...]`: one YAML file is one run.

JAX and the packages around it take seconds to import, and wrong input should be answered at once. So the order here is fixed: read the
command line and the config without JAX, report every problem in them, and only then import. XLA reads its flags when JAX first asks for
devices, and the other processes have to be joined before that; so flags come before processes, and processes before everything else.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import sys
import traceback
from collections.abc import Iterator, Sequence

from jgt import document
from jgt.document import InputError
from train.checkpoint.disk import DiskError
from train.checkpoint.signature import read_key
from train.command_line import Exit, cluster_problems, find_cluster, flag_problems, whole_number
from train.config import Run, load
from train.profile.steps import StepRange, read_step_range
from train.run.folder import InUseError, Resume, check_folder, read_resume


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: a `train.command_line.Exit`, or the value of --stopped-code. Some failures end the process instead of returning."""
    arguments = parser().parse_args(argv)
    try:
        run = _load(arguments)
        # Before the run directory is looked at: printing a config must work anywhere.
        if arguments.print_config:
            print(document.dump(run.resolved()), end="")
            return Exit.DONE
        resume = read_resume(arguments.resume, arguments.allow_change)
        check_folder(run, resume)
        read_key(run.config.checkpoint.key, f"{run.where('checkpoint.key')}: checkpoint.key")
        steps = read_step_range(arguments.profile, run)
        return _start(run, resume, steps, arguments)
    except InputError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return Exit.INPUT
    except DiskError as error:
        print(f"jgt: {error}", file=sys.stderr)
        return Exit.FAILED


def parser() -> argparse.ArgumentParser:
    """The command line of a run."""
    parser = argparse.ArgumentParser(
        prog="train",
        description="Trains the model of a YAML file. The same command again resumes the run from its newest checkpoint.",
        # The launcher looks for `--resume never` among the arguments, and would not find an abbreviation of it.
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the run's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="values that replace the file's, for example train.steps=300")
    parser.add_argument("--dry-run", action="store_true", help="do everything up to the first step, and print a table of bytes per device")
    parser.add_argument(
        "--replay",
        type=whole_number,
        metavar="STEP",
        help="recompute a logged step twice, and say whether data, code or machine is at fault",
    )
    parser.add_argument("--profile", metavar="A:B", help="record steps A to B, and print a table of device time by signal")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config and stop")
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|PATH",
        help="auto: from the newest checkpoint; never: from step 0; PATH: from another run, or from one of its checkpoints",
    )
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="a key of model or data, or run.seed, that may differ from the run that is resumed",
    )
    parser.add_argument(
        "--stopped-code",
        type=whole_number,
        default=Exit.DONE,
        metavar="N",
        help="exit code if a signal stops the run before its last step (0)",
    )
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens; needs --processes and --process")
    parser.add_argument("--processes", type=int, metavar="N", help="number of processes of the run")
    parser.add_argument("--process", type=int, metavar="I", help="number of this process, from 0")
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


def _load(arguments: argparse.Namespace) -> Run:
    flags = (arguments.coordinator, arguments.processes, arguments.process)
    cluster = find_cluster(*flags)
    return load(
        arguments.config,
        arguments.overrides,
        num_processes=1 if cluster is None else cluster.num_processes,
        problems=(*flag_problems(*flags), *cluster_problems(cluster)),
    )


def _start(run: Run, resume: Resume, profiled: StepRange | None, arguments: argparse.Namespace) -> int:
    with garbage_collection_paused():
        from train.processes.processes import exit_if_distributed, start_jax
        from train.xla import configure_xla

    # stderr may not be a file, as in a test, or may be closed.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        faulthandler.enable()
    for warning in configure_xla(run.config.xla, virtual=run.config.devices.virtual_cpu is not None, fp8=run.config.model.fp8):
        print(f"jgt: {warning}", file=sys.stderr)
    cluster = find_cluster(arguments.coordinator, arguments.processes, arguments.process)
    # JAX ends a process whose peers are silent too, but without a reason or stacks. The watch has to be quicker.
    heartbeat_seconds = int(2 * run.config.watchdog.peer_seconds) + 10
    start_jax(cluster, run.config.devices.virtual_cpu, heartbeat_seconds, run.where("devices.virtual_cpu"))
    if arguments.dry_run:
        with garbage_collection_paused():
            from train.check.report import dry_run

        dry_run(run)
        return Exit.DONE
    if arguments.replay is not None:
        with garbage_collection_paused():
            from train.run.replay import replay

        replay(run, arguments.replay, resume)
        return Exit.DONE

    with garbage_collection_paused():
        from train.checkpoint.checkpoint import SaveError
        from train.records.clock import process_started
        from train.records.progress import SkippedError
        from train.run.loop import train

    # Expected failures are one line; only an error that may be a bug shows its traceback.
    try:
        return train(run, resume, profiled=profiled, begun=process_started(), stopped_code=arguments.stopped_code)
    except InputError as error:
        print("\n".join(error.problems), file=sys.stderr)
        code = Exit.INPUT
    except (SkippedError, SaveError, InUseError, DiskError) as error:
        print(f"jgt: {error}", file=sys.stderr)
        code = Exit.FAILED
    except Exception:
        traceback.print_exc()
        code = Exit.FAILED
    # Only after an error. A run that ended well has its peers, and JAX's own shutdown can wait for them.
    exit_if_distributed(code)
    return code


if __name__ == "__main__":
    exit_code = main()
    # Without JAX the run never began, and no thread was started.
    if "jax" in sys.modules:
        from train.processes.processes import limit_exit

        limit_exit(exit_code)
    sys.exit(exit_code)
