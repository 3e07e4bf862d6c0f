"""The items of a CSV file, with their lines, and what is wrong with how they are written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jgt.document import read_text, shown
from jgt.pipeline.schedule import KINDS, Item, Kind
from jgt.pipeline.verify import Fault

MAX_BYTES = 1_000_000
_MOST = 10_000
"""Problems that are noted; a few of them are shown."""
_ITEM = re.compile(r"(?P<kind>[FBW])(?P<microbatch>[0-9]{1,9})(?:\.(?P<chunk>[0-9]{1,9}))?")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An item as it stands in a file."""

    line: int
    tick: int
    stage: int
    kind: Kind
    item: Item


def read_rows(file: Path) -> list[tuple[int, list[str]]]:
    """Line and cells of each tick."""
    lines = enumerate(map(str.strip, read_text(file, MAX_BYTES).split("\n")), 1)
    return [(number, [cell.strip() for cell in line.split(",")]) for number, line in lines if line and not line.startswith("#")]


def read_entries(rows: list[tuple[int, list[str]]], faults: list[Fault]) -> Iterator[Entry]:
    """The items of all cells; what cannot be read goes to the faults."""
    first, S = rows[0][0], len(rows[0][1])
    for tick, (line, cells) in enumerate(rows):
        if len(cells) != S:
            wrong = f"{len(cells)} cells, but line {first} has {S}. Give every row a cell for each stage, - for an idle one"
            faults.append(Fault(tick=tick, text=wrong))
            continue
        for stage, cell in enumerate(cells):
            seen: set[Kind] = set()
            for word in cell.split() if cell != "-" else ():
                if len(faults) > _MOST:
                    return
                match = _ITEM.fullmatch(word)
                if not match:
                    allowed = "Write F, B or W, a microbatch, and .chunk where a stage has several, such as F3 or B3.5; - for nothing"
                    faults.append(Fault(tick=tick, text=f"stage {stage}: {shown(word)} is no item. {allowed}"))
                    continue
                kind = KINDS["FBW".index(match["kind"])]
                if kind in seen:
                    faults.append(
                        Fault(tick=tick, text=f"stage {stage}: two {kind} in {shown(cell)}. A stage has one {kind} a tick: move one of them")
                    )
                seen.add(kind)
                item = Item(int(match["microbatch"]), stage if match["chunk"] is None else int(match["chunk"]))
                yield Entry(line=line, tick=tick, stage=stage, kind=kind, item=item)


def gaps(entries: list[Entry]) -> list[Fault]:
    """Numbers that are left out, of microbatches and of chunks."""
    faults = []
    for noun, number in (("microbatch", lambda e: e.item.microbatch), ("chunk", lambda e: e.item.chunk)):
        numbers = {number(entry) for entry in entries}
        highest = max(entries, key=number)
        if number(highest) >= len(numbers):
            missing = next(i for i in range(len(numbers)) if i not in numbers)
            gap = f"{noun} {number(highest)} stands here and {noun} {missing} nowhere. Number them from 0 without a gap"
            faults.append(Fault(tick=highest.tick, text=f"stage {highest.stage}: {gap}"))
    return faults


def columns(entries: list[Entry]) -> list[Fault]:
    """Chunks that stand in more than one column."""
    homes: dict[int, Entry] = {}
    faults: dict[tuple[int, int], Fault] = {}
    for entry in entries:
        home = homes.setdefault(entry.item.chunk, entry)
        if entry.stage != home.stage:
            here = f"stage {entry.stage}: chunk {entry.item.chunk} stands in the column of stage {home.stage} too (line {home.line})"
            wrong = f"{here}. A chunk's layers are on one stage: keep it in one column"
            faults.setdefault((entry.item.chunk, entry.stage), Fault(tick=entry.tick, text=wrong))
    return list(faults.values())
