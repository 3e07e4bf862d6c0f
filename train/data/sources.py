"""Opening one part of the data config: its token streams, and the fingerprint of its data.

Each source has its own way from files to tokens (`_open`): token files and bytes are mapped; text, JSON lines and columns are encoded once.
All ways end in a `Stream` whose ids are checked against the model's vocabulary, because an id outside of it would not fail on an
accelerator: indexing in JAX clamps or fills instead of raising, and the model would silently train on the wrong embedding.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jgt.document import InputError, shown

from ..files.cache import ObjectCache
from .chat.answers import IDS
from .chat.keys import CHATS, has_pairs
from .chat.rows import ChatRows, Pairs
from .chat.source import held_out_from, open_chats, training_template
from .chat.template import ChatTemplate
from .columns import read_columns
from .config import BYTES, SUFFIXES, MixturePart, Problem
from .documents import missing_field, read_documents, read_file, read_texts
from .encoded import UnreadableError, open_encoded
from .files import FileSet, Finder, standard_library
from .packed import is_packed
from .special import WAYS_TO_NAME_AN_END
from .stream import Stream, Windows, find_outside, with_ends
from .tokenizer import Tokenizer
from .tokens import format_problem, open_bytes, open_tokens

_PROBE_BYTES = 1 << 20
_MAX_PROBLEMS = 20
_MAX_VOCAB = 10_000_000
_MOST_SPARED, _SPARED_SHARE = 500_000, 20
DOCUMENT_READERS = {
    "jsonl": read_documents,
    "parquet": partial(read_columns, kind="Parquet"),
    "arrow": partial(read_columns, kind="Arrow"),
}


Samples = Windows | ChatRows | Pairs


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The samples of one part. `held_out` is None if the run has no evaluation.

    fingerprint: identifies the data; a resumed run compares it with the one it started with. too_small: messages about ids outside of the
    vocabulary, and the vocabulary that would do for this part.
    """

    train: Samples
    held_out: Samples | None
    fingerprint: dict[str, str | int]
    too_small: tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True)
