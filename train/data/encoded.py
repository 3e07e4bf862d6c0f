"""Text is encoded once, and its tokens are read from a cache from then on.

Encoding a large text takes hours. So the tokens of a data set are written to one .bin file in the run directory, `KEY.CHECKSUM.DTYPE.bin`.
The key is a hash of everything that decides the tokens: this format's version, how the text was read, the identity of the tokenizer, and
the path, size and modification time of every input file. The checksum covers the contents: a file that was damaged or cut short no longer
has the name it ought to have and is written again.

Several processes may encode the same text at the same time. Each writes its own temporary file and then renames it, which is atomic; all of
them arrive at the same contents, and so at the same name. A process that is killed while it encodes leaves its temporary file behind, which
the next start removes. A living process holds a lock on its file, which the kernel releases however the process dies.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TypeVar

import numpy as np

from jgt.document import InputError

from ..files.locks import lock
from .files import FileSet
from .packed import TextError
from .stream import Stream
from .tokenizer import Tokenizer
from .tokens import map_bin

_FORMAT = 3
"""The version of this cache's files. Raise it when the same inputs give other tokens."""
_BATCH_CHARACTERS = 1 << 20
_MAX_PROBLEMS = 20
_BLOCK_BYTES = 1 << 22

_Item = TypeVar("_Item")
Reader = Callable[[Path], Iterator[_Item | TextError]]


class UnreadableError(InputError):
    """Texts that could not be read. missing: documents without their field. stopped: whether others were not read because of them."""

    def __init__(self, problems: list[str], missing: list[TextError], *, stopped: bool):
        super().__init__(problems)
        self.missing, self.stopped = missing, stopped


def open_encoded(files: FileSet, reader: Reader[str], *, tokenizer: Tokenizer, separator: int | None, kind: str, cache_dir: Path) -> Stream:
    """The tokens of the texts that `reader` yields for each file, from the cache if they are in it.

    With a `separator` each text is a document: the separator follows it, and the tokenizer's beginning, if it has one, precedes it.
    `kind` names everything else that decides the tokens, such as the field of a JSON line. Raises InputError, and
    UnreadableError with all texts that could not be read.
    """
    dtype = next(dtype for dtype in ("uint8", "uint16", "uint32") if tokenizer.vocab_size - 1 <= np.iinfo(dtype).max)
    begin, end = ((), ()) if separator is None else (tokenizer.special.beginning, (separator,))

    def encode(texts: Iterator[str]) -> Iterator[np.ndarray]:
        around = (np.asarray(begin, dtype), np.asarray(end, dtype))
        encoded = (tokens for batch in _batches(texts) for tokens in tokenizer.encode_batch(batch))
        return (np.concatenate([around[0], tokens, around[1]]) for tokens in encoded)

    kinds = [kind, *([begin] if begin else [])]
    return open_cached(files, reader, encode, key=[*kinds, tokenizer.identity], dtype=dtype, cache_dir=cache_dir)


def open_cached(
    files: FileSet,
    reader: Reader[_Item],
    encode: Callable[[Iterator[_Item]], Iterator[np.ndarray]],
    *,
    key: Sequence[object],
    dtype: str,
    cache_dir: Path,
) -> Stream:
    """The tokens that `encode` makes of what `reader` yields for each file, from the cache if they are in it.

    key: names everything beside the files that decides the tokens. dtype: their type. Raises InputError and UnreadableError.
    """
    # Modification times instead of contents: hashing a large text at every start would take minutes.
    states = [path.stat() for path in files.paths]
    listed = [(str(path.resolve()), state.st_size, state.st_mtime_ns) for path, state in zip(files.paths, states, strict=True)]
    name = hashlib.sha256(json.dumps([_FORMAT, *key, listed]).encode()).hexdigest()[:32]
    cached = (path for path in sorted(cache_dir.glob(f"{name}.*.{dtype}.bin")) if path.is_file())
    path = next((path for path in cached if path.name == f"{name}.{_checksum(path)}.{dtype}.bin"), None)
    if path is None:
        pieces = _token_bytes(files, reader, encode, dtype)
        path = _write(cache_dir, name, dtype, pieces, max(state.st_mtime_ns for state in states))
    # The position of a bad id counts tokens of the cache file, so its message names both.
    first, more = files.paths[0], len(files.paths) - 1
    return Stream((replace(map_bin(path, dtype), name=f"{first}{f' and {more} more' if more else ''} (encoded in {path})"),))


