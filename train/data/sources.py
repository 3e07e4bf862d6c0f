"""Opening one part of the data config: its token streams, and the fingerprint of its data.

Each source has its own way from files to tokens (`_open`): token files and bytes are mapped; text, JSON lines and columns are encoded once.
All ways end in a `Stream` whose ids are checked against the model's vocabulary, because an id outside of it would not fail on an
accelerator: indexing in JAX clamps or fills instead of raising, and the model would silently train on the wrong embedding.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jgt.document import InputError, shown

from .boundaries import with_ends
from .columns import read_arrow, read_parquet
from .config import BYTES, MixturePart, Problem
from .documents import missing_field, read_documents, read_file, read_texts
from .encoded import UnreadableError, open_encoded
from .files import FileSet, Finder, standard_library
from .headers import format_problem
from .packed import is_packed
from .stream import Stream, find_outside
from .tokenizer import END_OF_TEXT_NAMES, Tokenizer
from .tokens import open_bytes, open_tokens

_PROBE_BYTES = 1 << 20
_MAX_PROBLEMS = 20
_MAX_VOCAB = 10_000_000
_MOST_SPARED, _SPARED_SHARE = 500_000, 20
_DOCUMENT_READERS = {"jsonl": read_documents, "parquet": read_parquet, "arrow": read_arrow}


class PartError(Exception):
    """A part cannot be opened. problems: each with a key of the part."""

    def __init__(self, problems: Sequence[Problem]):
        super().__init__("; ".join(message for _, message in problems))
        self.problems = problems


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The two streams of one part. `held_out` is None if the run has no evaluation.

    fingerprint: identifies the data; a resumed run compares it with the one it started with. too_small: messages about ids outside of the
    vocabulary, and the vocabulary that would do for this part.
    """

    train: Stream
    held_out: Stream | None
    fingerprint: dict[str, str | int]
    too_small: tuple[tuple[str, int], ...]


def open_splits(
    part: MixturePart,
    prefix: str,
    *,
    eval_tokens: int | None,
    tokenizer: Tokenizer,
    seq: int,
    vocab: int,
    end: int | None,
    cache_dir: Path,
) -> Splits:
    """Opens the files of a part and checks every token. `path_problems` must have found nothing. Raises PartError.

    prefix: `data.` or `data.mixture[0].`, which precedes the part's keys in the run's file. end: the token that is to end every document,
    also where files of text otherwise just follow each other; None if they shall.
    """
    open_files = partial(_open_files, part, prefix, tokenizer=tokenizer, vocab=vocab, end=end, cache_dir=cache_dir)
    files = Finder().files(part.path) if part.path is not None else standard_library()
    train, too_small = open_files("path", files)
    fingerprint = {"source": part.source, **_identity(files)}
    # The ids of token files do not depend on a tokenizer.
    if part.source != "tokens":
        fingerprint["tokenizer"] = tokenizer.identity
    held_out = None
    if part.eval_path is not None:
        eval_files = Finder().files(part.eval_path)
        held_out, more = open_files("eval_path", eval_files)
        too_small += more
        fingerprint |= {f"eval_{key}": value for key, value in _identity(eval_files).items()}
    elif count := spared_tokens(len(train), seq) if eval_tokens is None else eval_tokens:
        train, held_out = train.split(max(len(train) - count, 0))
    fingerprint |= {"train_tokens": len(train), "eval_tokens": 0 if held_out is None else len(held_out)}
    return Splits(train=train, held_out=held_out, fingerprint=fingerprint, too_small=too_small)


