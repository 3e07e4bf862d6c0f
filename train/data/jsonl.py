"""One JSON object a line, plain or gzipped: a document each."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from jgt.document import describe
from train.data.files import FileSet


def documents(files: FileSet, field: str, problems: list[str]) -> Iterator[str]:
    """The text of every line that is not blank; appends to `problems` what cannot be read."""
    for path in files.paths:
        yield from _documents(path, field, problems)


def _documents(path: Path, field: str, problems: list[str]) -> Iterator[str]:
    num_lines, before = 0, len(problems)
    for number, line in _lines(path, problems):
        try:
            num_lines += 1
            yield _text(line, field)
        except _BadLine as error:
            problems.append(f"{path}:{number}: {error}")
    if num_lines == 0 and len(problems) == before:
        problems.append(f"{path}: the file is empty: it holds no document")


class _BadLine(Exception):
    """What is wrong with a line."""


def _lines(path: Path, problems: list[str]) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        problems.append(f"{path}:{number + 1}: the gzip data is damaged or cut short: {error}. Make or fetch the file again")


def _text(line: bytes, field: str) -> str:
    document = _parse(line)
    if not isinstance(document, dict):
        raise _BadLine(f"must be a JSON object, not {_shown(document)}")
    if field not in document:
        raise _BadLine(f"has no field {field!r}. It has: {', '.join(map(repr, list(document)[:12])) or 'none'}")
    text = document[field]
    if not isinstance(text, str):
        raise _BadLine(f"the field {field!r} must be text, not {_shown(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _BadLine(f"the field {field!r} holds half of a surrogate pair, which is no character") from None
    return text


def _parse(line: bytes) -> object:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadLine(f"not UTF-8: byte {line[error.start]:#04x} at offset {error.start} of the line") from None
    except RecursionError:
        raise _BadLine("the JSON is nested too deep") from None
    except ValueError as error:
        raise _BadLine(f"not valid JSON: {error}") from None


def _shown(value: object) -> str:
    text = describe(value)
    return text if len(text) <= 60 else text[:57] + "..."
