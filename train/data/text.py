"""Plain text files, one after the other without separators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jgt.document import InputError
from train.data.files import FileSet, Unreadable
from train.data.stream import Segment, Stream

_MAP_BYTES = 1 << 24
_BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 24


def open_bytes(files: FileSet) -> Stream:
    """The bytes of the files as tokens, uint8. Raises InputError."""
    if files.num_bytes == 0:
        raise InputError([f"{path}: the file is empty" for path in files.paths])
    return Stream(tuple(Segment(name=str(path), tokens=_bytes_of(path)) for path in files.paths))


def blocks(files: FileSet) -> Iterator[str | Unreadable]:
    """The files' text, about a megabyte at a time, cut at line ends."""
    for path in files.paths:
        with path.open("rb") as file:
            yield from _blocks(file, path)


def _bytes_of(path: Path) -> np.ndarray:
    # A mapping costs a page and one of the kernel's few ten thousand; a small file is cheaper in memory.
    if path.stat().st_size < _MAP_BYTES:
        return np.fromfile(path, np.uint8)
    return np.memmap(path, np.uint8, mode="r").view(np.ndarray)


def _blocks(file: BinaryIO, path: Path) -> Iterator[str | Unreadable]:
    line, rest = 1, b""
    while block := file.read(_BLOCK_BYTES):
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
        at = line + block[: error.start].count(b"\n")
        return Unreadable(f"{path}:{at}: not UTF-8: byte {block[error.start]:#04x}. Save the file as UTF-8, or use the tokenizer bytes")
