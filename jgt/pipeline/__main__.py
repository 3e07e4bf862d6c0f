"""The command. Imports neither JAX nor numpy; matplotlib only for --plot, after the input is checked."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jgt.document import InputError, collect
from jgt.pipeline.custom import SUFFIX, find_table, write_table
from jgt.pipeline.report import COLUMNS, NOTE, as_object, describe, row
from jgt.pipeline.schedule import VIRTUAL, Table
from jgt.pipeline.simulate import Costs, Simulation, simulate
from jgt.pipeline.timeline import show, show_rows

COMMAND = "jgt schedule"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: shown and written; 2: the input is wrong, and stderr has every problem."""
    arguments = _parser().parse_args(argv)
    try:
        simulated = _simulated(arguments)
        _write(arguments, *simulated[0])
    except InputError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 2
    if arguments.json:
        objects = [as_object(*one) for one in simulated]
        print(json.dumps(objects if arguments.compare else objects[0]))
    elif arguments.compare:
        smallest = min(round(simulation.bubble, 6) for _, simulation in simulated)
        best = {index for index, (_, simulation) in enumerate(simulated) if round(simulation.bubble, 6) == smallest}
        show_rows(COLUMNS, [row(*one) for one in simulated], best)
        print(NOTE)
    else:
        print(*describe(*simulated[0]), "", sep="\n", flush=True)
        show(simulated[0][0])
    return 0


def _simulated(arguments: argparse.Namespace) -> list[tuple[Table, Simulation]]:
    """The schedules that are asked for, simulated. Raises InputError with every problem."""
    problems: list[str] = []
    costs = _costs(arguments.costs, problems)
    stage_costs = _numbers("--stage-costs", arguments.stage_costs, problems)
    problems += _unwritable(arguments)
    tables: list[Table] = []
    with collect(problems):
        tables = _compared(arguments) if arguments.compare else [_table(arguments)]
    simulated = []
    for table in tables:
        try:
            simulated.append((table, simulate(table, costs, stage_costs)))
        except ValueError as error:
            problems.append(f"{COMMAND}: --stage-costs: {error}")
    if problems:
        raise InputError(problems)
    return simulated


def _table(arguments: argparse.Namespace) -> Table:
    if arguments.name is None:
        raise InputError(
            [f"{COMMAND}: a schedule is missing. Name {', '.join(VIRTUAL)} or a {SUFFIX} file, or compare them with --compare"]
        )
    return find_table(arguments.name, arguments.stages, arguments.microbatches, arguments.virtual, COMMAND)


def _compared(arguments: argparse.Namespace) -> list[Table]:
    """All schedules, and before them the file that is named, whose stages and microbatches they get."""
    problems: list[str] = []
    stages, microbatches, tables = arguments.stages, arguments.microbatches, []
    if arguments.name is not None and arguments.name not in VIRTUAL:
        with collect(problems):
            own = find_table(arguments.name, stages, microbatches, None, COMMAND)
            stages, microbatches, tables = own.num_stages, own.num_microbatches, [own]
    for name, fixed in VIRTUAL.items():
        with collect(problems):
            tables.append(find_table(name, stages, microbatches, arguments.virtual if fixed is None else None, COMMAND))
    if problems:
        raise InputError(problems)
    return tables


def _costs(text: str | None, problems: list[str]) -> Costs:
    numbers = _numbers("--costs", text, problems)
    if numbers is None:
        return Costs()
    if len(numbers) != 3:
        problems.append(f"{COMMAND}: --costs: {len(numbers)} numbers, but there are 3 kinds of items. Write F,B,W, such as 1,1,1")
        return Costs()
    try:
        return Costs(forward=numbers[0], backward=numbers[1], weight=numbers[2])
    except ValueError as error:
        problems.append(f"{COMMAND}: --costs: {error}")
        return Costs()


def _numbers(option: str, text: str | None, problems: list[str]) -> list[float] | None:
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        problems.append(f"{COMMAND}: {option}: {text!r} is no list of numbers. Write them with commas between, such as 1,1,1.2")
        return None


def _unwritable(arguments: argparse.Namespace) -> list[str]:
    """What is wrong with the files to write, as far as it can be told before."""
    problems: list[str] = []
    for option, suffix, file in (("--plot", ".png", arguments.plot), ("--csv", SUFFIX, arguments.csv)):
        if file is None:
            continue
        if arguments.compare:
            problems.append(f"{option}: writes one schedule, and --compare shows all. Leave one of the two out")
        if not file.endswith(suffix):
            problems.append(f"{option}: {file!r} does not end with {suffix}. Name a {suffix} file")
        elif Path(file).is_dir():
            problems.append(f"{option}: {file!r} is a folder. Name a file")
        elif not Path(file).parent.is_dir():
            problems.append(f"{option}: {file!r} cannot be written: there is no folder {str(Path(file).parent)!r}")
    if arguments.plot is not None and importlib.util.find_spec("matplotlib") is None:
        problems.append("--plot: matplotlib is not installed. Install it with: pip install 'jgt[plot]'")
    return [f"{COMMAND}: {problem}" for problem in problems]


def _write(arguments: argparse.Namespace, table: Table, simulation: Simulation) -> None:
    """Writes the files that are asked for. Raises InputError where one cannot be written."""
    try:
        if arguments.csv is not None:
            Path(arguments.csv).write_text(write_table(table), encoding="utf-8")
        if arguments.plot is not None:
            from jgt.pipeline.plot import plot

            plot(table, simulation, arguments.plot)
    except OSError as error:
        raise InputError([f"{COMMAND}: {error.filename} cannot be written: {error.strerror or error}"]) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description="Shows a pipeline schedule, its bubble and its peak, without devices.")
    parser.add_argument("name", nargs="?", metavar="NAME", help=f"{', '.join(VIRTUAL)}, or a {SUFFIX} file with a table of your own")
    parser.add_argument("--stages", type=int, metavar="P", help="number of stages")
    parser.add_argument("--microbatches", type=int, metavar="M", help="number of microbatches")
    parser.add_argument("--virtual", type=int, metavar="V", help="chunks of a stage, for interleaved and zb_interleaved (2)")
    parser.add_argument("--costs", metavar="F,B,W", help="cost of a microbatch on a stage: forward, backward, weight gradients (1,1,1)")
    parser.add_argument("--stage-costs", metavar="C,C,..", help="relative cost of each stage (1 each)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, or with --compare a list")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the schedule over time; needs the extra `plot`")
    parser.add_argument("--csv", metavar="FILE.csv", help="write the table, to be edited and given as NAME")
    parser.add_argument("--compare", action="store_true", help="a table of all schedules, and of NAME if it is a file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
