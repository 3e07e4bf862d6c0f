"""The command. Heavy imports wait for a checked config."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jgt.document import InputError, collect
from jgt.plan.chip import Target, parse_target
from train.config import Run, load
from train.flags import whole_number

if TYPE_CHECKING:
    from jgt.plan.plan import Plan


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: planned, within budget and as locked; 1: not, and stderr says where; 2: the input is wrong."""
    arguments = _parser().parse_args(argv)
    try:
        target, runs = _read(arguments)
        from jgt.plan.lock import changes, read_lock, write_lock
        from train.plan.make import make_plan

        locked = None if arguments.check is None else read_lock(Path(arguments.check))
        if sys.stderr.isatty():
            print("Compiling the step ...", file=sys.stderr)
        plans = [make_plan(run, target, arguments.devices) for run in runs]
    except InputError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    except (ValueError, RuntimeError) as error:
        print(f"jgt plan: the step cannot be compiled, or what was compiled cannot be read: {error}", file=sys.stderr)
        return 1
    if len(plans) == 2:
        return _compare(arguments, plans)
    plan = plans[0]
    _show(arguments, plan)
    if arguments.html is not None:
        from jgt.plan.page import write_page

        write_page(plan, Path(arguments.html))
        print(f"Wrote {arguments.html}", file=sys.stderr)
    if arguments.lock is not None:
        write_lock(plan, Path(arguments.lock))
        print(f"Wrote {arguments.lock}", file=sys.stderr)
    from jgt.plan.budget import overruns

    problems = overruns(plan, runs[0].budget)
    if locked is not None and (lines := changes(plan, locked)):
        problems.append(f"{arguments.check}: the plan has changed (- as locked, + as it is). If that is meant: --lock {arguments.check}")
        problems += lines
    if problems:
        print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


def _read(arguments: argparse.Namespace) -> tuple[Target | None, list[Run]]:
    """The target, and the run to plan, or the two to compare. Raises InputError with the problems of all."""
    problems: list[str] = []
    target: Target | None = None
    with collect(problems):
        target = None if arguments.target is None else parse_target(arguments.target)
    if arguments.config is None and arguments.diff is None:
        problems.append("--config FILE is missing: the run to plan")
        raise InputError(problems)
    if arguments.diff is not None:
        alone = [name for name in ("html", "lock", "check") if getattr(arguments, name) is not None]
        problems += [f"--{name} is of one plan, and does not go with --diff" for name in alone]
    # The devices of the target, or of --devices, stand for those of the file.
    count = arguments.devices if target is None else target.num_devices
    devices = [] if count is None else [f"devices.virtual_cpu={count}"]
    runs: list[Run] = []
    for config, more in _runs(arguments):
        with collect(problems):
            runs.append(load(config, [*arguments.overrides, *more, *devices]))
    if problems:
        raise InputError(problems)
    return target, runs


def _runs(arguments: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Each run's file and overrides: with --config, --diff names two rules files for it."""
    if arguments.diff is None:
        return [(arguments.config, [])]
    if arguments.config is None:
        return [(path, []) for path in arguments.diff]
    return [(arguments.config, [f"rules={Path(path).resolve()}"]) for path in arguments.diff]


def _show(arguments: argparse.Namespace, plan: Plan) -> None:
    if arguments.json:
        print(json.dumps(plan.to_json(), indent=1))
        return
    from jgt.plan.table import print_plan

    print_plan(plan)


def _compare(arguments: argparse.Namespace, plans: Sequence[Plan]) -> int:
    from jgt.plan.diff import differences, print_differences

    if arguments.json:
        print(json.dumps(differences(plans[0], plans[1]), indent=1))
    else:
        a, b = plans
        print_differences(a, b, *arguments.diff)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jgt plan", description="Tells what XLA will do with a run's step, for hardware that need not be here.")
    parser.add_argument("--config", metavar="FILE", help="the run's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="values that replace the file's, such as mesh.tensor=4")
    parser.add_argument("--target", metavar="CHIP:HOSTSxGPUS", help="plan for these GPUs, such as h100:8x8 (extra jgt[plan-gpu]); else for CPU devices")
    parser.add_argument("--devices", type=whole_number, metavar="N", help="CPU devices to plan for, instead of the file's")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--html", metavar="FILE", help="write a page with the plan")
    parser.add_argument("--lock", metavar="FILE", help="write the plan's contract")
    parser.add_argument("--check", metavar="FILE", help="fail when the plan has another contract than this one")
    parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help="compare two runs, or with --config two rules files")
    return parser


if __name__ == "__main__":
    sys.exit(main())
