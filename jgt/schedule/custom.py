"""Tables that users write: reads and writes a schedule as a CSV file, whose format is in docs/schedules.md.

The file says nothing twice: stages are counted by the columns, a stage has the chunks that appear in its column, and the number of
microbatches is whatever the items name. So reading has two steps. First the text: cells, spelling, and numbering without gaps, each fault
with its line. Only if the text makes sense as a table does `verify.py` look for missing items and deadlocks, whose messages would be noise
before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from jgt.document import InputError, read_text, shown
from jgt.schedule.table import KINDS, Item, Kind, Table, table_from_items
from jgt.schedule.verify import MAX_FAULTS, Fault, find_faults, limit_texts

SUFFIX = ".csv"
MAX_TABLE_BYTES = 1_000_000
_MAX_MISSING = 10_000
# No more than nine digits: int() raises ValueError for numbers of thousands of digits.
_ITEM = re.compile(r"(?P<kind>[FBW])(?P<microbatch>[0-9]{1,9})(?:\.(?P<chunk>[0-9]{1,9}))?")
_SPELLING = "Write F, B or W, a microbatch, and .chunk if a stage has several, such as F3 or B3.5; - if the stage is idle"


class CsvItem(NamedTuple):
    """An item and its place in the file."""

    line: int
    tick: int
    stage: int
    kind: Kind
    item: Item


def read_table(path: str | Path) -> Table:
    """Reads a table from a CSV file and verifies it. The table's name is the file's.

    If any W appears in the file, every B needs its own. Raises InputError with all problems, each with its line.
    """
    file = Path(path)
    rows = _read_rows(file)
    faults: list[Fault] = []
    items = list(_read_items(rows, faults)) if rows else []
    if not rows:
        faults.append(Fault(text="there is no tick. Write a row for each tick and a column for each stage, with items such as F0 or B2"))
    elif not faults and not items:
        faults.append(Fault(text="there is no item. Write F0 for microbatch 0 forward, B0 for backward"))
    # Each check relies on the ones before it, and would only repeat a mistake that they found.
    if not (faults := faults or _numbering_gaps(items) or _split_chunks(items) or _mostly_missing(items)):
        homes = {item.item.chunk: item.stage for item in items}
        stages = tuple(homes[chunk] for chunk in range(len(homes)))
        table = table_from_items(file.name, stages, len(rows[0][1]), len(rows), ((item.kind, item.tick, item.item) for item in items))
        if not (faults := find_faults(table)):
            return table
    # A fault that belongs to no tick has no line.
    places = [str(file) if fault.tick is None else f"{file}:{rows[fault.tick][0]}" for fault in faults]
    raise InputError(limit_texts([f"{place}: {fault.text}" for place, fault in zip(places, faults, strict=True)]))


def write_table(table: Table) -> str:
    """A table as the text of a CSV file. read_table makes the same table of it, except for the name."""
    # A spreadsheet would add columns for a comment with more commas than a row has.
    title = table.title.replace(",", ";")
    lines = [f"# {title}", "# " + ",".join(f"stage {stage}" for stage in range(table.num_stages))]
    rows = [table.rows(kind) for kind in KINDS]
    for tick in range(table.num_ticks):
        cells = [
            [table.item_text(kind, item) for kind, row in zip(KINDS, rows, strict=True) if (item := row[tick][stage]) is not None]
            for stage in range(table.num_stages)
        ]
        lines.append(",".join(" ".join(cell) or "-" for cell in cells))
    return "\n".join(lines) + "\n"


def _read_rows(file: Path) -> list[tuple[int, list[str]]]:
    """The line number and the cells of each tick."""
    # Not splitlines: it also splits at characters such as U+2028, and the line numbers would no longer be an editor's.
    lines = enumerate(map(str.strip, read_text(file, MAX_TABLE_BYTES).split("\n")), 1)
    return [(number, [cell.strip() for cell in line.split(",")]) for number, line in lines if line and not line.startswith("#")]


def _read_items(rows: list[tuple[int, list[str]]], faults: list[Fault]) -> Iterator[CsvItem]:
    """The items of all cells. Appends a fault for everything that is not an item."""
    first_line, num_stages = rows[0][0], len(rows[0][1])
    for tick, (line, cells) in enumerate(rows):
        if len(cells) != num_stages:
            fault = f"{len(cells)} cells, but line {first_line} has {num_stages}. Give every row a cell for each stage, - for an idle one"
            faults.append(Fault(tick=tick, text=fault))
            continue
        for stage, cell in enumerate(cells):
            for kind, item in _cell_items(stage, cell, tick, faults):
                yield CsvItem(line=line, tick=tick, stage=stage, kind=kind, item=item)


def _cell_items(stage: int, cell: str, tick: int, faults: list[Fault]) -> Iterator[tuple[Kind, Item]]:
    kinds: set[Kind] = set()
    for word in cell.split() if cell != "-" else ():
        # The file is not a table at all; further messages would not help.
        if len(faults) > MAX_FAULTS:
            return
        match = _ITEM.fullmatch(word)
        if not match:
            faults.append(Fault(tick=tick, text=f"stage {stage}: {shown(word)} is not an item. {_SPELLING}"))
            continue
        # Looked up, because the matched text is a str and not a Kind to a type checker.
        kind = KINDS["FBW".index(match["kind"])]
        if kind in kinds:
            advice = f"A stage runs one {kind} a tick: move one of them"
            faults.append(Fault(tick=tick, text=f"stage {stage}: two {kind} in {shown(cell)}. {advice}"))
        kinds.add(kind)
        yield kind, Item(int(match["microbatch"]), stage if match["chunk"] is None else int(match["chunk"]))


def _numbering_gaps(items: list[CsvItem]) -> list[Fault]:
    """Microbatches or chunks whose numbers are not 0, 1, 2, ... without a gap."""
    numbers_of: dict[str, Callable[[CsvItem], int]] = {"microbatch": lambda i: i.item.microbatch, "chunk": lambda i: i.item.chunk}
    faults: list[Fault] = []
    for noun, number_of in numbers_of.items():
        numbers = {number_of(item) for item in items}
        highest = max(items, key=number_of)
        if number_of(highest) >= len(numbers):
            missing = next(i for i in range(len(numbers)) if i not in numbers)
            gap = f"{noun} {number_of(highest)} is here, but {noun} {missing} is nowhere. Number them from 0 without a gap"
            faults.append(Fault(tick=highest.tick, text=f"stage {highest.stage}: {gap}"))
    return faults


def _split_chunks(items: list[CsvItem]) -> list[Fault]:
    homes: dict[int, CsvItem] = {}
    faults: dict[tuple[int, int], Fault] = {}
    for item in items:
        chunk = item.item.chunk
        home = homes.setdefault(chunk, item)
        if item.stage != home.stage:
            fault = f"stage {item.stage}: chunk {chunk} is in the column of stage {home.stage} too (line {home.line})"
            text = f"{fault}. A chunk's layers are on one stage: keep it in one column"
            # One fault for each chunk and wrong column, not one for each item.
            faults.setdefault((chunk, item.stage), Fault(tick=item.tick, text=text))
    return list(faults.values())


def _mostly_missing(items: list[CsvItem]) -> list[Fault]:
    """One fault for a table with few of its items, because verify.py would list the missing ones, which may be billions."""
    microbatches, chunks = len({item.item.microbatch for item in items}), len({item.item.chunk for item in items})
    if microbatches * chunks <= max(len(items), _MAX_MISSING):
        return []
    counts = f"{len(items):,} items for {microbatches:,} microbatches and {chunks:,} chunks"
    return [Fault(text=f"{counts}. Every microbatch runs through every chunk, forward and backward")]
