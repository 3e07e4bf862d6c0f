"""The loggers of a run: the places that get its metrics. metrics.jsonl and metrics.csv are here.

A logger has a sink (`sink.py`), so that whatever happens to it costs rows and never the run: rows are counted as lost, and each row is a
new attempt. A restart trains the steps after its checkpoint again, so loggers drop the rows of these steps.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..files.disk import replaced
from ..journal.rows import forget_rows_after, read_metrics
from ..journal.sink import AppendedFile, Sink
from .media import Medium


class Logger:
    """A place that gets the metrics of process 0. sink: counts the rows that it lost. takes: the types of media that it shows."""

    takes: tuple[type, ...] = ()

    def __init__(self, sink: Sink):
        self.sink = sink

    def add(self, step: int, values: Mapping[str, object]) -> None:
        """Adds the metrics of a step: numbers, or None for what is not known."""
        raise NotImplementedError

    def add_medium(self, step: int, name: str, value: Medium) -> None:
        """Adds an image, a histogram or a text, if its type is one of `takes`."""

    def alert(self, kind: str, message: str) -> None:
        """Tells a person something that no metric shows."""

    def forget_after(self, step: int) -> None:
        """Drops the rows of later steps than the one that this start resumes from: it trains them again."""

    def close(self) -> None:
        """No more metrics will come."""


class JsonLines(Logger):
    """A file with a line of JSON for each row."""

    def __init__(self, path: Path):
        super().__init__(Sink(path.name, AppendedFile(path).write))
        self._path = path

    def add(self, step: int, values: Mapping[str, object]) -> None:
        """Appends a row."""
        self.sink.put(json.dumps({"step": step, **values}).encode() + b"\n")

    def forget_after(self, step: int) -> None:
        """Drops the rows of later steps."""
        self.sink.attempt(lambda: forget_rows_after(self._path, step))


class CsvFile(Logger):
    """The table of the rows of metrics.jsonl, which is written before it, for spreadsheets and data frames.

    The columns of a table come first, but which metrics a run has is only known when they arrive. So for a row with a new metric, which
    comes a few times in a run, the whole table is written anew from metrics.jsonl. All other rows are appended.
    """

    def __init__(self, path: Path, rows: Path):
        super().__init__(Sink(path.name, AppendedFile(path).write))
        self._path, self._rows = path, rows
        self._columns: list[str] = []

    def add(self, step: int, values: Mapping[str, object]) -> None:
        """Adds the metrics of a step."""
        row = {"step": step, **values}
        if row.keys() <= set(self._columns):
            self.sink.put(_csv_lines(self._columns, [row]))
        else:
            self.sink.attempt(lambda: self._write_all(row))

    def forget_after(self, step: int) -> None:
        """The first row of this start has the table written anew."""
        self._columns = []

    def _write_all(self, last: Mapping[str, object]) -> None:
        rows = list(read_metrics(self._rows)) if self._rows.exists() else []
        # The last row is missing there if it could not be written.
        rows += [] if rows and rows[-1] == last else [dict(last)]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        with replaced(self._path, is_of_run=True) as new:
            new.write_bytes(_csv_lines(columns, [dict(zip(columns, columns, strict=True)), *rows]))
        self._columns = columns


def _csv_lines(columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> bytes:
    text = io.StringIO()
    # None becomes an empty cell, and so does a metric that the row lacks.
    csv.writer(text, lineterminator="\n").writerows([row.get(name) for name in columns] for row in rows)
    return text.getvalue().encode()
