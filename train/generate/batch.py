"""Requests that run together: a row of the batch has one request, and gets the next one when that is done.

    batch = TextBatch(programs, params, variables, rows=8)
    batch.admit(requests[: batch.num_free])         # their first tokens
    while batch.is_busy:
        for token in batch.step(): ...              # one more token of every request

A request ends at its limit, at the end of the model's sequence, or with a token of `ends`; `release` ends it at any time. The cache grows
with the longest text and with the number of requests: a step computes as many rows as are in use, rounded up to a power of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np

from ..settings.sampling import Sampling
from ..step.state import Tree
from .caching import power_of_two
from .draw import DrawSettings
from .programs import Drawn, TextPrograms, TextState

_MOST_READ = 2048
"""The tokens of texts that are read together, between two tokens of the texts that are being written. A single text may be longer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TextRequest:
    """A text to continue. tokens: at least one. limit: the most new tokens. seed, number: those of its draws.

    ends: tokens that end the text. stop: texts that end it, which a TextWriter finds.
    """

    tokens: Sequence[int]
    limit: int
    sampling: Sampling
    seed: int = 0
    number: int = 0
    ends: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()


class Token(NamedTuple):
    """A new token of a request, and the logarithm of its probability. reason: why it is the last one; None if it is not."""

    request: TextRequest
    token: int
    log: float
    reason: str | None


@dataclass
class _Row:
    request: TextRequest
    written: list[int] = field(default_factory=list[int])

    @property
    def tokens(self) -> list[int]:
        return [*self.request.tokens, *self.written]


