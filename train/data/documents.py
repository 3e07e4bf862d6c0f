"""The texts of plain text and JSON lines files, for a tokenizer.

A data set of text is read once, from one end to the other, and can be larger than memory. The readers therefore yield pieces:
a plain file in blocks of about a megabyte that end at a line end, so that no word is cut; a JSON lines file line by line,
each line one document. A line that cannot be used does not end the reading: the reader yields an `Unreadable` in its place,
so that a user sees all bad lines of a file at once. Only what makes the rest of a file meaningless ends that file.

One mistake would fill the screen with equal lines: a wrong name of the field with the text. So a document without the field says which
fields it has, and the caller makes one problem of all such documents (`missing_field`).

What is read is not trusted. A line without an end and nested brackets would exhaust the memory or run for ever; each has a limit, and a
message that names it. `packed.py` bounds what a small file may unpack to.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jgt.document import describe, most_similar, shown

from .files import FileSet
from .packed import PackedError, read_blocks

MAX_LINE_BYTES = 1 << 24
_MOST_FIELDS = 12


@dataclass(frozen=True)
class Unreadable:
    """Takes the place of a text that could not be read. The message is `file:line: what is wrong. What to change`.

    fields: of a document without the field that was asked for, the fields that it has and whether each of them is text.
    """

    message: str
    fields: tuple[tuple[str, bool], ...] | None = None


def read_texts(files: FileSet, *, as_bytes: bool = False) -> Iterator[str | Unreadable]:
    """The text of UTF-8 files in blocks of about a megabyte, each ending at a line end.

    as_bytes: bytes that are not UTF-8 become surrogates, which the byte tokenizer turns into these bytes again.
    """
    for path in files.paths:
        yield from _texts_of(path, "surrogateescape" if as_bytes else "strict")


def read_files(files: FileSet, *, as_bytes: bool = False) -> Iterator[str | Unreadable]:
    """As `read_texts`, but each file whole, as one document."""
    for path in files.paths:
        pieces: list[str] = []
        for text in _texts_of(path, "surrogateescape" if as_bytes else "strict"):
            if isinstance(text, Unreadable):
                yield text
                break
            pieces.append(text)
            if sum(map(len, pieces)) > MAX_LINE_BYTES:
                yield Unreadable(f"{path}: the file is longer than {MAX_LINE_BYTES:,} bytes, the most a document may have. Split it")
                break
        else:
            yield "".join(pieces)


def _texts_of(path: Path, errors: str) -> Iterator[str | Unreadable]:
    line, rest = 1, b""
    try:
        for block in read_blocks(path):
            # Cut at the last line end: what follows it waits for the next block, with the line number of its beginning in `line`.
            whole, newline, rest = (rest + block).rpartition(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                at = line + whole.count(b"\n") + len(newline)
                too_long = f"the line is longer than {MAX_LINE_BYTES:,} bytes, the most that is encoded at once. Break it"
                yield Unreadable(f"{path}:{at}: {too_long}")
                return
            if not newline:
                continue
            text = _decoded(whole + newline, line, path, errors)
            yield text
            if isinstance(text, Unreadable):
                return
            line += whole.count(b"\n") + 1
    except PackedError as error:
        yield Unreadable(f"{path}:{line}: {error}")
        return
    if rest:
        yield _decoded(rest, line, path, errors)


def _decoded(block: bytes, line: int, path: Path, errors: str) -> str | Unreadable:
    try:
        return block.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        # A block has thousands of lines; the user needs the one with the bad byte.
        at = line + block[: error.start].count(b"\n")
        return Unreadable(f"{path}:{at}: not UTF-8: byte {block[error.start]:#04x}. Save the file as UTF-8, or set the tokenizer to bytes")


class _BadLineError(Exception):
    """A line cannot be used; the message says why. fields: as those of `Unreadable`."""

    def __init__(self, message: str, fields: tuple[tuple[str, bool], ...] | None = None):
        super().__init__(message)
        self.fields = fields


def read_documents(files: FileSet, *, field: str) -> Iterator[str | Unreadable]:
    """The text in `field` of every JSON line that is not blank. Files that end in .gz or .zst are unpacked."""
    for path in files.paths:
        yield from _documents_of(path, field)


def _documents_of(path: Path, field: str) -> Iterator[str | Unreadable]:
    counter = _LineCounter()
    empty = True
    try:
        for line in _lines(read_blocks(path), counter):
            empty = False
            yield _document(path, counter.line, line, field)
    except (PackedError, _BadLineError) as error:
        yield Unreadable(f"{path}:{counter.line}: {error}")
        return
    # An empty file among many is most likely a failed download.
    if empty:
        yield Unreadable(f"{path}: the file is empty: it contains no documents")


@dataclass
class _LineCounter:
    """The number of the line that is being read, from 1. It outlives the generator of lines, whose error it locates."""

    line: int = 1


def _lines(blocks: Iterable[bytes], counter: _LineCounter) -> Iterator[bytes]:
    """The lines that are not blank. Raises _BadLineError for a line beyond the limit."""
    rest = b""
    for block in blocks:
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
        return Unreadable(f"{path}:{number}: {error}", error.fields)


def _text(line: bytes, field: str) -> str:
    document = _parse(line)
    if not isinstance(document, dict):
        raise _BadLineError(f"must be a JSON object, not {describe(document)}")
    if field not in document:
        # The longest text first: it is the likeliest to be meant.
        known = sorted(document, key=lambda name: len(document[name]) if isinstance(document[name], str) else -1, reverse=True)
        raise _BadLineError(f"has no field {shown(field)}", tuple((name, isinstance(document[name], str)) for name in known))
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


def missing_field(documents: Sequence[Unreadable], field: str, *, stopped: bool) -> tuple[str, str | None]:
    """The message about all documents without the field, and the name of a field that they have and that is text.

    stopped: whether the reading ended before the last document.
    """
    fields = dict(field for document in reversed(documents) for field in document.fields or ())
    texts = [name for document in documents for name, is_text in document.fields or () if is_text]
    others = len(documents) - 1
    more = f" (and {others}{' or more' if stopped else ''} other{'s' if others > 1 else ''})" if others else ""
    has = f"It has: {', '.join(map(shown, list(fields)[:_MOST_FIELDS])) or 'none'}{'' if texts else '. None of them is text'}"
    return f"{documents[0].message}{more}. {has}", most_similar(field, texts) or next(iter(texts), None)
