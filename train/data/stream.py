"""One sequence of tokens over many files, and the windows of it that training reads.

A data set is often hundreds of token files that together exceed the host's memory. A `Stream` presents them as one sequence
of ids without joining or copying them: it stores one array per file, usually a view of a memory map, and the position where
each file ends. A read copies only the tokens asked for, also across the border of two files. Splitting a stream makes two
sets of views.

A `Windows` cuts a stream into the rows of batches. A row of length seq needs seq + 1 tokens: the inputs are the first seq of
them, the targets the last seq. Neighbouring windows share one token, so every token except the first is a target exactly
once; the tokens after the last whole window are not used.
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
        """For each segment, the number of tokens up to its end."""
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


@dataclass(frozen=True, kw_only=True)
class Outside:
    """The ids of a stream outside of a vocabulary. message: the first of them; needed: the vocabulary that would do, None if none would."""

    message: str
    needed: int | None


def find_outside(stream: Stream, vocab: int) -> Outside | None:
    """The ids outside 0 to vocab - 1. Reads every token."""
    found = [(segment, at) for segment in stream.segments if (at := _first_outside(segment.tokens, vocab)) is not None]
    if not found:
        return None
    segment, position = found[0]
    more = f"; {len(found) - 1} more files have such ids" if len(found) > 1 else ""
    first = f"{segment.name}: token {position} is {segment.tokens[position]}"
    message = f"{first}, but the vocabulary has {vocab} ids (0 to {vocab - 1}){more}"
    pieces = [piece for segment, _ in found for piece in _pieces(segment.tokens)]
    is_negative = any(int(piece.min()) < 0 for piece in pieces)
    return Outside(message=message, needed=None if is_negative else max(int(piece.max()) for piece in pieces) + 1)


def _pieces(tokens: np.ndarray) -> Iterator[np.ndarray]:
    return (tokens[start : start + _SCAN_TOKENS] for start in range(0, len(tokens), _SCAN_TOKENS))


def _first_outside(tokens: np.ndarray, vocab: int) -> int | None:
    limits = np.iinfo(tokens.dtype)
    # No id of this type can be outside: bytes with a vocabulary of 256 need no scan.
    if limits.min >= 0 and limits.max < vocab:
        return None
    for start in range(0, len(tokens), _SCAN_TOKENS):
        chunk = tokens[start : start + _SCAN_TOKENS]
        if chunk.max() >= vocab or chunk.min() < 0:
            # argmax of booleans is the position of the first True.
            return start + int(np.argmax((chunk >= vocab) | (chunk < 0)))
    return None
