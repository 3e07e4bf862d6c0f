"""Boundaries of the documents in a window, for documents that must not see each other.

A window is a piece of the data of fixed length, and documents are not: it contains the end of one, others, and the beginning of the last.
With `documents: mask` a token attends to its own document only, as if each document were another row. The boundaries are in the data
already: a document ends with its end-of-text token, whichever source it comes from. So a batch can be marked from its tokens alone, one
comparison, wherever the window begins. JSON lines have that token after each line. Plain text gets one after each file (`with_ends`).

Two facts of a batch follow. `segments` [rows, seq] is, for each input, the position in the window at which its document begins: equal
entries are one document, and a token's position in its document is its position less its entry. And a target that begins a document has
weight 0: nothing before it foretells it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jgt.document import InputError

from .config import DataConfig
from .stream import Segment, Stream
from .tokenizer import END_OF_TEXT_NAMES, Tokenizer

_SEARCHED = 1 << 22
"""Tokens in which a token file must have an end of a document. A wrong id would otherwise pass for one long document."""


def end_of_documents(config: DataConfig, tokenizer: Tokenizer, vocab: int) -> int | None:
    """The token that ends a document; None if documents are not masked. Raises InputError."""
    if config.documents == "join":
        return None
    known, tokenizer_name = tokenizer.end_of_text, config.parts()[0].tokenizer
    end = known if config.end_of_text is None else config.end_of_text
    if end is None:
        names = ", ".join(END_OF_TEXT_NAMES)
        raise InputError([f"{tokenizer_name}: no end-of-text token, which ends a document for data.documents: mask. Known names: {names}"])
    if end != known and any(part.source != "tokens" for part in config.parts()):
        message = f"data.end_of_text: {end} ends a document in the token files, but {known} in the text that {tokenizer_name} encodes"
        raise InputError([f"{message}. A mixture needs one id for both"])
    if end >= vocab:
        raise InputError([f"data.end_of_text: {end} is not in the vocabulary of {vocab} ids (0 to {vocab - 1}). Raise model.vocab"])
    return end


def check_ends(config: DataConfig, streams: Sequence[Stream], end: int | None) -> None:
    """Raises InputError if a part's token files never end a document."""
    problems: list[str] = []
    for part, stream in zip(config.parts(), streams, strict=True):
        if end is None or part.source != "tokens":
            continue
        searched = min(len(stream), _SEARCHED)
        if not (stream.read(0, searched) == end).any():
            problems.append(
                f"data.documents: none of the first {searched:,} tokens of {part.label} is {end}, the end of a document. "
                "Give its id as data.end_of_text, or use documents: join"
            )
    if problems:
        raise InputError(problems)


def with_ends(stream: Stream, end: int) -> Stream:
    """A stream of files with an end-of-text token after each of them."""
    mark = np.array([end], stream.segments[0].tokens.dtype)
    return Stream(tuple(x for file in stream.segments for x in (file, Segment(name=f"the end of {file.name}", tokens=mark))))


def masked(batch: dict[str, np.ndarray], end: int) -> dict[str, np.ndarray]:
    """A batch of tokens with `segments`, and without weight on targets that begin a document."""
    is_end, position = batch["inputs"] == end, np.arange(batch["inputs"].shape[1], dtype=np.int32)
    # A document begins after the end of the one before. The window's first token begins one, as far as the window knows.
    begins = np.zeros_like(batch["inputs"])
    begins[:, 1:] = np.where(is_end[:, :-1], position[1:], 0)
    weights = np.where(is_end, np.float32(0), batch["weights"])
    return {**batch, "weights": weights, "segments": np.maximum.accumulate(begins, axis=1)}
