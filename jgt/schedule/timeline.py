"""A table as a picture in the terminal: a row for each stage, a column for each tick.

With colours, a cell is a kind and a microbatch on a background whose hue is the kind and whose shade is the chunk. Without colours a cell
spells the item as a CSV file does, so that the output loses no information. Every tick is as wide as its widest cell: the columns of all
stages line up, which is what makes the bubble visible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from jgt.command.console import Console
from jgt.schedule.simulate import kind_name
from jgt.schedule.table import KINDS, Item, Kind, Table

MAX_BLOCKS = 8
"""A terminal shows this many blocks of ticks: the first and the last ones of a longer table. A file gets all."""

Colour = tuple[int, int, int]
"""Red, green and blue, each from 0 to 255."""

# Three colours that people who do not see red and green can tell apart (Okabe and Ito, 2008).
_BASE: dict[Kind, Colour] = {"F": (0, 114, 178), "B": (213, 94, 0), "W": (0, 158, 115)}


def shade(kind: Kind, local_chunk: int, virtual: int) -> Colour:
    """The colour of an item: the first chunk of a stage is dark, the last is light."""
    white = 0.6 * local_chunk / max(1, virtual - 1)
    red, green, blue = (round(part + (255 - part) * white) for part in _BASE[kind])
    return red, green, blue


def ink(colour: Colour) -> Colour:
    """Black or white, whichever is easier to read on a colour."""
    red, green, blue = colour
    # The luma of ITU-R BT.601: eyes are most sensitive to green.
    return (0, 0, 0) if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else (255, 255, 255)


def print_timeline(table: Table, console: Console | None = None) -> None:
    """Prints a table, in as many blocks of ticks as the width of the console requires."""
    screen = console or Console()
    # 16 colours are too few for shades.
    picture = _Picture(table, coloured=screen.color_system in ("256", "truecolor") and not screen.no_color)
    blocks = list(picture.blocks(screen.width))
    num_hidden = max(0, len(blocks) - MAX_BLOCKS) if screen.is_terminal else 0
    hidden = range(MAX_BLOCKS // 2, MAX_BLOCKS // 2 + num_hidden)
    for index, ticks in enumerate(blocks):
        if index in hidden:
            if index == hidden.start:
                gap = f"ticks {ticks.start} to {blocks[hidden.stop].start - 1} are not shown; --csv FILE writes them all"
                screen.print(Text(gap, style="dim"), soft_wrap=True)
                screen.print()
            continue
        for line in picture.lines(ticks, idle="." if screen.options.ascii_only else "·"):
            # soft_wrap: otherwise rich folds a line at words, and the columns are lost.
            screen.print(line, soft_wrap=True)
        screen.print()
    screen.print(picture.legend(), soft_wrap=True)


def print_comparison(columns: Sequence[str], rows: Sequence[Sequence[str]], best: set[int], console: Console | None = None) -> None:
    """Prints rows of a name and numbers. The rows whose indices are in `best` are highlighted and get a star."""
    screen = console or Console()
    grid = Console.table("", columns, texts=1)
    for index, row in enumerate(rows):
        name, *numbers = row
        grid.add_row(Text(f"{name} *" if index in best else name), *map(Text, numbers), style="bold green" if index in best else "")
    screen.print(grid)


class _Picture:
    """A table with the colours of its items and the widths of its cells, in columns of the terminal.

    shades: the colour of each kind and chunk. rows: by kind. used: for each tick the kinds that any stage has in it. cell: the
    width of a cell of each kind. label: the width of what is left of the ticks.
    """

    def __init__(self, table: Table, *, coloured: bool):
        self.table = table
        self.coloured = coloured
        self.shades = {(kind, g): shade(kind, table.local_chunk(g), table.virtual) for kind in KINDS for g in range(table.num_chunks)}
        self.rows = {kind: table.rows(kind) for kind in KINDS}
        self.used: list[list[Kind]] = [[kind for kind in KINDS if any(self.rows[kind][tick])] for tick in range(table.num_ticks)]
        self.cell = {kind: max((len(self.text(kind, item)) for _, _, item in table.items(kind)), default=0) for kind in KINDS}
        self.label = len(f"stage {table.num_stages - 1}  ")

    def text(self, kind: Kind, item: Item) -> str:
        """The text of an item's cell: its colours show the chunk, if there are any."""
        return f"{kind}{item.microbatch}" if self.coloured else self.table.item_text(kind, item)

    def column(self, tick: int) -> int:
        """The width of a tick."""
        return max(len(str(tick)), sum(self.cell[kind] + 1 for kind in self.used[tick]) - 1)

    def blocks(self, width: int) -> Iterator[range]:
        """The ticks, in ranges that fit side by side into a width."""
        start, end = 0, self.label
        for tick in range(self.table.num_ticks):
            if tick > start and end + self.column(tick) > width:
                yield range(start, tick)
                start, end = tick, self.label
            end += self.column(tick) + 2
        yield range(start, self.table.num_ticks)

    def lines(self, ticks: range, idle: str) -> Iterator[Text]:
        """A line with the numbers of the ticks, then a line for each stage."""
        header = Text("tick".ljust(self.label), style="dim")
        for tick in ticks:
            header.append(str(tick).ljust(self.column(tick) + 2))
        # A narrow terminal would wrap trailing blanks onto a line of their own.
        header.rstrip()
        yield header
        for stage in range(self.table.num_stages):
            line = Text(f"stage {stage}".ljust(self.label))
            for tick in ticks:
                self.append_cells(line, tick, stage, idle)
            line.rstrip()
            yield line

    def append_cells(self, line: Text, tick: int, stage: int, idle: str) -> None:
        """Appends a stage's items of a tick to its line."""
        end = len(line) + self.column(tick) + 2
        for kind in self.used[tick]:
            item = self.rows[kind][tick][stage]
            if item is None:
                # As wide as the shortest item.
                line.append((idle * 2).ljust(self.cell[kind]), style="dim")
            else:
                line.append(self.text(kind, item).ljust(self.cell[kind]), style=self.style(kind, item.chunk))
            line.append(" ")
        line.append(" " * (end - len(line)))

    def style(self, kind: Kind, chunk: int) -> str:
        """The colours of a cell, as rich spells them."""
        colour = self.shades[kind, chunk]
        return f"rgb({','.join(map(str, ink(colour)))}) on rgb({','.join(map(str, colour))})" if self.coloured else ""

    def legend(self) -> Text:
        """The meaning of cells and colours."""
        legend = Text()
        for kind in KINDS:
            # The legend explains each kind by an item of this table.
            item = next((item for _, _, item in self.table.items(kind)), None)
            if item is not None:
                legend.append(self.text(kind, item), style=self.style(kind, 0)).append(f" {kind_name(self.table, kind)}   ")
        chunks = "shade: chunk of the stage, the first is the darkest" if self.coloured else "F3.5: microbatch 3 through chunk 5"
        legend.append(f"{chunks}   " if self.table.virtual > 1 else "")
        return legend.append("every tick runs F, then B, then W on all stages; numbers are microbatches, counted from 0")
