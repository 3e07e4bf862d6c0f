"""Finds the verified table for what a user writes: a schedule's name or the path of a CSV file.

A name needs the numbers of stages and microbatches; a file brings its own, and any number given beside it must agree. Every
problem with the name and the numbers is reported at once, in front of the problems inside the file.
"""

from __future__ import annotations

from collections.abc import Mapping

from jgt.document import InputError, nearest, path_problem, shown
from jgt.schedule.custom import SUFFIX, read_table
from jgt.schedule.schedules import FREE_NAMES, SCHEDULES, schedule_table
from jgt.schedule.table import Table, count_noun

MAX_CELLS = 1_000_000
"""The largest table that is built for a name, in stages x ticks: a typo must not use up the memory."""

Numbers = Mapping[str, int | None]
"""stages, microbatches and virtual, as the user gave them."""


def find_table(name: str, stages: int | None, microbatches: int | None, virtual: int | None, where: str) -> Table:
    """The table of one of SCHEDULES, or of a file whose name ends with .csv.

    None leaves a number to the file or, for `virtual`, to the schedule. Raises InputError with every problem: problems with the
    name or a number begin with `where`, problems inside a file with its path and line.
    """
    numbers = {"stages": stages, "microbatches": microbatches, "virtual": virtual}
    problems = [f"{key} must be at least 1, not {number}" for key, number in numbers.items() if number is not None and number < 1]
    file_problems: list[str] = []
    table = None
    if not name.endswith(SUFFIX):
        # The size is computed only from a known name and from numbers that are right.
        problems += _name_problems(name, numbers) or ([] if problems else _size_problems(name, stages or 1, microbatches or 1, virtual))
    elif path_problem(name):
        problems.append(f"there is no file {shown(name)}. Name a {SUFFIX} file or one of {', '.join(SCHEDULES)}")
    else:
        with InputError.collect(file_problems):
            table = read_table(name)
            problems += _conflicts(table, numbers)
    if problems or file_problems:
        raise InputError([*(f"{where}: {problem}" for problem in problems), *file_problems])
    # Every number was given, or there would be a problem: `or 1` only says so to the type checker.
    return table or schedule_table(name, stages or 1, microbatches or 1, virtual)


def _name_problems(name: str, numbers: Numbers) -> list[str]:
    """An unknown name, missing numbers, and a number of chunks that the schedule does not allow."""
    missing = [f"{key} is missing. Only a {SUFFIX} file has its own" for key in ("stages", "microbatches") if numbers[key] is None]
    if name not in SCHEDULES:
        advice = f"{nearest(name, SCHEDULES)} A table of your own is a path that ends with {SUFFIX}"
        return [f"there is no schedule {shown(name)}. {advice}", *missing]
    fixed, virtual = SCHEDULES[name].virtual, numbers["virtual"]
    if virtual is None or virtual < 1 or fixed is None or fixed == virtual:
        return missing
    chunks = f"{count_noun(fixed, 'chunk')} a stage"
    return [*missing, f"virtual is {virtual}, but {name} always has {chunks}. Leave virtual out, or take {' or '.join(FREE_NAMES)}"]


def _size_problems(name: str, stages: int, microbatches: int, virtual: int | None) -> list[str]:
    # Every schedule has about M + 2S ticks for each chunk of a stage.
    chunks = stages * SCHEDULES[name].chunks_per_stage(virtual)
    cells = chunks * (microbatches + 2 * stages)
    if cells <= MAX_CELLS:
        return []
    table = f"{chunks:,} chunks on {stages:,} stages and {microbatches:,} microbatches make about {cells:,} cells"
    return [f"{table}; at most {MAX_CELLS:,} are allowed. Use fewer of them"]


def _conflicts(table: Table, numbers: Numbers) -> list[str]:
    """Numbers that differ from a file's. Numbers below 1 are reported elsewhere."""
    actual = {"stages": table.num_stages, "microbatches": table.num_microbatches, "virtual": table.virtual}
    return [
        f"{key} is {number}, but the table {table.name} has {actual[key]}. Change one of them"
        for key, number in numbers.items()
        if number is not None and number >= 1 and number != actual[key]
    ]
