"""The command `jgt schedule`: shows one schedule, or compares all of them.

All problems with the arguments are collected before anything is written or printed. The file is written before anything is printed, so a
command that fails leaves stdout empty, and a script can trust the JSON that it reads there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

from jgt.command.parser import CommandParser
from jgt.document import InputError
from jgt.schedule.balance import MeasuredCosts, simulate_measured
from jgt.schedule.custom import SUFFIX, write_table
from jgt.schedule.schedules import DEFAULT_VIRTUAL, FREE_NAMES, SCHEDULES, find_table
from jgt.schedule.simulate import (
    COMPARISON_COLUMNS,
    COMPARISON_NOTE,
    Costs,
    Simulation,
    comparison_row,
    json_object,
    simulate,
    summarize,
)
from jgt.schedule.table import Table
from jgt.schedule.timeline import print_comparison, print_timeline

COMMAND = "jgt schedule"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: printed and written; 2: the input is wrong, and stderr lists every problem."""
    arguments = parser().parse_args(argv)
    try:
        simulated = _simulate(arguments)
        if arguments.csv is not None:
            Path(arguments.csv).write_text(write_table(simulated[0].table), encoding="utf-8")
    except InputError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{COMMAND}: {arguments.csv} cannot be written: {error.strerror or error}", file=sys.stderr)
        return 2
    if arguments.json:
        objects = [json_object(simulation) for simulation in simulated]
        print(json.dumps(objects if arguments.compare else objects[0]))
    elif arguments.compare:
        # Rounded: bubbles that are equal on paper differ in their last bits.
        bubbles = [round(simulation.bubble, 6) for simulation in simulated]
        best = {index for index, bubble in enumerate(bubbles) if bubble == min(bubbles)}
        print_comparison(COMPARISON_COLUMNS, [comparison_row(simulation) for simulation in simulated], best)
        print(COMPARISON_NOTE)
    else:
        print(*summarize(simulated[0]), "", sep="\n", flush=True)
        print_timeline(simulated[0].table)
    return 0


def _simulate(arguments: argparse.Namespace) -> list[Simulation]:
    """The requested schedules. Raises InputError with every problem of the arguments."""
    problems: list[str] = []
    costs, stage_costs, measured = Costs(), None, None
    with _option_problems("--costs", problems), InputError.collect(problems):
        # The name of a run's directory, unless it may be numbers.
        if Path(arguments.costs).is_dir():
            measured = MeasuredCosts.read(arguments.costs, f"{COMMAND}: --costs")
        else:
            costs = _read_costs(arguments.costs)
    with _option_problems("--stage-costs", problems):
        stage_costs = None if arguments.stage_costs is None else _read_numbers(arguments.stage_costs)
    problems += _output_problems(arguments)
    simulated: list[Simulation] = []
    for table in _find_tables(arguments, problems):
        # The tables are verified by now; only the number of stage costs can still be wrong.
        with _option_problems("--stage-costs", problems):
            simulated.append(simulate(table, costs, stage_costs) if measured is None else simulate_measured(table, measured, stage_costs))
    if problems:
        raise InputError(problems)
    return simulated


def _find_tables(arguments: argparse.Namespace, problems: list[str]) -> list[Table]:
    """The table NAME. To compare, NAME's table if it is a file, then every schedule with the file's stages and microbatches."""
    name, stages, microbatches = arguments.name, arguments.stages, arguments.microbatches
    if not arguments.compare and name is None:
        advice = f"Name {', '.join(SCHEDULES)} or a {SUFFIX} file, or compare them with --compare"
        problems.append(f"{COMMAND}: a schedule is missing. {advice}")
    tables: list[Table] = []
    if name is not None and not (arguments.compare and name in SCHEDULES):
        with InputError.collect(problems):
            virtual = None if arguments.compare else arguments.virtual
            tables = [find_table(name, stages, microbatches, virtual, COMMAND)]
            stages, microbatches = tables[0].num_stages, tables[0].num_microbatches
    for other, schedule in SCHEDULES.items() if arguments.compare else ():
        with InputError.collect(problems):
            # A schedule with a fixed number of chunks would refuse --virtual.
            virtual = arguments.virtual if schedule.virtual is None else None
            tables.append(find_table(other, stages, microbatches, virtual, COMMAND))
    return tables


@contextlib.contextmanager
def _option_problems(option: str, problems: list[str]) -> Generator[None]:
    """Appends the message of a ValueError raised inside to `problems`, as one of this option, and continues after the block."""
    try:
        yield
    except ValueError as error:
        problems.append(f"{COMMAND}: {option}: {error}")


def _read_costs(text: str) -> Costs:
    numbers = _read_numbers(text)
    if len(numbers) != 3:
        raise ValueError(f"{len(numbers)} numbers, but there are 3 kinds of items. Write F,B,W, such as 1,1,1")
    return Costs(forward=numbers[0], backward=numbers[1], weight=numbers[2])


def _read_numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r} is not a list of numbers. Separate them with commas, such as 1,1,1.2") from None


def _output_problems(arguments: argparse.Namespace) -> list[str]:
    """The problems that would keep the file from being written, as far as they can be checked beforehand."""
    file, problems = arguments.csv, list[str]()
    if file is None:
        return problems
    if arguments.compare:
        problems.append("writes one schedule, but --compare shows all. Leave one of the two out")
    if not file.endswith(SUFFIX):
        problems.append(f"{file!r} does not end with {SUFFIX}. Name a {SUFFIX} file")
    elif Path(file).is_dir():
        problems.append(f"{file!r} is a folder. Name a file")
    elif not Path(file).parent.is_dir():
        problems.append(f"{file!r} cannot be written: there is no folder {str(Path(file).parent)!r}")
    return [f"{COMMAND}: --csv: {problem}" for problem in problems]


def parser() -> CommandParser:
    """The command line of the schedule."""
    parser = CommandParser(COMMAND, "Shows a pipeline schedule with its bubble and its peak of activations. Needs no devices.")
    parser.add_argument("name", nargs="?", metavar="NAME", help=f"{', '.join(SCHEDULES)}, or the path of your own table, a {SUFFIX} file")
    parser.add_argument("--stages", type=int, metavar="P", help="number of stages")
    parser.add_argument("--microbatches", type=int, metavar="M", help="number of microbatches")
    virtual = f"chunks on each stage, for {' and '.join(FREE_NAMES)} (default: {DEFAULT_VIRTUAL})"
    parser.add_argument("--virtual", type=int, metavar="V", help=virtual)
    costs = "cost of a microbatch on a whole stage: forward, backward, weight gradients (default: 1,1,1); or a run that has measured them"
    parser.add_argument("--costs", metavar="F,B,W|RUN", default="1,1,1", help=costs)
    parser.add_argument("--stage-costs", metavar="C,C,..", help="relative cost of each stage (default: 1 each)")
    parser.add_argument("--json", action="store_true", help="print one JSON object or, with --compare, a list of them")
    parser.add_argument("--csv", metavar="FILE.csv", help="write the table as a CSV file, which you can edit and pass as NAME")
    parser.add_argument("--compare", action="store_true", help="compare all schedules, and NAME if it is a file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
