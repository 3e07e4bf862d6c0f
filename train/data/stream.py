"""The tokens of several files as one sequence, read at random."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

_SCAN_TOKENS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The tokens of one file: integers [num_tokens], often a view of a mapped file. `name` is for messages."""

    name: str
    tokens: np.ndarray


@dataclass(frozen=True)
class Stream:
    """Segments one after the other."""

    segments: tuple[Segment, ...]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(len(segment.tokens) for segment in self.segments))

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop`, int32 [stop - start]."""
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        tokens = np.empty(stop - start, np.int32)
        filled, index = 0, bisect_right(self._ends, start)
        while filled < len(tokens):
            segment = self.segments[index].tokens
            first = start + filled - (self._ends[index] - len(segment))
            piece = segment[first : first + len(tokens) - filled]
            tokens[filled : filled + len(piece)] = piece
            filled, index = filled + len(piece), index + 1
        return tokens

    def split(self, position: int) -> tuple[Stream, Stream]:
        """The tokens before `position` and those from it on, without a copy."""
        before, after = [], []
        for segment, end in zip(self.segments, self._ends, strict=True):
            cut = min(max(position - (end - len(segment.tokens)), 0), len(segment.tokens))
            before.append(Segment(name=segment.name, tokens=segment.tokens[:cut]))
            after.append(Segment(name=segment.name, tokens=segment.tokens[cut:]))
        return Stream(tuple(before)), Stream(tuple(after))


def vocab_problems(stream: Stream, vocab: int) -> Iterator[str]:
    """One message for every file that holds an id outside 0..vocab-1. Reads every token."""
    for segment in stream.segments:
        position = _first_outside(segment.tokens, vocab)
        if position is not None:
            yield (
                f"{segment.name}: token {position} is {segment.tokens[position]}, but the vocabulary has {vocab} ids (0 to {vocab - 1}). "
                f"Raise the vocabulary, or encode the data with a smaller one"
            )


def _first_outside(tokens: np.ndarray, vocab: int) -> int | None:
    limits = np.iinfo(tokens.dtype)
    if limits.min >= 0 and limits.max < vocab:
        return None
    for start in range(0, len(tokens), _SCAN_TOKENS):
        chunk = tokens[start : start + _SCAN_TOKENS]
        if chunk.max() >= vocab or chunk.min() < 0:
            return start + int(np.argmax((chunk >= vocab) | (chunk < 0)))
    return None
