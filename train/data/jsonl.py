"""One JSON object a line, plain or gzipped: a document each."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from jgt.document import describe, shown
from train.data.files import FileSet, Unreadable

MAX_LINE_BYTES = 1 << 24
_BLOCK_BYTES = 1 << 20
MAX_EXPANDED = 1 << 26
MAX_RATIO = 200
"""Text and its compressed form; repetition without end reaches a thousand."""


class _BadLineError(Exception):
    """What is wrong with a line."""


def documents(files: FileSet, *, field: str) -> Iterator[str | Unreadable]:
    """The text of every line that is not blank."""
    for path in files.paths:
        yield from _documents(path, field)


def _documents(path: Path, field: str) -> Iterator[str | Unreadable]:
    place = _Place()
    empty = True
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for line in _lines(file, place, path.stat().st_size):
                empty = False
                yield _document(path, place.line, line, field)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        yield Unreadable(f"{path}:{place.line}: the gzip data is damaged or cut short: {error}. Make or fetch the file again")
        return
    except _BadLineError as error:
        yield Unreadable(f"{path}:{place.line}: {error}")
        return
    if empty:
        yield Unreadable(f"{path}: the file is empty: it holds no document")


@dataclass
class _Place:
    """The line that is read, counted from 1."""

    line: int = 1


def _lines(file: BufferedReader | gzip.GzipFile, place: _Place, size: int) -> Iterator[bytes]:
    """The lines that are not blank, a part of the file at a time. Raises _BadLineError for what would not end.

    size: bytes of the file, which may be compressed.
    """
    rest, total = b"", 0
    while block := file.read1(_BLOCK_BYTES):
        total += len(block)
        if total > max(MAX_EXPANDED, size * MAX_RATIO):
            raise _BadLineError(f"the data is more than {MAX_RATIO} times as large as the file: no text. Unpack the file if it is meant")
        if not rest and block.isspace():
            place.line += block.count(b"\n")
            continue
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if line and not line.isspace():
                yield line
            place.line += 1
        if len(rest) > MAX_LINE_BYTES:
            raise _BadLineError(f"the line is longer than {MAX_LINE_BYTES:,} bytes, the most a document may have. Split it")
    if rest and not rest.isspace():
        yield rest


def _document(path: Path, number: int, line: bytes, field: str) -> str | Unreadable:
    try:
        return _text(line, field)
    except _BadLineError as error:
        return Unreadable(f"{path}:{number}: {error}")


def _text(line: bytes, field: str) -> str:
    document = _parse(line)
    if not isinstance(document, dict):
        raise _BadLineError(f"must be a JSON object, not {describe(document)}")
    if field not in document:
        raise _BadLineError(f"has no field {shown(field)}. It has: {', '.join(map(shown, list(document)[:12])) or 'none'}")
    text = document[field]
    if not isinstance(text, str):
        raise _BadLineError(f"the field {field!r} must be text, not {describe(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _BadLineError(f"the field {field!r} holds half of a surrogate pair, which is no character") from None
    return text


def _parse(line: bytes) -> object:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadLineError(f"not UTF-8: byte {line[error.start]:#04x} at offset {error.start} of the line") from None
    except RecursionError:
        raise _BadLineError("the JSON is nested too deep") from None
    except ValueError as error:
        raise _BadLineError(f"not valid JSON: {error}") from None
