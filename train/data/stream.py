"""One sequence of tokens over many files, and the windows of it that training reads.

A `Stream` presents hundreds of token files as one sequence of ids without joining or copying them: one array per file, usually a view of
a memory map, and the position where each file ends. A read copies only the tokens asked for, also across the border of two files.

A `Windows` cuts a stream into the rows of batches. A row of length seq needs seq + 1 tokens: the inputs are the first seq of them, the
targets the last seq. Neighbouring windows share one token; the tokens after the last whole window are not used.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from .mapped import DataChangedError, MappedFile

_SCAN_TOKENS = 1 << 22
"""Tokens that the search for ids outside the vocabulary looks at in one piece: it bounds the memory of the masks."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The tokens of one file: integers [num_tokens], often a view of a memory map. Messages call the file `name`.

    mapped: the file of the memory map; None if the tokens are in memory, where no one else can change them.
    """

    name: str
    tokens: np.ndarray
    mapped: MappedFile | None = None


@dataclass(frozen=True)
class Stream:
    """The tokens of several segments, one segment after the other."""

    segments: tuple[Segment, ...]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @cached_property
    def _ends(self) -> list[int]:
        """The number of tokens up to the end of each segment."""
        return list(accumulate(len(segment.tokens) for segment in self.segments))

    def read(self, start: int, stop: int) -> np.ndarray:
        """Copies the tokens from `start` up to, not including, `stop`: int32 [stop - start].

        Raises DataChangedError if a file that they are in has changed since it was opened.
        """
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        tokens = np.empty(stop - start, np.int32)
        # The first segment that ends after `start`. Empty segments end where the one before them does, so this never picks one.
        filled, index = 0, bisect_right(self._ends, start)
        while filled < len(tokens):
            if (mapped := self.segments[index].mapped) is not None:
                mapped.check()
            segment = self.segments[index].tokens
            first = start + filled - (self._ends[index] - len(segment))
            # A slice ends at the end of its segment; the loop continues with the next one. Assigning converts to int32.
            piece = segment[first : first + len(tokens) - filled]
            tokens[filled : filled + len(piece)] = piece
            filled, index = filled + len(piece), index + 1
        return tokens

    def split(self, position: int) -> tuple[Stream, Stream]:
        """The tokens before `position`, and the tokens from `position` on. Both are views."""
        # Each file is cut at its share of the position: 0 if it lies behind it, its whole length if it lies before it.
        before, after = [], []
        for segment, end in zip(self.segments, self._ends, strict=True):
            border = min(max(position - (end - len(segment.tokens)), 0), len(segment.tokens))
            before.append(replace(segment, tokens=segment.tokens[:border]))
            after.append(replace(segment, tokens=segment.tokens[border:]))
        return Stream(tuple(before)), Stream(tuple(after))

    def name_at(self, position: int) -> str:
        """The name of the file that contains the token at a position."""
        return self.segments[bisect_right(self._ends, position)].name


def with_ends(stream: Stream, end: int) -> Stream:
    """A stream of files with an end-of-text token after each of them."""
    mark = np.array([end], stream.segments[0].tokens.dtype)
    return Stream(tuple(x for file in stream.segments for x in (file, Segment(name=f"the end of {file.name}", tokens=mark))))


def num_windows(num_tokens: int, seq: int) -> int:
    """The number of windows of seq + 1 tokens that fit, when each window starts at the last token of the one before."""
    return max(num_tokens - 1, 0) // seq


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The windows of a stream. Window i contains the tokens i*seq to (i+1)*seq, both included.

    vocab: the number of ids that the model knows. All tokens were below it when the stream was opened.
    """

    stream: Stream
    seq: int
    vocab: int

    def __len__(self) -> int:
        return num_windows(len(self.stream), self.seq)

    def __getitem__(self, index: int) -> np.ndarray:
        """int32 [seq + 1]. Raises DataChangedError if a file has changed since it was opened."""
        start = index * self.seq
        tokens = self.stream.read(start, start + self.seq + 1)
        # As unsigned, a negative id is too large as well.
        if tokens.view(np.uint32).max() >= self.vocab:
            position = start + int(tokens.view(np.uint32).argmax())
            message = f"contains the id {tokens[position - start]}, but had only ids from 0 to {self.vocab - 1} when the run opened it"
            raise DataChangedError(f"{self.stream.name_at(position)}: {message}")
        return tokens


def find_outside(stream: Stream, vocab: int, bits: int | None = None) -> tuple[str, int | None] | None:
    """A message about the first id outside 0 to vocab - 1, and the vocabulary that would do, None if none would. Reads every token.

    bits: those of a token that are its id; None: all of them. None: all ids are inside.
    """
    bounds = [(segment, *_bounds(segment.tokens, vocab, bits)) for segment in stream.segments]
    outside = [(segment, low, high) for segment, low, high in bounds if low < 0 or high >= vocab]
    if not outside:
        return None
    segment = outside[0][0]
    # argmax of booleans is the position of the first True.
    masks = ((start, piece, (piece < 0) | (piece >= vocab)) for start, piece in _pieces(segment.tokens, bits))
    position, found = next((start + (at := int(np.argmax(mask))), piece[at]) for start, piece, mask in masks if mask.any())
    more = f"; {len(outside) - 1} more files have such ids" if len(outside) > 1 else ""
    message = f"{segment.name}: token {position} is {found}, but the vocabulary has {vocab} ids (0 to {vocab - 1}){more}"
    return message, None if any(low < 0 for _, low, _ in outside) else max(high for _, _, high in outside) + 1


def _pieces(tokens: np.ndarray, bits: int | None) -> Iterator[tuple[int, np.ndarray]]:
    pieces = ((start, tokens[start : start + _SCAN_TOKENS]) for start in range(0, len(tokens), _SCAN_TOKENS))
    return ((start, piece if bits is None else piece & bits) for start, piece in pieces)


def _bounds(tokens: np.ndarray, vocab: int, bits: int | None) -> tuple[int, int]:
    """The smallest and the largest id; zeros if no id of this type can be outside: bytes with a vocabulary of 256 need no scan."""
    limits = np.iinfo(tokens.dtype)
    if limits.min >= 0 and limits.max < vocab:
        return 0, 0
    bounds = [(int(piece.min()), int(piece.max())) for _, piece in _pieces(tokens, bits)]
    return min((low for low, _ in bounds), default=0), max((high for _, high in bounds), default=0)