def remove_leftovers(cache_dir: Path) -> None:
    """Removes the temporary files of processes that were killed while they encoded. Living processes keep theirs."""
    for path in cache_dir.glob(f"{'[0-9a-f]' * 32}.*.tmp"):
        # Not a pipe, which would block. And what cannot be removed, or cannot be locked on this file system, does no harm.
        if path.is_file() and not path.is_symlink():
            with contextlib.suppress(OSError), path.open("r+b") as file:
                if lock(file):
                    path.unlink()


def _token_bytes(
    files: FileSet, reader: Reader[_Item], encode: Callable[[Iterator[_Item]], Iterator[np.ndarray]], dtype: str
) -> Iterator[bytes]:
    """The contents of the cache file, one piece per item. Raises UnreadableError at the end, after all items were tried."""
    problems, num_tokens = list[TextError](), 0
    for tokens in encode(_readable(files, reader, problems)):
        num_tokens += len(tokens)
        # Little-endian on every machine, as `map_bin` reads it.
        yield tokens.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
    if num_tokens == 0 and not problems:
        raise InputError([f"{path}: the file is empty: it contains no tokens" for path in files.paths])
    if problems:
        missing = [problem for problem in problems if problem.fields is not None]
        others = _grouped([problem for problem in problems if problem.fields is None])
        if (stopped := len(problems) == _MAX_PROBLEMS) and others:
            others.append(f"{_MAX_PROBLEMS} problems; the rest was not read")
        raise UnreadableError(others, missing, stopped=stopped)


def _grouped(problems: list[TextError]) -> list[str]:
    """One message for all texts with the same problem: that of the first one."""
    alike = dict[str, list[TextError]]()
    for problem in problems:
        alike.setdefault(problem.why or str(problem), []).append(problem)
    return [f"{some[0]}{f' (and {len(some) - 1} more have this problem)' if len(some) > 1 else ''}" for some in alike.values()]


def _readable(files: FileSet, reader: Reader[_Item], problems: list[TextError]) -> Iterator[_Item]:
    """The items that could be read; appends the others to `problems`, and stops after _MAX_PROBLEMS of them."""
    for item in (item for path in files.paths for item in reader(path)):
        if not isinstance(item, TextError):
            yield item
            continue
        problems.append(item)
        if len(problems) == _MAX_PROBLEMS:
            return


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Lists of texts of about a megabyte: the tokenizers package encodes the texts of a list in parallel."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        # A text counts one character more than it has, so that a million empty ones fill a batch, too.
        batch.append(text)
        characters += len(text) + 1
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _checksum(path: Path) -> str:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
    return f"{checksum:08x}"


def _write(folder: Path, key: str, dtype: str, pieces: Iterable[bytes], time_ns: int) -> Path:
    """Writes a cache file under a temporary name, then gives it its own; leaves nothing behind on an error. Raises InputError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _temporary(folder, key)
    except OSError as error:
        raise InputError([f"{folder}: cannot be written: {error.strerror or error}"]) from None
    new, checksum = Path(file.name), 0
    try:
        with file:
            for piece in pieces:
                file.write(piece)
                checksum = zlib.crc32(piece, checksum)
            file.flush()
            # Without fsync, a crash of the machine can leave the final name on an empty file.
            os.fsync(file.fileno())
            # The same time on every process: to a process that has mapped a file, replacing it by an equal one changes nothing.
            os.utime(new, ns=(time_ns, time_ns))
            return new.replace(folder / f"{key}.{checksum:08x}.{dtype}.bin")
    except BaseException as error:
        # An interrupt, too, must not leave a temporary file of gigabytes behind.
        new.unlink(missing_ok=True)
        if isinstance(error, IsADirectoryError):
            raise InputError([f"{error.filename2}: cannot be written: it is a folder. Remove it"]) from None
        raise


def _temporary(folder: Path, key: str) -> IO[bytes]:
    """A new temporary file, locked until it is closed."""
    while True:
        # In the same folder, because a rename is atomic only within one file system.
        file = tempfile.NamedTemporaryFile(dir=folder, prefix=f"{key}.", suffix=".tmp", delete=False)  # noqa: SIM115
        # A file system without locks: leftovers stay there, too, because none can be locked.
        with contextlib.suppress(OSError):
            lock(file, waits=True)
        # Another start may have removed the file before it was locked.
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()