class TextBatch:
    """Requests that run together on one mesh. All processes of a run make the same calls."""

    def __init__(self, programs: TextPrograms, params: Tree, variables: Tree, *, rows: int):
        """params, variables: as `programs.placed` returns them. rows: the most, rounded up to what the mesh can split."""
        self._programs, self._arrays = programs, (params, variables)
        self._most = programs.rows(rows)
        self._rows: list[_Row | None] = []
        self._slots = programs.caching.slots(1)
        self._steps = 0
        # Of the first request, which says how many rows there are.
        self._state: TextState
        self._settings = self._settings_now()

    @property
    def num_free(self) -> int:
        """The number of requests that can be admitted."""
        return self._most - self._num_busy

    @property
    def is_busy(self) -> bool:
        """Whether there are requests."""
        return any(self._rows)

    def joining(self, waiting: Sequence[TextRequest]) -> list[TextRequest]:
        """Picks the waiting requests to admit next: of as many as there are free rows, the first and others of about its length."""
        lengths = [(request, self._programs.caching.padded(len(request.tokens))) for request in waiting[: self.num_free]]
        alike = [request for request, length in lengths if length == lengths[0][1]]
        return alike[: max(_MOST_READ // lengths[0][1], self._shards)] if alike else []

    def admit(self, requests: Sequence[TextRequest]) -> list[Token]:
        """Reads the texts of requests, at most `num_free`, and draws their first tokens."""
        if not requests:
            return []
        if (needed := self._rows_for(self._num_busy + len(requests))) > len(self._rows):
            self._move(needed)
        free = [n for n, row in enumerate(self._rows) if row is None]
        for n, request in zip(free, requests, strict=False):
            assert 0 < len(request.tokens) < self._longest or len(request.tokens) == self._longest == 1
            self._rows[n] = _Row(request)
        self._settings = self._settings_now()
        return self._read(free[: len(requests)])

    def step(self) -> list[Token]:
        """One more token of every request. A text that has to be read again gets two."""
        switches_at = self._programs.caching.switches_at
        switching = [n for n, row in enumerate(self._rows) if row is not None and len(row.tokens) - 1 == switches_at]
        tokens = self._read(switching) if switching else []
        if not self.is_busy:
            return tokens
        # Rather late than often: each number of rows has a program, and moving them costs about a step.
        if (needed := self._rows_for(self._num_busy)) <= len(self._rows) // 4:
            self._move(needed)
        busy = [n for n, row in enumerate(self._rows) if row is not None]
        self._make_room(max(len(row.tokens) for row in self._rows if row is not None))
        self._state, drawn = self._programs.write(*self._arrays, self._state, self._settings)
        self._steps += 1
        return [*tokens, *self._drawn(busy, drawn)]

    def release(self, request: TextRequest) -> None:
        """Ends a request, if it has not ended."""
        for n, row in enumerate(self._rows):
            if row is not None and row.request is request:
                self._rows[n] = None
                self._settings = self._settings_now()

    @property
    def _longest(self) -> int:
        return self._programs.caching.longest

    @property
    def _shards(self) -> int:
        return self._programs.shards

    @property
    def _num_busy(self) -> int:
        return len(self._rows) - self._rows.count(None)

    def _rows_for(self, count: int) -> int:
        """The number of rows that are computed for this many requests."""
        return min(self._shards * power_of_two(-(-count // self._shards)), self._most)

    def _move(self, count: int) -> None:
        """Moves the requests to a state of this many rows."""
        kept = [n for n, row in enumerate(self._rows) if row is not None]
        if self._rows:
            index = np.array([*kept, *[0] * (count - len(kept))], np.int32)
            self._state = self._programs.move(self._state, index)
        else:
            self._state = self._programs.empty(*self._arrays, count, self._slots)
        self._rows = [*(self._rows[n] for n in kept), *[None] * (count - len(kept))]
        self._settings = self._settings_now()

    def _read(self, rows: Sequence[int]) -> list[Token]:
        """Reads the whole texts of rows into the cache, and draws a token of each."""
        texts = [row.tokens for n in rows if (row := self._rows[n]) is not None]
        longest = max(map(len, texts))
        self._make_room(longest)
        count = self._rows_for(len(texts))
        tokens = np.zeros((count, self._programs.caching.padded(longest)), np.int32)
        lengths, index = np.ones(count, np.int32), np.full(len(self._rows), -1, np.int32)
        for n, (row, text) in enumerate(zip(rows, texts, strict=True)):
            tokens[n, : len(text)], lengths[n], index[row] = text, len(text), n
        logits, cache = self._programs.read(*self._arrays, tokens, lengths, np.int32(self._steps), self._slots)
        self._state, drawn = self._programs.enter(self._state, cache, logits, tokens, lengths, index, self._settings)
        return self._drawn(rows, drawn)

    def _make_room(self, tokens: int) -> None:
        """Lets the cache grow until it has this many slots."""
        if tokens > self._slots:
            self._slots = self._programs.caching.slots(tokens)
            self._state = self._programs.grow(self._state, self._slots)

    def _drawn(self, rows: Sequence[int], drawn: Drawn) -> list[Token]:
        ids, logs = jax.device_get(drawn)
        made: list[Token] = []
        for n in rows:
            row = self._rows[n]
            assert row is not None
            row.written.append(int(ids[n]))
            made.append(Token(row.request, int(ids[n]), float(logs[n]), self._reason(row)))
        if any(token.reason for token in made):
            ended = {id(token.request) for token in made if token.reason}
            self._rows = [None if row is not None and id(row.request) in ended else row for row in self._rows]
            self._settings = self._settings_now()
        return made

    def _reason(self, row: _Row) -> str | None:
        if row.written[-1] in row.request.ends:
            return "stop"
        is_full = len(row.written) >= row.request.limit or len(row.tokens) >= self._longest
        return "length" if is_full else None

    def _settings_now(self) -> DrawSettings:
        return draw_settings_of([None if row is None else row.request for row in self._rows])


def draw_settings_of(requests: Sequence[TextRequest | None]) -> DrawSettings:
    """The settings of the rows of a batch. None: a row without a request."""
    default = Sampling()

    def floats(name: str) -> np.ndarray:
        return np.array([getattr(default if one is None else one.sampling, name) for one in requests], np.float32)

    def words(name: str) -> np.ndarray:
        return np.array([0 if one is None else getattr(one, name) for one in requests], np.uint32)

    return DrawSettings(
        temperature=floats("temperature") * np.array([one is not None for one in requests], np.float32),
        top_k=floats("top_k").astype(np.int32),
        top_p=floats("top_p"),
        min_p=floats("min_p"),
        penalty=floats("repetition_penalty"),
        seed=words("seed"),
        number=words("number"),
        is_live=np.array([one is not None for one in requests]),
    )
