"""Text that went through a tokenizer once: a token file in the cache, mapped from then on."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from jgt.document import InputError, is_file
from train.data.files import FileSet, Unreadable
from train.data.stream import Segment, Stream
from train.data.tokenizer import Tokenizer
from train.data.tokens import map_bin

_FORMAT = 2
_BATCH_CHARACTERS = 1 << 20
_MAX_PROBLEMS = 20
_BLOCK_BYTES = 1 << 22

Reader = Callable[[FileSet], Iterator[str | Unreadable]]


def open_encoded(files: FileSet, reader: Reader, *, tokenizer: Tokenizer, separator: int | None, kind: str, cache_dir: Path) -> Stream:
    """The tokens of the texts that `reader` yields, each followed by `separator`. Raises InputError.

    `kind` names whatever else decides about the tokens; with the tokenizer, the files' names, sizes and times and a checksum
    of the tokens it makes the cache file's name. A file whose content is not that of its name is made again. Several
    processes may do this at once: each writes a file of its own and renames it.
    """
    dtype = _narrowest(tokenizer.vocab_size)
    key = _key(files, tokenizer, kind)
    whole = (path for path in sorted(cache_dir.glob(f"{key}.*.{dtype}.bin")) if is_file(path) and path == _named(path, key, dtype))
    path = next(whole, None) or _write_atomically(cache_dir, key, dtype, _token_bytes(files, reader, tokenizer, separator, dtype))
    first, more = files.paths[0], len(files.paths) - 1
    name = f"{first}{f' and {more} more' if more else ''} (encoded in {path})"
    return Stream((Segment(name=name, tokens=map_bin(path, dtype)),))


def _token_bytes(files: FileSet, reader: Reader, tokenizer: Tokenizer, separator: int | None, dtype: str) -> Iterator[bytes]:
    problems: list[str] = []
    end = np.asarray([] if separator is None else [separator], dtype)
    num_tokens = 0
    for texts in _batches(_readable(reader(files), problems)):
        for tokens in tokenizer.encode_batch(texts):
            num_tokens += len(tokens) + len(end)
            yield np.concatenate([tokens, end]).astype(np.dtype(dtype).newbyteorder("<")).tobytes()
    if num_tokens == 0 and not problems:
        problems = [f"{path}: the file is empty: it holds no token" for path in files.paths]
    if problems:
        raise InputError(problems)


def _readable(texts: Iterable[str | Unreadable], problems: list[str]) -> Iterator[str]:
    for text in texts:
        if not isinstance(text, Unreadable):
            yield text
            continue
        problems.append(text.message)
        if len(problems) == _MAX_PROBLEMS:
            problems.append(f"{_MAX_PROBLEMS} problems; the rest was not read")
            return


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text) + 1
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _named(path: Path, key: str, dtype: str) -> Path:
    """What the file must be called."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
    return path.with_name(f"{key}.{checksum:08x}.{dtype}.bin")


def _write_atomically(folder: Path, key: str, dtype: str, chunks: Iterable[bytes]) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=folder, prefix=f"{key}.", suffix=".tmp")
    except OSError as error:
        raise InputError([f"{folder}: cannot be written: {error.strerror or error}"]) from None
    new = Path(name)
    with os.fdopen(number, "wb") as file:
        try:
            _write(file, chunks)
            return new.replace(_named(new, key, dtype))
        except BaseException as error:
            new.unlink()
            if isinstance(error, IsADirectoryError):
                raise InputError([f"{error.filename2}: cannot be written: it is a folder. Remove it"]) from None
            raise


def _write(file: IO[bytes], chunks: Iterable[bytes]) -> None:
    file.writelines(chunks)
    file.flush()
    # Without it, a crash of the machine can leave the final name on an empty file.
    os.fsync(file.fileno())


def _narrowest(vocab_size: int) -> str:
    return next(dtype for dtype in ("uint8", "uint16", "uint32") if vocab_size - 1 <= np.iinfo(dtype).max)


def _key(files: FileSet, tokenizer: Tokenizer, kind: str) -> str:
    listed = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files.paths]
    return hashlib.sha256(json.dumps([_FORMAT, kind, tokenizer.identity, listed]).encode()).hexdigest()[:32]
