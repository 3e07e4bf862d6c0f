"""`jgt plan`: plans a run, and compares the plan with a budget, a lock, or another run's plan.

The command exists to be run often, by people and by CI, so it answers an input's mistakes before it spends seconds on JAX: options, runs
and rules are all checked first, and all problems are printed at once. Only then are JAX and the planner imported, inside the functions. Its
exit code tells CI two things apart: 2 is wrong input, and 1 is a fault that only the compiled step shows, such as a budget exceeded.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jgt.document import InputError
from jgt.planner.budget import overruns

from ..code.files import read_code
from ..command_line import RunParser, whole_number
from ..config import Run, load
from .asked import Asked, read_asked
from .options import add_arguments

if TYPE_CHECKING:
    from jgt.planner.plan import Plan

    from ..search.plans import Answer, Question
    from .sync import Exchange, SyncPolicy


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0: planned, within the budget and equal to the lock. 1: not so, and stderr says where. 2: the input is wrong."""
    arguments = parser().parse_args(argv)
    if arguments.search:
        # It imports numpy.
        from .search import search

        return search(arguments, answer)
    try:
        asked = read_asked(arguments)
        from jgt.planner.view.lock import read_lock

        from .make import make_exchange, make_plan, use_devices

        locked = None if arguments.check is None else read_lock(Path(arguments.check))
        # Compiling takes seconds to minutes. A log file does not need to know.
        if sys.stderr.isatty():
            print("Compiling the step ...", file=sys.stderr)
        if asked.target is None:
            # Of two runs, the larger one decides: JAX fixes the number of its devices when it starts.
            use_devices(asked.runs, arguments.devices)
        if arguments.sync:
            return _compare_policies(arguments, asked)
        plans = [make_plan(run, asked.target, arguments.devices, price=asked.price) for run in asked.runs]
        exchange = make_exchange(asked.runs[0], asked.target, arguments.devices) if len(asked.runs) == 1 else None
    except InputError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    except (ValueError, RuntimeError) as error:
        print(f"jgt plan: the step cannot be compiled, or the compiled program cannot be read: {error}", file=sys.stderr)
        return 1
    if len(plans) == 2:
        return _compare(arguments, plans)
    return _report(arguments, plans[0], exchange, asked.runs[0], locked)


def answer(question: Question) -> Answer:
    """The answer to a search's question. Other processes call it for the search, so this one does not import the planner."""
    from . import worker

    return worker.answer(question)


def _report(arguments: argparse.Namespace, plan: Plan, exchange: Exchange | None, run: Run, locked: str | None) -> int:
    """Writes a plan where the options say, and compares it with the budget and the lock. Returns the exit code."""
    from jgt.planner.view.lock import changes, write_lock

    _show(arguments, plan, exchange)
    if arguments.html is not None:
        from jgt.planner.view.page import write_page

        write_page(plan, Path(arguments.html))
        print(f"Wrote {arguments.html}", file=sys.stderr)
    if arguments.lock is not None:
        write_lock(plan, Path(arguments.lock))
        print(f"Wrote {arguments.lock}", file=sys.stderr)
    # The lock is compared even if the budget is exceeded: one run of the command shows everything.
    problems = overruns(plan, run.budget)
    if locked is not None and (lines := changes(plan, locked)):
        problems.append(
            f"{arguments.check}: the plan has changed (- lock, + plan). If the change is intended, update it with --lock {arguments.check}"
        )
        problems += lines
    if problems:
        print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


def _show(arguments: argparse.Namespace, plan: Plan, exchange: Exchange | None) -> None:
    if arguments.json:
        print(json.dumps(plan.to_json() | ({} if exchange is None else {"exchange": exchange.to_json()}), indent=1))
        return
    from jgt.planner.view.table import print_plan

    print_plan(plan)
    if exchange is not None:
        from .sync import print_exchange

        print_exchange(plan, exchange)


def _compare_policies(arguments: argparse.Namespace, asked: Asked) -> int:
    """Prints what `every`, `late` and `wire` would cost. Raises InputError for a run without `sync:`."""
    from .make import make_exchange, make_plan
    from .sync import policies, policy_rows, print_policies

    run = asked.runs[0]
    if run.config.sync is None:
        example = f"sync={{axis: {next(iter(run.mesh))}}}"
        raise InputError([f"{run.root.where}: --sync needs the axis of a section sync:. Add it, for example '{example}'"])
    code, refused = read_code(arguments.code), list[str]()
    found: list[tuple[SyncPolicy, Plan, Plan | None]] = []
    for policy in policies(run):
        try:
            one = load(arguments.config, [*arguments.overrides, policy.override, *asked.devices], code=code)
            exchange = make_exchange(one, asked.target, arguments.devices)
            # A replica's step is the same program whatever it exchanges.
            is_known = exchange is not None and bool(found) and found[-1][2] is not None
            step = found[-1][1] if is_known else make_plan(one, asked.target, arguments.devices)
        except InputError as error:
            # Not every model's gradients can be exchanged.
            if policy.every > 1 or run.config.sync.every == 1:
                raise
            refused += error.problems
            continue
        found.append((policy, step, None if exchange is None else exchange.plan))
    for problem in dict.fromkeys(refused):
        print(f"Not compared: {problem}", file=sys.stderr)
    rows = policy_rows(found)
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        print_policies(run.config.sync.axis, rows)
    return 0


def _compare(arguments: argparse.Namespace, plans: Sequence[Plan]) -> int:
    from jgt.planner.view.compare import differences, print_differences

    if arguments.json:
        print(json.dumps(differences(plans[0], plans[1]), indent=1))
    else:
        a, b = plans
        print_differences(a, b, *arguments.diff)
    return 0


def parser() -> RunParser:
    """The command line of a plan."""
    description = "Shows what XLA will do with a run's training step, also for GPUs that you do not have."
    # With --diff there is no other run.
    parser = RunParser("jgt plan", description, is_required=False)
    parser.add_argument(
        "--target",
        metavar="CHIP:HOSTSxGPUS",
        help="plan for GPUs, such as h100:8x8: 8 hosts with 8 H100s (needs the extra jgt[plan-gpu]); default: CPU devices",
    )
    parser.add_argument(
        "--chip", metavar="FILE", help="a chip file of your own; --target names it by the file's name: mine:8x8 for mine.yaml"
    )
    figure = "change a figure of the chip, such as nic_gbs=25; repeatable"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=figure)
    parser.add_argument("--price", metavar="FILE", help="a YAML file with dollars for an hour of one GPU, such as h100: 2.5")
    parser.add_argument("--devices", type=whole_number, metavar="N", help="plan for N CPU devices; default: the number in the run's file")
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON object instead of tables")
    parser.add_argument("--html", metavar="FILE", help="write the plan as an HTML page")
    parser.add_argument("--lock", metavar="FILE", help="write a lock: a text file of what the step sends, stores and computes")
    parser.add_argument("--check", metavar="FILE", help="compare the plan with a lock, and exit with code 1 if it differs")
    parser.add_argument("--sync", action="store_true", help="compare what sync.every, late and wire would cost, as a table")
    both = "compare two plans: each of A and B is a run's file, a rules file or overrides such as 'mesh={data: 8}'"
    parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help=both)
    add_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
