"""One JSON object a line, plain or gzipped: a document each."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from jgt.document import describe
from train.data.files import FileSet, Unreadable


class _BadLineError(Exception):
    """What is wrong with a line."""


def documents(files: FileSet, *, field: str) -> Iterator[str | Unreadable]:
    """The text of every line that is not blank."""
    for path in files.paths:
        yield from _documents(path, field)


def _documents(path: Path, field: str) -> Iterator[str | Unreadable]:
    number, empty = 0, True
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    empty = False
                    yield _document(path, number, line, field)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        yield Unreadable(f"{path}:{number + 1}: the gzip data is damaged or cut short: {error}. Make or fetch the file again")
        return
    if empty:
        yield Unreadable(f"{path}: the file is empty: it holds no document")


def _document(path: Path, number: int, line: bytes, field: str) -> str | Unreadable:
    try:
        return _text(line, field)
    except _BadLineError as error:
        return Unreadable(f"{path}:{number}: {error}")


def _text(line: bytes, field: str) -> str:
    document = _parse(line)
    if not isinstance(document, dict):
        raise _BadLineError(f"must be a JSON object, not {_shown(document)}")
    if field not in document:
        raise _BadLineError(f"has no field {field!r}. It has: {', '.join(map(repr, list(document)[:12])) or 'none'}")
    text = document[field]
    if not isinstance(text, str):
        raise _BadLineError(f"the field {field!r} must be text, not {_shown(text)}")
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


def _shown(value: object) -> str:
    text = describe(value)
    return text if len(text) <= 60 else text[:57] + "..."
