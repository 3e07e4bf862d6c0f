"""Tables of one's own, as CSV: a row for each tick, a column for each stage, items such as F3.5 B1.5 in a cell."""

from __future__ import annotations

from pathlib import Path

from jgt.document import InputError, collect, is_file, nearest, shown
from jgt.pipeline.entries import Entry, columns, gaps, read_entries, read_rows
from jgt.pipeline.report import shape
from jgt.pipeline.schedule import KINDS, VIRTUAL, Item, Kind, Row, Table, make_table, virtual_of
from jgt.pipeline.verify import Fault, capped, find_faults

SUFFIX = ".csv"
MAX_CELLS = 1_000_000
"""Stages x ticks of a schedule by name."""
_MAX_MISSING = 10_000


def find_table(name: str, stages: int | None, microbatches: int | None, virtual: int | None, where: str) -> Table:
    """The table of a schedule of VIRTUAL, or of a file that ends with .csv.

    None leaves a number to the file, or `virtual` to the schedule. Raises InputError with every problem: `where`, followed
    by what is wrong with the name or a number, or file and line of what is wrong in the table.
    """
    numbers = {"stages": stages, "microbatches": microbatches, "virtual": virtual}
    problems = [f"{key} must be at least 1, not {number}" for key, number in numbers.items() if number is not None and number < 1]
    of_file: list[str] = []
    table = None
    if not name.endswith(SUFFIX):
        problems += _misnamed(name, numbers) or ([] if problems else _too_large(name, stages or 1, microbatches or 1, virtual))
    elif not is_file(name):
        problems.append(f"there is no file {shown(name)}. Name a {SUFFIX} file or one of {', '.join(VIRTUAL)}")
    else:
        with collect(of_file):
            table = read_table(name)
            problems += _different(table, numbers)
    if problems or of_file:
        raise InputError([*(f"{where}: {problem}" for problem in problems), *of_file])
    return table or make_table(name, stages or 1, microbatches or 1, virtual)


def read_table(path: str | Path) -> Table:
    """Reads a table from a CSV file and verifies it. The table has the file's name.

    A cell holds items separated by spaces: F3.5 is microbatch 3 forward through chunk 5, B backward, W its weight
    gradients; without a chunk, that of the stage's number; "-" or nothing: idle. Microbatches, chunks along the layers,
    stages and ticks count from 0. Empty lines and lines that start with # are skipped. A chunk is on the stage in whose
    column it stands. Where a W stands, every B needs its own. Raises InputError with all problems, each with its line.
    """
    file = Path(path)
    rows = read_rows(file)
    faults: list[Fault] = []
    lines = [line for line, _ in rows]
    entries = list(read_entries(rows, faults)) if rows else []
    if not rows:
        faults.append(Fault(text="there is no tick. Write a row for each tick and a column for each stage, with items such as F0 or B2"))
    elif not faults and not entries:
        faults.append(Fault(text="there is no item. Write F0 for microbatch 0 forward, B0 for backward"))
    if faults := faults or gaps(entries) or columns(entries) or _hollow(entries):
        raise _error(file, lines, faults)
    table = _table(file.name, entries, len(rows), len(rows[0][1]))
    if faults := find_faults(table):
        raise _error(file, lines, faults)
    return table


def write_table(table: Table) -> str:
    """The text of a CSV file from which read_table makes the table again, but for its name."""
    # A comment with more commas than a row would have a spreadsheet add columns.
    title = shape(table).replace(",", ";")
    lines = [f"# {title}", "# " + ",".join(f"stage {stage}" for stage in range(table.num_stages))]
    rows = [table.rows(kind) for kind in KINDS]
    for tick in range(table.num_ticks):
        cells = [
            [item_text(table, kind, item) for kind, row in zip(KINDS, rows, strict=True) if (item := row[tick][stage]) is not None]
            for stage in range(table.num_stages)
        ]
        lines.append(",".join(" ".join(cell) or "-" for cell in cells))
    return "\n".join(lines) + "\n"


