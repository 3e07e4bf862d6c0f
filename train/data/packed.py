"""The contents of text files in blocks, unpacked where the name of the file ends in .gz or .zst.

A packed file may unpack to a thousand times its size, and one that is cut short must not pass for a shorter one. So only `read_blocks`
unpacks: it yields blocks of bounded size, gives up on a file that unpacks to too much to be text, and raises for data that is damaged or
ends too early. The readers of text and of JSON lines see blocks of bytes and nothing else.
"""

from __future__ import annotations

import gzip
import importlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

_BLOCK_BYTES = 1 << 20
# Four bytes of Zstandard may unpack to 128 KiB, and a piece is unpacked at once: this bounds a block to 128 MiB.
_PIECE_BYTES = 1 << 12
MAX_EXPANDED = 1 << 26
"""Bytes that any file may unpack to; beyond them MAX_RATIO applies."""
MAX_RATIO = 200
"""The number of times its size that a file may unpack to. Text stays far below it; endless repetition reaches about a thousand."""


class TextError(Exception):
    """A text cannot be read. The message says why, and what to change. Readers yield it in the place of the text, and continue.

    fields: if it is a document without the field that was asked for, its fields and whether each of them is text. why: the message without
    the place of the text, if other texts may have the same problem.
    """

    def __init__(self, message: str, fields: tuple[tuple[str, bool], ...] | None = None, why: str = ""):
        super().__init__(message)
        self.fields, self.why = fields, why


def is_packed(path: Path) -> bool:
    """Whether the contents of a file are unpacked when it is read."""
    return path.suffix in _UNPACKERS


def read_blocks(path: Path) -> Iterator[bytes]:
    """The contents of a file, unpacked, in blocks of about a megabyte. Raises TextError."""
    size, total = path.stat().st_size, 0
    unpack = _UNPACKERS.get(path.suffix, _plain)
    with path.open("rb") as file:
        for block in unpack(file):
            total += len(block)
            if is_too_much(total, size):
                ratio = f"the data is more than {MAX_RATIO} times as large as the file, too much for text"
                raise TextError(f"{ratio}. Unpack the file if it is the right one")
            yield block


def is_too_much(expanded: int, size: int) -> bool:
    """Whether a file of `size` bytes has unpacked to more than text does."""
    return expanded > max(MAX_EXPANDED, size * MAX_RATIO)


def _plain(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(_BLOCK_BYTES):
        yield block


def _gzip(file: BinaryIO) -> Iterator[bytes]:
    try:
        with gzip.open(file) as unpacked:
            # read1 returns what one read of the stream unpacks, at most _BLOCK_BYTES, and never the whole file.
            while block := unpacked.read1(_BLOCK_BYTES):
                yield block
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged("gzip", error) from None


def _zstd(file: BinaryIO) -> Iterator[bytes]:
    zstandard = importlib.import_module("zstandard")
    # A file may be several frames, one after the other. The package's own reader says nothing if the last one is cut short.
    frame: Any = None
    blocks, num_bytes = list[bytes](), 0
    try:
        while piece := file.read(_PIECE_BYTES):
            while piece:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                blocks.append(frame.decompress(piece))
                num_bytes += len(blocks[-1])
                piece, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
            if num_bytes >= _BLOCK_BYTES:
                yield b"".join(blocks)
                blocks, num_bytes = [], 0
    except zstandard.ZstdError as error:
        raise _damaged("Zstandard", error) from None
    if num_bytes:
        yield b"".join(blocks)
    if frame is not None:
        raise _damaged("Zstandard", "the last frame has no end")


def _damaged(kind: str, error: object) -> TextError:
    return TextError(f"the {kind} data is damaged or cut short: {error}. Create or download the file again")


_UNPACKERS: Mapping[str, Callable[[BinaryIO], Iterator[bytes]]] = {".gz": _gzip, ".zst": _zstd}
