"""The loss of texts under a model: of each document from its first token on, in windows as long as the model allows.

A document begins after the token that comes before any text: the tokenizer's first token of a text or, without one, the token that ends a
text. So its first token is scored too. A tokenizer that has neither leaves the first token unscored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from jgt.document import InputError

from ..data.config import SUFFIXES, DataConfig
from ..data.documents import missing_field, read_file
from ..data.files import Finder
from ..data.packed import TextError, is_packed
from ..data.paths import path_problems
from ..data.sources import DOCUMENT_READERS
from ..data.tokenizer import ByteTokenizer, Tokenizer
from ..data.tokens import format_problem
from .likelihood import Row, Scorer, prefix_of, windows

_JSONL = (".jsonl", ".ndjson", ".json")
_MAX_PROBLEMS = 20


@dataclass(frozen=True, kw_only=True)
class TextLoss:
    """The loss of one part of some texts. tokens: those that were scored. size: the bytes of the texts. nats: the sum over all tokens."""

    name: str
    documents: int
    tokens: int
    size: int
    nats: float

    def measures(self) -> dict[str, float]:
        """The nats of a token, the perplexity, and the bits of a byte."""
        loss = self.nats / self.tokens if self.tokens else math.nan
        perplexity = math.exp(loss) if loss < 700 else math.inf
        return {"loss": loss, "perplexity": perplexity, "bits_per_byte": self.nats / math.log(2) / self.size if self.size else math.nan}

    def to_json(self) -> dict[str, object]:
        """The counts and the measures."""
        counts = {"documents": self.documents, "tokens": self.tokens, "bytes": self.size}
        return {"name": self.name, **counts, **self.measures()}


def evaluate_texts(scorer: Scorer, paths: Sequence[str], *, field: str, stride: int | None) -> list[TextLoss]:
    """The loss of each path's texts, and of all of them if there are several paths. stride: see `windows`. Raises InputError."""
    loaded, problems = scorer.loaded, list[str]()
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise InputError(["command line: --text: the model has no tokenizer: nothing says which tokens a text has"])
    if stride is not None and not 0 < stride <= loaded.config.seq:
        raise InputError([f"command line: --stride {stride}: must be from 1 to the model's sequence length {loaded.config.seq}"])
    texts = dict[str, list[str]]()
    for path in paths:
        with InputError.collect(problems):
            texts[path] = read_path(path, field=field, as_bytes=isinstance(tokenizer, ByteTokenizer))
    if field != "text" and not any(_kind(file) in DOCUMENT_READERS for path in paths for file in Finder().files(path).paths):
        problems.append(f"command line: --field {field}: these files have no fields. JSON lines, Parquet and Arrow have. Remove the flag")
    if problems:
        raise InputError(problems)
    rows = {path: _rows(some, tokenizer, loaded.config.seq, stride) for path, some in texts.items()}
    nats = dict(scorer.sums(list(rows.values()), what="windows"))
    losses = [
        TextLoss(
            name=path,
            documents=len(texts[path]),
            tokens=sum(len(row.tokens) - row.first for row in rows[path]),
            size=sum(len(text.encode("utf-8", "surrogateescape")) for text in texts[path]),
            nats=nats[index],
        )
        for index, path in enumerate(texts)
    ]
    return [*losses, *([_sum(losses)] if len(losses) > 1 else [])]


def _rows(texts: Sequence[str], tokenizer: Tokenizer, seq: int, stride: int | None) -> list[Row]:
    before = prefix_of(tokenizer)
    return [row for ids in tokenizer.encode_batch(texts) for row in windows([*before, *ids.tolist()], seq=seq, stride=stride or seq)]


def _sum(losses: Sequence[TextLoss]) -> TextLoss:
    counts = {name: sum(getattr(one, name) for one in losses) for name in ("documents", "tokens", "size")}
    return TextLoss(name="all", **counts, nats=math.fsum(one.nats for one in losses))


def read_path(path: str, *, field: str, as_bytes: bool) -> list[str]:
    """The documents of a file, of all files of a folder or of those that a glob matches. Raises InputError with all problems.

    A line of JSON lines is a document, and so are a row of a Parquet or Arrow file, and any other file as a whole.
    """
    files = Finder().files(path).paths
    problems = [problem for file in files or [Path(path)] for problem in _problems(file)]
    if problems:
        raise InputError([f"command line: --text {path}: {problem}" for problem in problems[:_MAX_PROBLEMS]])
    texts = [text for file in files for text in _documents(file, field, as_bytes)]
    wrong = [text for text in texts if isinstance(text, TextError)]
    problems = [str(text) for text in wrong if text.fields is None][:_MAX_PROBLEMS]
    if missing := [text for text in wrong if text.fields is not None]:
        message, best = missing_field(missing, field, stopped=False)
        problems.append(message if best is None else f"{message}. Add --field {best}")
    if problems:
        raise InputError(problems)
    return [text for text in texts if isinstance(text, str)]


def _kind(file: Path) -> Literal["text", "jsonl", "parquet", "arrow"]:
    suffix = (file.with_suffix("") if is_packed(file) else file).suffix.lower()
    for kind in ("parquet", "arrow"):
        if suffix in SUFFIXES[kind]:
            return kind
    return "jsonl" if suffix in _JSONL else "text"


def _problems(file: Path) -> Iterator[str]:
    kind, is_sound = _kind(file), True
    for _, problem in path_problems(DataConfig(source=kind, path=str(file))):
        is_sound = False
        yield problem
    if is_sound and kind in ("text", "jsonl") and not is_packed(file) and (problem := format_problem(file)):
        yield problem


def _documents(file: Path, field: str, as_bytes: bool) -> Iterator[str | TextError]:
    kind = _kind(file)
    return partial(DOCUMENT_READERS[kind], field=field)(file) if kind in DOCUMENT_READERS else read_file(file, as_bytes=as_bytes)
