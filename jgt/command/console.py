"""The console and the tables of all commands, and numbers in the form in which people read them."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TextIO, cast

import rich.console
from rich.table import Table
from rich.text import Text

WIDTH_OF_FILES = 160
"""The width of output that does not go to a terminal, in columns. rich would assume 80 and fold tables."""
_BLANKS = re.compile(r" +$", re.MULTILINE)
_NUMBERED = re.compile(r"(?<![^/])[0-9]+(?![^/])|(?<=_)[0-9]+(?=/|$)")
"""The numbers of layers in paths: `blocks/0/up`, `layers_0/mlp`."""


class _Trimmed(io.TextIOBase):
    """A file that gets each line without the blanks at its end, with which rich fills tables. rich writes whole lines."""

    def __init__(self, file: TextIO):
        self._file = file

    def write(self, text: str) -> int:
        """Writes the text."""
        shown, encoding = _BLANKS.sub("", text), self._file.encoding or "utf-8"
        # A bar has characters that an old encoding lacks.
        self._file.write(shown.encode(encoding, "replace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        """Flushes the file."""
        self._file.flush()


class Console(rich.console.Console):
    """A console on stdout, or on another file. width: instead of the terminal's, or of WIDTH_OF_FILES. quiet: it prints nothing."""

    def __init__(self, *, quiet: bool = False, file: TextIO | None = None, width: int | None = None):
        out = file or sys.stdout
        if not out.isatty():
            file, width = cast("TextIO", _Trimmed(out)), width or WIDTH_OF_FILES
        # Otherwise rich would take brackets in names for markup, and colour numbers and paths as it sees fit.
        super().__init__(file=file, quiet=quiet, width=width, markup=False, emoji=False, highlight=False)

    @staticmethod
    def of_any_layer(path: str) -> str:
        """A path without the numbers of layers, the same for all layers of a loop: `blocks/*/up`."""
        return _NUMBERED.sub("*", path)

    @staticmethod
    def table(title: str, columns: Sequence[str], texts: int, rows: Iterable[Sequence[str]] = ()) -> Table:
        """A table with these rows. The first `texts` columns contain text; the others contain numbers, aligned to the right."""
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold", min_width=len(title))
        for index, column in enumerate(columns):
            # fold: a name too long for its column continues on the next line instead of losing its end.
            table.add_column(column, justify="left" if index < texts else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        return table

    @staticmethod
    def styled(lines: Iterable[Sequence[tuple[str, str]]]) -> Text:
        """Lines of pieces of text, each with its style. Whatever is wider than the screen is cut."""
        return Text("\n", no_wrap=True, overflow="crop", end="").join(Text.assemble(*line) for line in lines)

    @staticmethod
    def fitted(columns: Mapping[str, Sequence[str]], width: int, least_wanted: Sequence[str]) -> dict[str, Sequence[str]]:
        """The columns of a table by name, without as many of the least wanted ones, in their order, as do not fit a width."""
        left = dict(columns)
        for name in least_wanted:
            # Two blanks are between columns.
            if sum(max(map(len, (title, *texts))) + 2 for title, texts in left.items()) - 2 > width:
                del left[name]
        return left


def amount(value: float, unit: Literal["", "B", "s"] = "") -> str:
    """A number as people read it.

    B: bytes in the largest unit that leaves a number of at least 1, where a MB is 10**6 bytes: `3.2 MB`. s: seconds likewise, with two
    significant digits: `1.3 s`, `770 ms`, `95 us`. Without a unit: three significant digits, or all digits of the whole part, with commas
    between thousands: `0.0123`, `12,345`.
    """
    if unit == "B":
        power = next((power for power in range(4) if abs(value) < 1000 ** (power + 1)), 4)
        return f"{value / 1000**power:.{min(power, 1)}f} {('B', 'KB', 'MB', 'GB', 'TB')[power]}"
    if unit == "s":
        # As shown: 0.9996 s are 1.0 s.
        rounded = [(float(f"{value * factor:.1e}"), name) for name, factor in (("s", 1), ("ms", 1e3), ("us", 1e6))]
        number, name = next((pair for pair in rounded if abs(pair[0]) >= 1), rounded[-1])
        return f"{two_digits(number)} {name}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def two_digits(value: float) -> str:
    """A number with two significant digits and commas between thousands: `0.031`, `1.3`, `5,300`."""
    rounded = float(f"{value:.1e}")
    if abs(rounded) >= 10 or not rounded:
        return f"{rounded:,.0f}"
    return f"{rounded:.1f}" if abs(rounded) >= 1 else f"{rounded:.2g}"


def axes_text(axes: Sequence[str]) -> str:
    """Mesh axes as one word: `data+fsdp`."""
    return "+".join(axes) or "(none)"