class Opener:
    """Opens the parts of one config. where(key): file and line of a dotted key, for messages.

    copies: the cache of objects.
    end: the token that is to end every document, also where files of text otherwise just follow each other; None if they shall.
    """

    tokenizer: Tokenizer
    seq: int
    vocab: int
    end: int | None
    eval_tokens: int | None
    cache_dir: Path
    where: Callable[[str], str]
    copies: ObjectCache

    def splits(self, part: MixturePart, prefix: str) -> Splits:
        """Opens the files of a part and checks every token. `path_problems` must have found nothing. Raises InputError.

        prefix: `data.` or `data.mixture[0].`, which precedes the part's keys in the run's file.
        """
        files = Finder(self.copies).files(part.path) if part.path is not None else standard_library()
        template = self._template(part, prefix) if part.source in CHATS else None
        train, too_small = self._checked(part, prefix, "path", files, template)
        fingerprint = {"source": part.source, **_identity(files)}
        if template is not None:
            fingerprint["template_sha256"] = template.sha256
        # The ids of token files do not depend on a tokenizer.
        if part.source != "tokens":
            fingerprint["tokenizer"] = self.tokenizer.identity
        held_out = None
        if part.eval_path is not None:
            eval_files = Finder(self.copies).files(part.eval_path)
            held_out, more = self._checked(part, prefix, "eval_path", eval_files, template)
            too_small += more
            fingerprint |= {f"eval_{key}": value for key, value in _identity(eval_files).items()}
        elif count := spared_tokens(len(train), self.seq) if self.eval_tokens is None else self.eval_tokens:
            position = max(len(train) - count, 0) if template is None else held_out_from(train, count, part)
            # A few conversations are trained on as a whole, unless the config says otherwise.
            if position or template is None or self.eval_tokens:
                train, held_out = train.split(position)
        fingerprint |= {"train_tokens": len(train), "eval_tokens": 0 if held_out is None else len(held_out)}
        samples = self._samples(part, train)
        rest = None if held_out is None else self._samples(part, held_out, first=len(samples))
        return Splits(train=samples, held_out=rest, fingerprint=fingerprint, too_small=too_small)

    def _template(self, part: MixturePart, prefix: str) -> ChatTemplate:
        try:
            return training_template(part, self.tokenizer)
        except InputError as error:
            raise located([(f"{prefix}template", problem) for problem in error.problems], self.where) from None

    def _samples(self, part: MixturePart, stream: Stream, first: int = 0) -> Samples:
        if part.source not in CHATS:
            return Windows(stream=stream, seq=self.seq, vocab=self.vocab)
        is_pair, pad = has_pairs(part.source), self.tokenizer.special.pad
        padding = pad if pad is not None and pad < self.vocab else 0
        rows = ChatRows(stream=stream, seq=self.seq, packing=part.packing and not is_pair, padding=padding)
        return Pairs(rows=rows, first=first) if is_pair else rows

    def _checked(
        self, part: MixturePart, prefix: str, key: str, files: FileSet, template: ChatTemplate | None
    ) -> tuple[Stream, tuple[tuple[str, int], ...]]:
        """The stream of the files that a key names, and `Splits.too_small` for them."""
        try:
            stream = self._open(part, files, template)
        except InputError as error:
            problems = [(prefix + key, problem) for problem in error.problems]
            if isinstance(error, UnreadableError) and error.missing:
                problems.append((f"{prefix}field", _field_problem(part, prefix, error)))
            raise located(problems, self.where) from None
        if (outside := find_outside(stream, self.vocab, None if template is None else IDS)) is None:
            return stream, ()
        message, needed = outside
        # The next text may have ids that are not in it.
        if needed is not None and (part.source != "tokens" or part.tokenizer != BYTES):
            needed = max(needed, self.tokenizer.vocab_size)
        if needed is None or needed > _MAX_VOCAB:
            kind = f" or {prefix}dtype ({part.dtype}) is wrong" if part.source == "tokens" else ""
            raise located([(prefix + key, f"{message}. No vocabulary has such ids: the file is damaged{kind}")], self.where)
        return stream, ((message, needed),)

    def _open(self, part: MixturePart, files: FileSet, template: ChatTemplate | None) -> Stream:
        if part.source == "tokens":
            return open_tokens(files, part.dtype)
        if part.source in ("text", "jsonl", *CHATS):
            columns = SUFFIXES["parquet"] if template is not None else ()
            plain = (path for path in files.paths if not is_packed(path) and path.suffix not in columns)
            problems = [problem for path in plain if (problem := format_problem(path))]
            if problems:
                raise InputError(problems[:_MAX_PROBLEMS])
        if template is not None:
            return open_chats(files, part, template, self.tokenizer, seq=self.seq, cache_dir=self.cache_dir)
        encoded = partial(open_encoded, files, tokenizer=self.tokenizer, cache_dir=self.cache_dir)
        if part.source in DOCUMENT_READERS:
            if self.tokenizer.special.end_of_text is None:
                missing = "no end-of-text token, which is needed to separate documents"
                raise InputError([f"{part.tokenizer}: {missing}. {WAYS_TO_NAME_AN_END}"])
            reader = partial(DOCUMENT_READERS[part.source], field=part.field)
            # The field decides which texts are read, so it is part of the cache's key (`kind`).
            return encoded(reader, separator=self.tokenizer.special.end_of_text, kind=f"{part.source}:{part.field}")
        # Bytes of text are ids already, so even a large text needs no cache.
        as_bytes = part.tokenizer == BYTES
        if as_bytes and not any(map(is_packed, files.paths)):
            return open_bytes(files) if self.end is None else with_ends(open_bytes(files), self.end)
        if self.end is not None:
            return encoded(partial(read_file, as_bytes=as_bytes), separator=self.end, kind="files")
        # Without a separator: the reader yields blocks, and the end of a block is not the end of a document.
        return encoded(partial(read_texts, as_bytes=as_bytes), separator=None, kind="text")


def located(problems: Iterable[Problem], where: Callable[[str], str]) -> InputError:
    """The error for problems with dotted keys, each with the line of its key."""
    return InputError([f"{line}: {message}" if (line := where(key)) else message for key, message in problems])


def spared_tokens(num_tokens: int, seq: int) -> int:
    """The tokens that are held out unless the config says how many: 5 %, but at least one window, if another one remains."""
    count = max(min(_MOST_SPARED, num_tokens // _SPARED_SHARE), seq + 1)
    return count if num_tokens - count > seq else 0


def _field_problem(part: MixturePart, prefix: str, error: UnreadableError) -> str:
    message, best = missing_field(error.missing, part.field, stopped=error.stopped)
    if best is None:
        return message
    value = best if best.isidentifier() else shown(best)
    # A list has no override for one of its entries.
    is_list = prefix.endswith("].")
    return f"{message}. Set {f'field: {value} in {prefix[:-1]}' if is_list else f'{prefix}field={value}'}"


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
