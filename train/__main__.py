"""`python -m train --config FILE [key.sub=value ...]`: one YAML file is one run. Heavy imports wait for a checked config."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import sys
import traceback
from collections.abc import Sequence

from jgt import document
from jgt.document import InputError
from train import imports
from train.cluster import cluster_problems, find_cluster, flag_problems
from train.config import Run, load
from train.exits import Exit
from train.flags import whole_number
from train.folder import InUseError, Resume, check_folder, read_resume
from train.profile.steps import Steps, read_steps


def main(argv: Sequence[str] | None = None) -> int:
    """Returns a `train.exits.Exit`, or what --stopped-code says; some failures end the process with one."""
    arguments = parser().parse_args(argv)
    try:
        run = _load(arguments)
        if arguments.print_config:
            print(document.dump(run.resolved()), end="")
            return Exit.DONE
        resume = read_resume(arguments.resume, arguments.allow_change)
        check_folder(run, resume)
        steps = read_steps(arguments.profile, run)
        return _start(run, resume, steps, arguments)
    except InputError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return Exit.INPUT


def parser() -> argparse.ArgumentParser:
    """The command line of a run."""
    parser = argparse.ArgumentParser(prog="train", description="Trains the model of a YAML file; run again, it resumes.", allow_abbrev=False)
    parser.add_argument("--config", required=True, metavar="FILE", help="the run's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="values that replace the file's, such as train.steps=300")
    parser.add_argument("--dry-run", action="store_true", help="everything up to the first step, with a table of bytes per device")
    parser.add_argument("--replay", type=whole_number, metavar="STEP", help="recompute a logged step twice, and say where a fault in it comes from")
    parser.add_argument("--profile", metavar="A:B", help="record steps A to B, with a table of device time by signal")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config and stop")
    parser.add_argument("--resume", default="auto", metavar="auto|never|PATH", help="never: from step 0; PATH: another run, or one of its checkpoints")
    parser.add_argument("--allow-change", action="append", default=[], metavar="KEY", help="a key of model or data that may differ from the run's before")
    parser.add_argument("--stopped-code", type=whole_number, default=Exit.DONE, metavar="N", help="exit code where a signal stops the run before its last step (0)")
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
        problems=(*flag_problems(*flags), *cluster_problems(cluster)),
    )


def _start(run: Run, resume: Resume, profiled: Steps | None, arguments: argparse.Namespace) -> int:
    with imports.kept():
        from train.processes import leave, start
        from train.xla import configure

    # stderr may be no file: of a test, or closed.
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        faulthandler.enable()
    for warning in configure(run.config.xla, virtual=run.config.devices.virtual_cpu is not None, fp8=run.config.model.fp8):
        print(f"jgt: {warning}", file=sys.stderr)
    cluster = find_cluster(arguments.coordinator, arguments.processes, arguments.process)
    # JAX aborts without saying why; so the watch has to come first.
    heartbeat_seconds = int(2 * run.config.watchdog.peer_seconds) + 10
    start(cluster, run.config.devices.virtual_cpu, heartbeat_seconds, run.where("devices.virtual_cpu"))
    if arguments.dry_run:
        with imports.kept():
            from train.dry_run import dry_run

        dry_run(run)
        return Exit.DONE
    if arguments.replay is not None:
        with imports.kept():
            from train.replay import replay

        replay(run, arguments.replay, resume)
        return Exit.DONE

    with imports.kept():
        from train.checkpoint import SaveError
        from train.clock import process_started
        from train.guard import SkippedError
        from train.loop import train

    try:
        return train(run, resume, profiled=profiled, begun=process_started(), stopped_code=arguments.stopped_code)
    except InputError as error:
        print("\n".join(error.problems), file=sys.stderr)
        code = Exit.INPUT
    except (SkippedError, SaveError, InUseError) as error:
        print(f"jgt: {error}", file=sys.stderr)
        code = Exit.FAILED
    except Exception:
        traceback.print_exc()
        code = Exit.FAILED
    leave(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
