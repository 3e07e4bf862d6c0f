"""One part of the data config → its token streams, and the fingerprint of its data.

Each source has its own way from files to tokens (`_open`): token files and bytes are mapped, text and JSON lines are encoded
once. All ways end in a `Stream` whose ids are checked against the model's vocabulary, because an id outside of it would not
fail on an accelerator: indexing in JAX clamps or fills instead of raising, and the model would silently train on the wrong
embedding.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from jgt.document import InputError

from .boundaries import with_ends
from .config import BYTES, MixturePart
from .documents import read_blocks, read_documents, read_files
from .encoded import open_encoded
from .files import FileSet, find_files, standard_library
from .stream import Stream, vocab_problems
from .tokenizer import END_OF_TEXT_NAMES, Tokenizer
from .tokens import open_bytes, open_tokens

_PROBE_BYTES = 1 << 20
_MAX_VOCAB_PROBLEMS = 20


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The two streams of one part. `held_out` is None if the run has no evaluation.

    The fingerprint identifies the data: a resumed run compares it with the one it started with.
    """

    train: Stream
    held_out: Stream | None
    fingerprint: dict[str, str | int]


def open_splits(part: MixturePart, *, eval_tokens: int, tokenizer: Tokenizer, vocab: int, end: int | None, cache_dir: Path) -> Splits:
    """Opens the files of a part and checks every token. `path_problems` must have found nothing. Raises InputError.

    end: the token that is to end every document, also where files of text otherwise just follow each other; None if they shall.
    """
    files = find_files(part.path) if part.path is not None else standard_library()
    train = _open_checked(part, files, tokenizer, vocab, end, cache_dir)
    fingerprint = {"source": part.source, **_identity(files)}
    # The ids of token files do not depend on a tokenizer.
    if part.source != "tokens":
        fingerprint["tokenizer"] = tokenizer.identity
    held_out = None
    if part.eval_path is not None:
        eval_files = find_files(part.eval_path)
        held_out = _open_checked(part, eval_files, tokenizer, vocab, end, cache_dir)
        fingerprint |= {f"eval_{key}": value for key, value in _identity(eval_files).items()}
    elif eval_tokens:
        train, held_out = train.split(max(len(train) - eval_tokens, 0))
    fingerprint |= {"train_tokens": len(train), "eval_tokens": 0 if held_out is None else len(held_out)}
    return Splits(train=train, held_out=held_out, fingerprint=fingerprint)


def _open_checked(part: MixturePart, files: FileSet, tokenizer: Tokenizer, vocab: int, end: int | None, cache_dir: Path) -> Stream:
    stream = _open(part, files, tokenizer, end, cache_dir)
    if problems := list(islice(vocab_problems(stream, vocab), _MAX_VOCAB_PROBLEMS)):
        raise InputError(problems)
    return stream


def _open(part: MixturePart, files: FileSet, tokenizer: Tokenizer, end: int | None, cache_dir: Path) -> Stream:
    if part.source == "tokens":
        return open_tokens(files, part.dtype)
    if part.source == "jsonl":
        return _open_jsonl(part, files, tokenizer, cache_dir)
    # Bytes of text are ids already, so even a large text needs no cache.
    if part.tokenizer == BYTES:
        return open_bytes(files) if end is None else with_ends(open_bytes(files), end)
    if end is not None:
        return open_encoded(files, read_files, tokenizer=tokenizer, separator=end, kind="files", cache_dir=cache_dir)
    # Without a separator: the reader yields blocks, and the end of a block is not the end of a document.
    return open_encoded(files, read_blocks, tokenizer=tokenizer, separator=None, kind="text", cache_dir=cache_dir)


def _open_jsonl(part: MixturePart, files: FileSet, tokenizer: Tokenizer, cache_dir: Path) -> Stream:
    if tokenizer.end_of_text is None:
        known = ", ".join(END_OF_TEXT_NAMES)
        raise InputError([f"{part.tokenizer}: no end-of-text token, which is needed to separate documents. Known names: {known}"])
    # The field decides which texts are read, so it is part of the cache's key (`kind`).
    reader = partial(read_documents, field=part.field)
    kind = f"jsonl:{part.field}"
    return open_encoded(files, reader, tokenizer=tokenizer, separator=tokenizer.end_of_text, kind=kind, cache_dir=cache_dir)


def _identity(files: FileSet) -> dict[str, str | int]:
    """What identifies files: their names and sizes, and a checksum of each file's first and last megabyte.

    Cheap for files of any size, and enough to tell another data set from this one. A change in the middle of a large file that keeps its
    size is not noticed.
    """
    checksum = 0
    for path in files.paths:
        with path.open("rb") as file:
            checksum = zlib.crc32(file.read(_PROBE_BYTES), checksum)
            file.seek(max(path.stat().st_size - _PROBE_BYTES, 0))
            checksum = zlib.crc32(file.read(_PROBE_BYTES), checksum)
    return {"files": len(files.paths), "bytes": files.num_bytes, "files_sha256": files.digest(), "ends_crc32": checksum}
