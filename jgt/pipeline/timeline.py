"""A table as a picture in the terminal: a row for each stage, a column for each tick."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from jgt.pipeline.custom import item_text
from jgt.pipeline.palette import Colour, ink, shade
from jgt.pipeline.report import kind_name
from jgt.pipeline.schedule import KINDS, Item, Kind, Row, Table

WIDTH_OF_FILES = 160
"""Columns where there is no terminal."""

MAX_BLOCKS = 8
"""Blocks of ticks on a terminal; of a longer table, the first and the last. A file gets all."""


def show(table: Table, console: Console | None = None) -> None:
    """Prints a table in as many blocks of ticks as the width needs.

    With colours a cell is kind and microbatch, its shade the chunk; without, it is the item as in a CSV file.
    """
    screen = console or make_console()
    picture = _draw(table, coloured=screen.color_system in ("256", "truecolor") and not screen.no_color)
    blocks = list(picture.blocks(screen.width))
    left_out = len(blocks) - MAX_BLOCKS if screen.is_terminal else 0
    first = MAX_BLOCKS // 2
    for index, ticks in enumerate(blocks):
        if left_out > 0 and first <= index < first + left_out:
            if index == first:
                gap = f"ticks {ticks.start} to {blocks[first + left_out].start - 1} are not shown; --csv FILE writes them all"
                screen.print(Text(gap, style="dim"), soft_wrap=True)
                screen.print()
            continue
        for line in picture.lines(ticks, idle="." if screen.options.ascii_only else "·"):
            screen.print(line, soft_wrap=True)
        screen.print()
    screen.print(picture.legend(), soft_wrap=True)


def show_rows(columns: Sequence[str], rows: Sequence[Sequence[str]], best: set[int], console: Console | None = None) -> None:
    """Prints rows of a name and numbers; those at `best` are highlighted and have a star."""
    screen = console or make_console()
    grid = Grid(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        grid.add_column(column, justify="right" if index else "left", overflow="fold")
    for index, row in enumerate(rows):
        name, *numbers = row
        grid.add_row(Text(f"{name} *" if index in best else name), *map(Text, numbers), style="bold green" if index in best else "")
    screen.print(grid)


def make_console() -> Console:
    """A console on stdout."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH_OF_FILES)


@dataclass(frozen=True, kw_only=True)
class _Picture:
    """A table with the colours of its items and the widths of its cells, in columns of the terminal.

    rows: by kind. used: the kinds of item that any stage has, tick by tick. cell: by kind. label: what stands left of the
    ticks.
    """

    table: Table
    coloured: bool
    shades: dict[tuple[Kind, int], Colour]
    rows: dict[Kind, tuple[Row, ...]]
    used: list[list[Kind]]
    cell: dict[Kind, int]
    label: int

    def text(self, kind: Kind, item: Item) -> str:
        """What stands in a cell."""
        return _text(self.table, kind, item, self.coloured)

    def column(self, tick: int) -> int:
        """The width of a tick."""
        return max(len(str(tick)), sum(self.cell[kind] + 1 for kind in self.used[tick]) - 1)

    def blocks(self, width: int) -> Iterator[range]:
        """Ticks that fit side by side."""
        start, end = 0, self.label
        for tick in range(self.table.num_ticks):
            if tick > start and end + self.column(tick) > width:
                yield range(start, tick)
                start, end = tick, self.label
            end += self.column(tick) + 2
        yield range(start, self.table.num_ticks)

    def lines(self, ticks: range, idle: str) -> Iterator[Text]:
        """The numbers of ticks, then a line for each stage."""
        header = Text("tick".ljust(self.label), style="dim")
        for tick in ticks:
            header.append(str(tick).ljust(self.column(tick) + 2))
        header.rstrip()
        yield header
        for stage in range(self.table.num_stages):
            line = Text(f"stage {stage}".ljust(self.label))
            for tick in ticks:
                self.cells(line, tick, stage, idle)
            line.rstrip()
            yield line

    def cells(self, line: Text, tick: int, stage: int, idle: str) -> None:
        """Appends what a stage does in a tick."""
        end = len(line) + self.column(tick) + 2
        for kind in self.used[tick]:
            item = self.rows[kind][tick][stage]
            if item is None:
                line.append((idle * 2).ljust(self.cell[kind]), style="dim")
            else:
                line.append(self.text(kind, item).ljust(self.cell[kind]), style=self.style(kind, item.chunk))
            line.append(" ")
        line.append(" " * (end - len(line)))

    def style(self, kind: Kind, chunk: int) -> str:
        """Colours of a cell."""
        colour = self.shades[kind, chunk]
        return f"rgb({','.join(map(str, ink(colour)))}) on rgb({','.join(map(str, colour))})" if self.coloured else ""

    def legend(self) -> Text:
        """What cells and colours mean."""
        legend = Text()
        for kind in KINDS:
            item = next((item for _, _, item in self.table.items(kind)), None)
            if item is not None:
                legend.append(self.text(kind, item), style=self.style(kind, 0)).append(f" {kind_name(self.table, kind)}   ")
        chunks = "shade: chunk of the stage, the first dark" if self.coloured else "F3.5: microbatch 3 through chunk 5"
        legend.append(f"{chunks}   " if self.table.virtual > 1 else "")
        return legend.append("a tick runs F, then B, then W on all stages; numbers are microbatches, from 0")


def _draw(table: Table, *, coloured: bool) -> _Picture:
    rows: dict[Kind, tuple[Row, ...]] = {kind: table.rows(kind) for kind in KINDS}
    return _Picture(
        table=table,
        coloured=coloured,
        shades={(kind, chunk): shade(kind, table.local_chunk(chunk), table.virtual) for kind in KINDS for chunk in range(table.num_chunks)},
        rows=rows,
        used=[[kind for kind in KINDS if any(rows[kind][tick])] for tick in range(table.num_ticks)],
        cell={kind: max((len(_text(table, kind, item, coloured)) for _, _, item in table.items(kind)), default=0) for kind in KINDS},
        label=len(f"stage {table.num_stages - 1}  "),
    )


def _text(table: Table, kind: Kind, item: Item, coloured: bool) -> str:
    return f"{kind}{item.microbatch}" if coloured else item_text(table, kind, item)