def item_text(table: Table, kind: Kind, item: Item) -> str:
    """F3.5, or F3 where each stage holds the chunk of its own number."""
    plain = table.stages == tuple(range(table.num_stages))
    return f"{kind}{item.microbatch}" if plain else f"{kind}{item.microbatch}.{item.chunk}"


def _error(file: Path, lines: list[int], faults: list[Fault]) -> InputError:
    """Faults that stand in a tick come with its line."""
    places = [f"{file}:{lines[fault.tick]}" if fault.tick is not None else str(file) for fault in faults]
    return InputError(capped([f"{place}: {fault.text}" for place, fault in zip(places, faults, strict=True)]))


def _table(name: str, entries: list[Entry], num_ticks: int, num_stages: int) -> Table:
    grids: dict[Kind, list[list[Item | None]]] = {kind: [[None] * num_stages for _ in range(num_ticks)] for kind in KINDS}
    for entry in entries:
        grids[entry.kind][entry.tick][entry.stage] = entry.item

    def rows(kind: Kind) -> tuple[Row, ...]:
        return tuple(map(tuple, grids[kind]))

    homes = {entry.item.chunk: entry.stage for entry in entries}
    return Table(
        name=name,
        num_stages=num_stages,
        num_microbatches=len({entry.item.microbatch for entry in entries}),
        stages=tuple(homes[chunk] for chunk in range(len(homes))),
        forward=rows("F"),
        backward=rows("B"),
        weight=rows("W") if any(entry.kind == "W" for entry in entries) else None,
    )


def _misnamed(name: str, numbers: dict[str, int | None]) -> list[str]:
    """What is wrong with a schedule by name, but for numbers below 1."""
    missing = [f"{key} is missing. Only a {SUFFIX} file tells its own" for key in ("stages", "microbatches") if numbers[key] is None]
    if name not in VIRTUAL:
        return [f"there is no schedule {shown(name)}. {nearest(name, VIRTUAL)} A table of your own is a path that ends with {SUFFIX}", *missing]
    fixed, virtual = VIRTUAL[name], numbers["virtual"]
    if virtual is not None and virtual >= 1 and fixed not in (None, virtual):
        free = " or ".join(other for other, number in VIRTUAL.items() if number is None)
        missing.append(f"virtual is {virtual}, but {name} has always {_chunks(fixed)}. Leave virtual out, or take {free}")
    return missing


def _too_large(name: str, stages: int, microbatches: int, virtual: int | None) -> list[str]:
    chunks = stages * virtual_of(name, virtual)
    cells = chunks * (microbatches + 2 * stages)
    if cells <= MAX_CELLS:
        return []
    return [f"{chunks:,} chunks on {stages:,} stages and {microbatches:,} microbatches make about {cells:,} cells; at most {MAX_CELLS:,} are planned"]


def _hollow(entries: list[Entry]) -> list[Fault]:
    """A table of which most is missing would be named item by item, without end."""
    microbatches, chunks = (len({number(entry.item) for entry in entries}) for number in (lambda i: i.microbatch, lambda i: i.chunk))
    if microbatches * chunks <= max(len(entries), _MAX_MISSING):
        return []
    return [Fault(text=f"{len(entries):,} items for {microbatches:,} microbatches and {chunks:,} chunks. Every microbatch runs through every chunk, forward and backward")]


def _different(table: Table, numbers: dict[str, int | None]) -> list[str]:
    """Numbers that are not those of a table, but for numbers below 1."""
    held = {"stages": table.num_stages, "microbatches": table.num_microbatches, "virtual": table.virtual}
    return [
        f"{key} is {number}, but the table {table.name} has {held[key]}. Change one of them"
        for key, number in numbers.items()
        if number is not None and number >= 1 and number != held[key]
    ]


def _chunks(number: int | None) -> str:
    return f"{number} chunk{'' if number == 1 else 's'} a stage"
