"""The texts of plain text and JSON lines files, for a tokenizer.

A data set of text is read once, from one end to the other, and can be larger than memory. The readers therefore yield pieces:
a plain file in blocks of about a megabyte that end at a line end, so that no word is cut; a JSON lines file line by line,
each line one document. A line that cannot be used does not end the reading: the reader yields an `Unreadable` in its place,
so that a user sees all bad lines of a file at once. Only what makes the rest of a file meaningless ends that file.

What is read is not trusted. A line without an end, nested brackets, or a small gzip file that unpacks to terabytes would
exhaust the memory or run for ever; each has a limit, and a message that names it.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from jgt.document import describe, shown

from .files import FileSet

_BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 24
MAX_EXPANDED = 1 << 26
"""Bytes that any file may unpack to; beyond them MAX_RATIO applies."""
MAX_RATIO = 200
"""How many times its size a file may unpack to. Text stays far below it; endless repetition reaches about a thousand."""


@dataclass(frozen=True)
class Unreadable:
    """Takes the place of a text that could not be read. The message is `file:line: what is wrong. What to change`."""

    message: str


def read_blocks(files: FileSet) -> Iterator[str | Unreadable]:
    """The text of plain UTF-8 files in blocks of about a megabyte, each ending at a line end."""
    for path in files.paths:
        with path.open("rb") as file:
            yield from _blocks_of(file, path)


def read_files(files: FileSet) -> Iterator[str | Unreadable]:
    """The whole text of each plain UTF-8 file, which is one document."""
    for path in files.paths:
        if path.stat().st_size > MAX_LINE_BYTES:
            yield Unreadable(f"{path}: the file is longer than {MAX_LINE_BYTES:,} bytes, the most a document may have. Split it")
        else:
            yield _decoded(path.read_bytes(), 1, path)


def _blocks_of(file: BinaryIO, path: Path) -> Iterator[str | Unreadable]:
    line, rest = 1, b""
    while block := file.read(_BLOCK_BYTES):
        # Cut at the last line end: what follows it waits for the next block, with the line number of its beginning in `line`.
        whole, newline, rest = (rest + block).rpartition(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            at = line + whole.count(b"\n") + len(newline)
            yield Unreadable(f"{path}:{at}: the line is longer than {MAX_LINE_BYTES:,} bytes, the most that is encoded at once. Break it")
            return
        if not newline:
            continue
        text = _decoded(whole + newline, line, path)
        yield text
        if isinstance(text, Unreadable):
            return
        line += whole.count(b"\n") + 1
    if rest:
        yield _decoded(rest, line, path)


def _decoded(block: bytes, line: int, path: Path) -> str | Unreadable:
    try:
        return block.decode("utf-8")
    except UnicodeDecodeError as error:
        # A block has thousands of lines; the user needs the one with the bad byte.
        at = line + block[: error.start].count(b"\n")
        return Unreadable(f"{path}:{at}: not UTF-8: byte {block[error.start]:#04x}. Save the file as UTF-8, or set the tokenizer to bytes")


class _BadLineError(Exception):
    """A line cannot be used; the message says why."""


def read_documents(files: FileSet, *, field: str) -> Iterator[str | Unreadable]:
    """The text in `field` of every JSON line that is not blank. Files that end in .gz are unpacked."""
    for path in files.paths:
        yield from _documents_of(path, field)


def _documents_of(path: Path, field: str) -> Iterator[str | Unreadable]:
    counter = _LineCounter()
    empty = True
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for line in _lines(file, counter, path.stat().st_size):
                empty = False
                yield _document(path, counter.line, line, field)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        yield Unreadable(f"{path}:{counter.line}: the gzip data is damaged or cut short: {error}. Create or download the file again")
        return
    except _BadLineError as error:
        yield Unreadable(f"{path}:{counter.line}: {error}")
        return
    # An empty file among many is most likely a failed download.
    if empty:
        yield Unreadable(f"{path}: the file is empty: it contains no documents")


@dataclass
class _LineCounter:
    """The number of the line that is being read, from 1. It outlives the generator of lines, whose error it locates."""

    line: int = 1


def _lines(file: BufferedReader | gzip.GzipFile, counter: _LineCounter, size: int) -> Iterator[bytes]:
    """The lines of a file that are not blank. Raises _BadLineError for a line, or unpacked data, beyond the limits.

    size: bytes of the file as stored, before it is unpacked.
    """
    rest, total = b"", 0
    # read1 returns what one read of a gzip stream unpacks, at most _BLOCK_BYTES, and never the whole file.
    while block := file.read1(_BLOCK_BYTES):
        total += len(block)
        if total > max(MAX_EXPANDED, size * MAX_RATIO):
            raise _BadLineError(
                f"the data is more than {MAX_RATIO} times as large as the file, too much for text. Unpack the file if it is the right one"
            )
        # Blank lines can fill gigabytes of a packed file: they are counted, not split.
        if not rest and block.isspace():
            counter.line += block.count(b"\n")
            continue
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if line and not line.isspace():
                yield line
            counter.line += 1
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
        # JSON can spell half of a surrogate pair, "\ud800", which no tokenizer takes.
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _BadLineError(f"the field {field!r} contains half of a surrogate pair, which is not a character") from None
    return text


def _parse(line: bytes) -> object:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadLineError(f"not UTF-8: byte {line[error.start]:#04x} at offset {error.start} of the line") from None
    except RecursionError:
        # Python's JSON parser recurses once per level of nesting.
        raise _BadLineError("the JSON is nested too deeply") from None
    except ValueError as error:
        raise _BadLineError(f"not valid JSON: {error}") from None
