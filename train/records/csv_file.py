"""metrics.csv: the rows of metrics.jsonl as one table, for spreadsheets and data frames.

The columns of a table come first, but which metrics a run has is only known when they arrive: an evaluation, say, or a metric of a loss of
the user's own. So a row with a new metric has the whole table written anew, from metrics.jsonl, which happens a few times in a run. All
other rows are appended.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..report.rows import read_metrics
from ..sink import AppendedFile, Sink


class CsvFile:
    """The table at `path` of the rows of metrics.jsonl, which is written before it."""

    def __init__(self, path: Path, rows: Path):
        self._path, self._rows = path, rows
        self._columns: list[str] = []
        self.sink = Sink(path.name, AppendedFile(path))

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds the metrics of a step."""
        row = {"step": step, **values}
        if row.keys() <= set(self._columns):
            self.sink.put(_lines(self._columns, [row]))
        else:
            self.sink.attempt(lambda: self._write_all(row))

    def forget_after(self, step: int) -> None:
        """The first row of a start has the table written anew."""
        self._columns = []

    def close(self) -> None:
        """Every row is in the file already."""

    def _write_all(self, last: Mapping[str, Any]) -> None:
        rows = [row for _, row in read_metrics(self._rows)] if self._rows.exists() else []
        # The last row is missing there if it could not be written.
        rows += [] if rows and rows[-1] == last else [dict(last)]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        new = self._path.with_name(f"{self._path.name}.new")
        new.write_bytes(_lines(columns, [dict(zip(columns, columns, strict=True)), *rows]))
        new.replace(self._path)
        self._columns = columns


def _lines(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(["" if row.get(name) is None else row[name] for name in columns] for row in rows)
    return text.getvalue().encode()
