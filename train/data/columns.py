"""The texts of Parquet and Arrow files, for a tokenizer: one column, each of its rows a document. Chats have several columns (`read_rows`).

Both formats know their columns, so a wrong `data.field` is found from the schema, before anything is read. An Arrow file is in the
random-access form, which Feather files of version 2 have too, or a stream as the package `datasets` writes it.

The files are not trusted. Arrays are validated before Python sees them, and a dictionary that expands a small file into terabytes meets the
limit of packed files (`packed.py`). pyarrow is the extra `data`; it is imported when such a file is read.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jgt.document import shown

from ..files.json_text import json_value
from .documents import MAX_LINE_BYTES, Record
from .packed import TextError, is_too_much

_ROWS = 128
"""Rows that become Python objects together. A text has at most MAX_LINE_BYTES, and this many of them must fit the memory."""


def read_columns(path: Path, *, field: str, kind: Literal["Parquet", "Arrow"]) -> Iterator[str | TextError]:
    """The text of each row in the column `field` of a Parquet file, or of an Arrow IPC file or stream."""
    arrays = (_parquet_rows if kind == "Parquet" else _arrow_rows)(path, field)
    return _texts(path, kind, arrays, lambda where, value: _text(where, field, value))


def read_rows(path: Path, columns: Collection[str]) -> Iterator[Record | TextError]:
    """The place and the values of each row of a Parquet file, in those of the columns that it has.

    All rows of a column of mappings have the same keys there, so a null is a key that a row does not have.
    """
    texts = _texts(path, "Parquet", _parquet_tables(path, columns), _row_text)
    for number, text in enumerate(texts, 1):
        yield text if isinstance(text, TextError) else (f"{path}: row {number}", json_value(text, without_nulls))


def _texts(path: Path, kind: str, arrays: Iterator[Any], text_of: Callable[[str, Any], str | TextError]) -> Iterator[str | TextError]:
    """A text for each value of some arrays. text_of(where, value): makes it."""
    pyarrow = importlib.import_module("pyarrow")
    row, total, size = 0, 0, path.stat().st_size
    try:
        for array in arrays:
            # Full: offsets inside the data, and UTF-8. What fails here could crash the process below.
            array.validate(full=True)
            for value in array.to_pylist():
                row += 1
                text = text_of(f"{path}: row {row}", value)
                total += len(text) if isinstance(text, str) else 0
                if is_too_much(total, size):
                    raise TextError(f"row {row}: the texts are {total // size:,} times as large as the file, too much for text")
                yield text
        if row == 0:
            raise TextError("the file is empty: it contains no documents")
    except TextError as error:
        yield TextError(f"{path}: {error}", error.fields)
    # Damage is an error of Arrow's, of the system or, in the text of a message, of Python's.
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        yield TextError(f"{path}: the {kind} data is damaged or cut short, after row {row}: {error}. Create or download the file again")


def _row_text(where: str, row: dict[str, object]) -> str | TextError:
    """A row of a table as JSON."""
    values = list[str]()
    for key, value in row.items():
        try:
            values.append(f"{json.dumps(key)}: {json.dumps(value)}")
        except TypeError as error:
            return TextError(f"{where}: {shown(key, quotes=False)}: {error}. Write such values as text or numbers")
    return f"{{{', '.join(values)}}}"


def without_nulls(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A mapping in JSON as a row of a table has it."""
    return {key: value for key, value in pairs if value is not None}


def _parquet_tables(path: Path, columns: Collection[str]) -> Iterator[Any]:
    parquet = importlib.import_module("pyarrow.parquet")
    with parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if not (read := [name for name in names if name in columns]):
            raise TextError(f"has the columns {', '.join(map(shown, names[:12]))}, and none of {', '.join(columns)}")
        yield from file.iter_batches(batch_size=_ROWS, columns=read, use_threads=False)


def _parquet_rows(path: Path, field: str) -> Iterator[Any]:
    parquet = importlib.import_module("pyarrow.parquet")
    with parquet.ParquetFile(path) as file:
        _check_column(file.schema_arrow, field)
        # One thread: with several, a batch could be read while the file is closed.
        for batch in file.iter_batches(batch_size=_ROWS, columns=[field], use_threads=False):
            yield batch.column(0)


def _arrow_rows(path: Path, field: str) -> Iterator[Any]:
    pyarrow = importlib.import_module("pyarrow")
    ipc = importlib.import_module("pyarrow.ipc")
    with path.open("rb") as file:
        magic = file.read(6)
    if magic.startswith(b"FEA1"):
        raise TextError("a Feather file of version 1. Write it as version 2 (pyarrow.feather.write_feather)")
    if not magic:
        return
    with pyarrow.memory_map(str(path)) as source:
        if magic == b"ARROW1":
            reader = ipc.open_file(source)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = reader = ipc.open_stream(source)
        _check_column(reader.schema, field)
        for batch in batches:
            column = batch.column(batch.schema.get_field_index(field))
            yield from map(partial(column.slice, length=_ROWS), range(0, len(column), _ROWS))


def _check_column(schema: Any, field: str) -> None:
    """Raises TextError if the schema does not have exactly one column of this name, or if it is not text."""
    fields = tuple((column.name, _is_text(column.type)) for column in schema)
    if (count := schema.names.count(field)) > 1:
        raise TextError(f"has {count} columns {shown(field)}")
    if count == 0:
        raise TextError(f"has no column {shown(field)}", fields)
    if not _is_text(kind := schema.field(field).type):
        raise TextError(f"the column {shown(field)} is {shown(str(kind))[1:-1]}, not text", fields)


def _is_text(kind: Any) -> bool:
    types = importlib.import_module("pyarrow.types")
    if types.is_dictionary(kind):
        kind = kind.value_type
    # Writers without the type of text write its bytes.
    return any(getattr(types, f"is_{name}")(kind) for name in ("string", "large_string", "string_view", "binary", "large_binary"))


def _text(where: str, field: str, value: str | bytes | None) -> str | TextError:
    if value is None:
        return TextError(f"{where}: the column {shown(field)} is null. Remove the row")
    if len(value) > MAX_LINE_BYTES:
        return TextError(f"{where}: the text is longer than {MAX_LINE_BYTES:,} bytes, the most a document may have. Split it")
    try:
        return value if isinstance(value, str) else value.decode("utf-8")
    except UnicodeDecodeError as error:
        return TextError(f"{where}: not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start} of the text")
