"""`jgt plan`: plans a run, and compares the plan with a budget, a lock, or another run's plan.

People and CI run the command often, so it answers an input's mistakes before it spends seconds on JAX: options, runs and rules are all
checked first, and all problems are printed at once. Only then are JAX and the planner imported, inside the functions. Exit code 2 is wrong
input, and 1 is a fault that only the compiled step shows, such as a budget exceeded.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from jgt.document import InputError

from ..files.disk import replaced
from .request import Request, Texts, parser, read_request

if TYPE_CHECKING:
    from jgt import Plan
    from jgt.planner import Budget, Target

    from ..config import Run
    from .cost import Cost
    from .search.plans import PlanFigures, RunFile
    from .sync import Exchange, SyncPolicy


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0: planned, within the budget and equal to the lock. 1: not so, and stderr says where. 2: the input is wrong."""
    arguments = parser().parse_args(argv)
    if arguments.search:
        # It imports numpy.
        from .searching import search

        return search(arguments, _answer)
    try:
        request = read_request(arguments)
        from jgt.planner import Report

        from .cost import costs_of
        from .make import make_exchange, make_plan, use_devices

        locked = None if arguments.check is None else Report.read_lock(Path(arguments.check))
        # Compiling takes seconds to minutes. A log file does not need to know.
        if sys.stderr.isatty():
            print("Compiling the step ...", file=sys.stderr)
        if request.target is None:
            # The larger run decides: JAX fixes the number of its devices when it starts.
            use_devices(request.runs)
        if request.texts is not None:
            return _generation(arguments, request, request.texts)
        if arguments.sync:
            return _compare_policies(arguments, request)
        plans = [make_plan(run, request.target, price=request.price) for run in request.runs]
        exchange = make_exchange(request.runs[0], request.target) if len(request.runs) == 1 else None
        is_priced = len(plans) == 1 and (request.price is not None or request.tokens is not None)
        costs = costs_of(request.runs[0], plans[0], request.tokens) if is_priced else []
    except InputError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    except (ValueError, RuntimeError) as error:
        print(f"jgt plan: the step cannot be compiled, or the compiled program cannot be read: {error}", file=sys.stderr)
        return 1
    if len(plans) == 2:
        return _compare(arguments, plans)
    return _report(arguments, plans[0], exchange, costs, request.runs[0].budget, locked)


def auto(run: Run, arguments: argparse.Namespace, num_processes: int, say: Callable[[str], None]) -> Run:
    """`train.auto`: the run with the best layout for this machine's devices, as in `auto.py`. Raises InputError."""
    from .auto import with_best_layout

    return with_best_layout(run, arguments, num_processes, say)


def _answer(file: RunFile, target: Target) -> PlanFigures:
    """The figures of a plan. Other processes call it for a search, so the searching process does not import the planner."""
    from . import make

    return make.answer(file, target)


def _report(
    arguments: argparse.Namespace, plan: Plan, exchange: Exchange | None, costs: Sequence[Cost], budget: Budget, locked: str | None
) -> int:
    """Writes a plan where the options say, and compares it with the budget and the lock. Returns the exit code."""
    from jgt.planner import Report

    _show(arguments, plan, exchange, costs)
    # The lock is compared even if the budget is exceeded: one run of the command shows everything.
    problems, report = budget.overruns(plan), Report(plan)
    writers = {arguments.html: report.write_page, arguments.lock: lambda new: new.write_text(report.lock, encoding="utf-8")}
    for name, write in writers.items():
        if name is not None:
            try:
                with replaced(Path(name)) as new:
                    write(new)
                print(f"Wrote {name}", file=sys.stderr)
            except OSError as error:
                problems.append(f"{name}: cannot be written: {error.strerror or error}")
    if locked is not None and (lines := Report(plan).changes(locked)):
        problems.append(
            f"{arguments.check}: the plan has changed (- lock, + plan). If the change is intended, update it with --lock {arguments.check}"
        )
        problems += lines
    if problems:
        print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


def _show(arguments: argparse.Namespace, plan: Plan, exchange: Exchange | None, costs: Sequence[Cost]) -> None:
    if arguments.json:
        more = {"exchange": exchange and exchange.to_json(), "costs": [asdict(cost) for cost in costs]}
        print(json.dumps(plan.to_json() | {name: value for name, value in more.items() if value}, indent=1))
        return
    from jgt.planner import Report

    Report(plan).print()
    if exchange is not None:
        from .sync import print_exchange

        print_exchange(plan, exchange)
    if costs:
        from .cost import print_costs

        print_costs(costs)


def _generation(arguments: argparse.Namespace, request: Request, texts: Texts) -> int:
    """Plans generation, and prints the plan. Raises InputError."""
    from .generation import make_generation, print_generation

    plan = make_generation(request.runs[0], request.target, texts, price=request.price)
    if arguments.json:
        print(json.dumps(plan.to_json(), indent=1))
    else:
        print_generation(plan)
    return 0


def _compare_policies(arguments: argparse.Namespace, request: Request) -> int:
    """Prints what `every`, `late` and `wire` would cost. Raises InputError for a run without `sync:`."""
    from .make import make_exchange, make_plan
    from .sync import policies, policy_rows, print_policies

    run = request.runs[0]
    if run.config.sync is None:
        example = f"sync={{axis: {next(iter(run.mesh))}}}"
        raise InputError([f"{run.root.where}: --sync needs the axis of a section sync:. Add it, for example '{example}'"])
    refused: list[str] = []
    plans: list[tuple[SyncPolicy, Plan, Plan | None]] = []
    for policy in policies(run.config):
        try:
            one = request.files[0].adding(policy.override).load()
            exchange = make_exchange(one, request.target)
            # A replica's step is the same program whatever it exchanges.
            is_known = exchange is not None and bool(plans) and plans[-1][2] is not None
            step = plans[-1][1] if is_known else make_plan(one, request.target)
        except InputError as error:
            # Not every model's gradients can be exchanged.
            if policy.every > 1 or run.config.sync.every == 1:
                raise
            refused += error.problems
            continue
        plans.append((policy, step, None if exchange is None else exchange.plan))
    for problem in dict.fromkeys(refused):
        print(f"Not compared: {problem}", file=sys.stderr)
    rows = policy_rows(plans)
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        print_policies(run.config.sync.axis, rows)
    return 0


def _compare(arguments: argparse.Namespace, plans: Sequence[Plan]) -> int:
    from jgt.planner import Report

    differences = Report(plans[0]).compare(plans[1])
    if arguments.json:
        print(json.dumps(differences.to_json(), indent=1))
    else:
        differences.print(*arguments.diff)
    return 0


if __name__ == "__main__":
    sys.exit(main())
