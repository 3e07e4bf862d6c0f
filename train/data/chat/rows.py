"""Conversations in rows: whole ones next to each other, each as if it were alone.

A row of seq + 1 tokens has room for several conversations, and with one of them it would be mostly padding. So conversations are packed:
each goes into the first row that has room for it, among the newest rows, so that millions of them take seconds and neighbours in the files
stay near each other. A conversation attends to itself alone, and its positions count from its beginning (`segments`). The sum of the losses
of a row's targets is then the sum over its conversations.

A row depends on the lengths of all conversations and on nothing else, so it is the same one on every process and after every start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..stream import Stream
from .answers import BEGIN, CUT, ENDLESS, IDS, TRAINED

_OPEN = 1_000
"""The newest rows, which may have room for another conversation."""
_SCAN_TOKENS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class ChatRows:
    """The rows of a stream of conversations. padding: the id behind the last conversation of a row."""

    stream: Stream
    seq: int
    packing: bool
    padding: int

    def __len__(self) -> int:
        return len(self._borders) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        """int32 [seq + 1], with the bits of `answers.py`. Raises DataChangedError if a file has changed since it was opened."""
        row, position = np.full(self.seq + 1, self.padding, np.int32), 0
        for number in self._order[self._borders[index] : self._borders[index + 1]]:
            tokens = self.stream.read(int(self._begins[number]), int(self._begins[number + 1]))
            row[position : position + len(tokens)] = tokens
            position += len(tokens)
        if position <= self.seq:
            row[position] |= BEGIN
        return row

    def describe(self, name: str) -> str:
        """The line of the log about these rows. name: the data, for a person."""
        counts = (sum(int(np.count_nonzero(piece & bit)) for piece in _pieces(self.stream)) for bit in (TRAINED, CUT, ENDLESS))
        trained, cut, endless = counts
        count, size = len(self._begins) - 1, len(self.stream)
        used = f"{count:,} conversations in {len(self):,} rows of {self.seq:,} tokens, {size / (len(self) * (self.seq + 1)):.1%} used"
        cuts = f"; cut at the end, because they are longer: {cut:,}" if cut else ""
        why = "the template's marks leave out the token that ends an answer, so the model does not learn to end it"
        warning = f". In {endless:,} conversations {why}" if endless else ""
        return f"{name}: {used}; {trained / size:.1%} of the tokens are trained{cuts}{warning}"

    @cached_property
    def _begins(self) -> np.ndarray:
        """Where each conversation begins in the stream, and its end."""
        return np.append(begins_of(self.stream), len(self.stream))

    @cached_property
    def _packed(self) -> np.ndarray:
        return packed(np.diff(self._begins), self.seq + 1) if self.packing else np.arange(len(self._begins) - 1)

    @cached_property
    def _order(self) -> np.ndarray:
        """The conversations of row 0, of row 1, and so on."""
        return np.argsort(self._packed, kind="stable")

    @cached_property
    def _borders(self) -> np.ndarray:
        """Where each row begins in `_order`, and its end."""
        return np.concatenate([[0], np.cumsum(np.bincount(self._packed))])


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Every two rows of a stream: the chosen answer to a prompt, and the rejected one. first: the number of the first pair."""

    rows: ChatRows
    first: int = 0

    @property
    def stream(self) -> Stream:
        """The conversations, chosen and rejected in turn."""
        return self.rows.stream

    def __len__(self) -> int:
        return len(self.rows) // 2

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """{inputs, targets, weights: [2, seq], number: []}. Raises DataChangedError if a file has changed since it was opened."""
        both = stack_rows(False, self.rows.seq, [self.rows[2 * index], self.rows[2 * index + 1]])
        return {**both, "number": np.asarray(self.first + index)}

    def describe(self, name: str) -> str:
        """The line of the log about these pairs. name: the data, for a person."""
        return f"{self.rows.describe(name)}. They are {len(self):,} pairs of a chosen and a rejected answer"


def packed(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The row of each conversation, [n]: the first of the newest rows that has room for it, or a new one. No length is above capacity."""
    rows, free, count = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int64), 0
    for number, length in enumerate(lengths):
        oldest = max(count - _OPEN, 0)
        fits = free[oldest:count] >= length
        row = oldest + int(fits.argmax()) if fits.any() else count
        if row == count:
            free[row], count = capacity, count + 1
        free[row] -= length
        rows[number] = row
    return rows


def begins_of(stream: Stream) -> np.ndarray:
    """Where each conversation of a stream begins."""
    offsets = np.cumsum([0, *(len(piece) for piece in _pieces(stream))])
    found = [np.flatnonzero(piece & BEGIN) + offset for piece, offset in zip(_pieces(stream), offsets, strict=False)]
    return np.concatenate([np.zeros(0, np.int64), *found])


def as_row(end: int | None, window: np.ndarray) -> np.ndarray:
    """A window of other tokens, int32 [seq + 1], as a row that is trained whole. end: the token that ends a document, if masked."""
    row = window | TRAINED
    if end is not None:
        row[1:][window[:-1] == end] |= BEGIN
    return row


def stack_rows(has_segments: bool, seq: int, samples: Sequence[Any]) -> dict[str, np.ndarray]:
    """The batch of some rows, int32 [seq + 1] each, with `segments` as in `batches.masked`. None stands for a row of padding."""
    tokens = np.stack([np.zeros(seq + 1, np.int32) if sample is None else np.asarray(sample) for sample in samples])
    begins, ids = tokens & BEGIN != 0, tokens & IDS
    # What begins a conversation follows from nothing before it.
    weights = ((tokens & TRAINED != 0) & ~begins)[:, 1:].astype(np.float32)
    batch = {"inputs": np.ascontiguousarray(ids[:, :-1]), "targets": np.ascontiguousarray(ids[:, 1:]), "weights": weights}
    if has_segments:
        places = np.where(begins[:, :-1], np.arange(seq, dtype=np.int32), 0)
        batch["segments"] = np.maximum.accumulate(places, axis=1)
    return batch


def stack_pairs(seq: int, samples: Sequence[Any]) -> dict[str, np.ndarray]:
    """The batch of some pairs: inputs, targets and weights [b, 2, seq]. None stands for a pair of padding."""
    padding = stack_rows(False, seq, [None, None])
    return {name: np.stack([x if sample is None else sample[name] for sample in samples]) for name, x in padding.items()}


def _pieces(stream: Stream) -> list[np.ndarray]:
    return [s.tokens[first : first + _SCAN_TOKENS] for s in stream.segments for first in range(0, len(s.tokens), _SCAN_TOKENS)]
