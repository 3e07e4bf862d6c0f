"""The texts of plain text and JSON lines files, for a tokenizer.

A data set of text is read once, from one end to the other, and can be larger than memory. So a plain file is read in blocks of about a
megabyte that end at a line end, and a JSON lines file line by line, each line one document. A line that cannot be used does not end the
reading: the reader yields a `TextError` in its place, so that a user sees all bad lines of a file at once. A wrong name of the field with
the text would fill the screen with equal lines; so a document without the field says which fields it has, and the caller makes one problem
of all such documents (`missing_field`).

The files are not trusted. A line without an end would exhaust the memory, so it has a limit; `packed.py` bounds what a small file may
unpack to.
"""

from __future__ import annotations

import codecs
import difflib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jgt.document import Node, shown

from ..files.json_text import NestedError, json_value
from .packed import TextError, read_blocks

Record = tuple[str, dict[str, Any]]
"""The place of a JSON line or of a row, as `file:line`, and its values by name."""
MAX_LINE_BYTES, _MAX_ARRAY = 1 << 24, 1 << 30
_MOST_FIELDS = 12
_MAX_NAME = 100
_LIMIT = f"is longer than {MAX_LINE_BYTES:,} bytes, the most a document may have. Split it"


def read_texts(path: Path, *, as_bytes: bool = False) -> Iterator[str | TextError]:
    """The text of a UTF-8 file in blocks of about a megabyte, each ending at a line end.

    as_bytes: bytes that are not UTF-8 become surrogates, which the byte tokenizer turns into these bytes again.
    """
    try:
        for first, block in _blocks(path):
            try:
                yield block.decode("utf-8", "surrogateescape" if as_bytes else "strict")
            except UnicodeDecodeError as error:
                # A block has thousands of lines; the user needs the one with the bad byte.
                at = first + block[: error.start].count(b"\n")
                bad = f"not UTF-8: byte {block[error.start]:#04x}. Save the file as UTF-8, or set the tokenizer to bytes"
                yield TextError(f"{path}:{at}: {bad}")
                return
    except TextError as error:
        yield error


def read_file(path: Path, *, as_bytes: bool = False) -> Iterator[str | TextError]:
    """As `read_texts`, but the whole file as one document."""
    pieces: list[str] = []
    for text in read_texts(path, as_bytes=as_bytes):
        if isinstance(text, TextError):
            yield text
            return
        pieces.append(text)
        if sum(map(len, pieces)) > MAX_LINE_BYTES:
            yield TextError(f"{path}: the file {_LIMIT}")
            return
    yield "".join(pieces)


def read_documents(path: Path, *, field: str) -> Iterator[str | TextError]:
    """The text in `field` of every JSON line that is not blank. A file that ends in .gz or .zst is unpacked."""
    return (row if isinstance(row, TextError) else _text(*row, field) for row in read_objects(path))


def read_objects(path: Path) -> Iterator[Record | TextError]:
    """The place and the object of every JSON line that is not blank. A file that ends in .gz or .zst is unpacked."""
    is_empty = True
    try:
        for first, block in _blocks(path):
            # Editors of other systems begin a file with a mark.
            lines = block.removeprefix(codecs.BOM_UTF8) if first == 1 else block
            if is_empty and path.suffix == ".json" and path.stat().st_size < _MAX_ARRAY and lines.lstrip().startswith(b"["):
                yield from _array(path)
                return
            # Blank lines can fill gigabytes of a packed file: they are not split.
            for number, line in enumerate([] if lines.isspace() else lines.split(b"\n"), first):
                if line and not line.isspace():
                    is_empty = False
                    yield _object(f"{path}:{number}", line)
        # An empty file among many is most likely a failed download.
        if is_empty:
            yield TextError(f"{path}: the file is empty: it contains no documents")
    except TextError as error:
        yield error


def _blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """Blocks of about a megabyte that end at a line end, and the number of their first line. Raises TextError with path and line."""
    line, rest = 1, b""
    try:
        for block in read_blocks(path):
            # The rest waits for the next block, and `line` is the number of the first line that waits.
            whole, newline, rest = (rest + block).rpartition(b"\n")
            if newline:
                yield line, whole + newline
                line += whole.count(b"\n") + 1
            if len(rest) > MAX_LINE_BYTES:
                raise TextError(f"the line {_LIMIT}")
    except TextError as error:
        raise TextError(f"{path}:{line}: {error}") from None
    if rest:
        yield line, rest


def _array(path: Path) -> Iterator[Record | TextError]:
    """The objects of a file that is one array, which is read whole."""
    text = b"".join(read_blocks(path)).removeprefix(codecs.BOM_UTF8)
    try:
        items = {f"{path}: item {number}": json.dumps(item).encode() for number, item in enumerate(json_value(text))}
    except (ValueError, RecursionError):
        items = {str(path): text}
    yield from itertools.starmap(_object, items.items())


def _object(where: str, line: bytes) -> Record | TextError:
    try:
        document = json_value(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return TextError(f"{where}: not UTF-8: byte {line[error.start]:#04x} at offset {error.start} of the line")
    except NestedError:
        return TextError(f"{where}: the JSON is nested too deeply")
    except ValueError as error:
        return TextError(f"{where}: not valid JSON: {error}. Write one JSON object in each line, or one array of them in a .json file")
    if not isinstance(document, dict):
        return TextError(f"{where}: must be a JSON object, not {Node(document, where).in_words()}")
    return where, document


def _text(where: str, document: dict[str, Any], field: str) -> str | TextError:
    if field not in document:
        # The longest text first: it is the likeliest to be meant.
        known = sorted(document, key=lambda name: len(document[name]) if isinstance(document[name], str) else -1, reverse=True)
        return TextError(f"{where}: has no field {shown(field)}", tuple((name, isinstance(document[name], str)) for name in known))
    text = document[field]
    if not isinstance(text, str):
        return TextError(f"{where}: the field {field!r} must be text, not {Node(text, where).in_words()}")
    try:
        # JSON can spell half of a surrogate pair, "\ud800", which no tokenizer takes.
        text.encode("utf-8")
    except UnicodeEncodeError:
        return TextError(f"{where}: the field {field!r} contains half of a surrogate pair, which is not a character")
    return text


def missing_field(documents: Sequence[TextError], field: str, *, stopped: bool) -> tuple[str, str | None]:
    """The message about all documents without the field, and the name of a field that they have and that is text.

    stopped: whether the reading ended before the last document.
    """
    fields = dict(field for document in reversed(documents) for field in document.fields or ())
    texts = [name for document in documents for name, is_text in document.fields or () if is_text]
    others = len(documents) - 1
    more = f" (and {others}{' or more' if stopped else ''} other{'s' if others > 1 else ''})" if others else ""
    has = f"It has: {', '.join(map(shown, list(fields)[:_MOST_FIELDS])) or 'none'}{'' if texts else '. None of them is text'}"
    return f"{documents[0]}{more}. {has}", next(iter([*difflib.get_close_matches(field[:_MAX_NAME], texts, n=1, cutoff=0.5), *texts]), None)