def spared_tokens(num_tokens: int, seq: int) -> int:
    """The tokens that are held out unless the config says how many: 5 %, but at least one window, if another one remains."""
    count = max(min(_MOST_SPARED, num_tokens // _SPARED_SHARE), seq + 1)
    return count if num_tokens - count > seq else 0


def _open_files(
    part: MixturePart, prefix: str, key: str, files: FileSet, *, tokenizer: Tokenizer, vocab: int, end: int | None, cache_dir: Path
) -> tuple[Stream, tuple[tuple[str, int], ...]]:
    """The stream of the files that a key names, and `Splits.too_small` for them."""
    try:
        stream = _open(part, files, tokenizer, end, cache_dir)
    except InputError as error:
        problems = [(key, problem) for problem in error.problems]
        if isinstance(error, UnreadableError) and error.missing:
            problems.append(("field", _field_problem(part, prefix, error)))
        raise PartError(problems) from None
    if (outside := find_outside(stream, vocab)) is None:
        return stream, ()
    message, needed = outside
    # The next text may have ids that are not in it.
    if needed is not None and (part.source != "tokens" or part.tokenizer != BYTES):
        needed = max(needed, tokenizer.vocab_size)
    if needed is None or needed > _MAX_VOCAB:
        kind = f" or {prefix}dtype ({part.dtype}) is wrong" if part.source == "tokens" else ""
        raise PartError([(key, f"{message}. No vocabulary has such ids: the file is damaged{kind}")])
    return stream, ((message, needed),)


def _field_problem(part: MixturePart, prefix: str, error: UnreadableError) -> str:
    message, best = missing_field(error.missing, part.field, stopped=error.stopped)
    if best is None:
        return message
    value = best if best.isidentifier() else shown(best)
    # A list has no override for one of its entries.
    is_list = prefix.endswith("].")
    return f"{message}. Set {f'field: {value} in {prefix[:-1]}' if is_list else f'{prefix}field={value}'}"


def _open(part: MixturePart, files: FileSet, tokenizer: Tokenizer, end: int | None, cache_dir: Path) -> Stream:
    if part.source == "tokens":
        return open_tokens(files, part.dtype)
    if part.source in ("text", "jsonl"):
        problems = [problem for path in files.paths if not is_packed(path) and (problem := format_problem(path))]
        if problems:
            raise InputError(problems[:_MAX_PROBLEMS])
    encoded = partial(open_encoded, files, tokenizer=tokenizer, cache_dir=cache_dir)
    if part.source in _DOCUMENT_READERS:
        if tokenizer.end_of_text is None:
            known = ", ".join(END_OF_TEXT_NAMES)
            raise InputError([f"{part.tokenizer}: no end-of-text token, which is needed to separate documents. Known names: {known}"])
        reader = partial(_DOCUMENT_READERS[part.source], field=part.field)
        # The field decides which texts are read, so it is part of the cache's key (`kind`).
        return encoded(reader, separator=tokenizer.end_of_text, kind=f"{part.source}:{part.field}")
    # Bytes of text are ids already, so even a large text needs no cache.
    as_bytes = part.tokenizer == BYTES
    if as_bytes and not any(map(is_packed, files.paths)):
        return open_bytes(files) if end is None else with_ends(open_bytes(files), end)
    if end is not None:
        return encoded(partial(read_file, as_bytes=as_bytes), separator=end, kind="files")
    # Without a separator: the reader yields blocks, and the end of a block is not the end of a document.
    return encoded(partial(read_texts, as_bytes=as_bytes), separator=None, kind="text")


def _identity(files: FileSet) -> dict[str, str | int]:
    """The identity of files: their names and sizes, and a checksum of each file's first and last megabyte.

    Cheap for files of any size, and enough to notice another data set. A change in the middle of a large file that keeps its size is not
    noticed.
    """
    checksum = 0
    for path in files.paths:
        with path.open("rb") as file:
            checksum = zlib.crc32(file.read(_PROBE_BYTES), checksum)
            file.seek(max(path.stat().st_size - _PROBE_BYTES, 0))
            checksum = zlib.crc32(file.read(_PROBE_BYTES), checksum)
    return {"files": len(files.paths), "bytes": files.num_bytes, "files_sha256": files.digest(), "ends_crc32": checksum}
