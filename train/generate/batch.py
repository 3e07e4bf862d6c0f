"""Requests that run together: a row of the batch has one request, and gets the next one when that is done.

    batch = TextBatch(programs, params, variables, rows=8)
    batch.admit(requests[: batch.num_free])         # their first tokens
    while batch.is_busy:
        for token in batch.step(): ...              # one more token of every request

A request ends at its limit, at the end of the model's sequence, or with a token of `ends`; `release` ends it at any time. The cache grows
with the longest text.
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
from .programs import Drawn, TextPrograms


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
        """params, variables: as `programs.placed` returns them. rows: rounded up to what the mesh can split."""
        self._programs, self._arrays = programs, (params, variables)
        count = programs.rows(rows)
        self._rows: list[_Row | None] = [None] * count
        self._slots = programs.caching.slots(1)
        self._steps = 0
        self._state = programs.empty(params, variables, count, self._slots)
        self._settings = draw_settings_of([None] * count)

    @property
    def num_free(self) -> int:
        """The number of requests that can be admitted."""
        return self._rows.count(None)

    @property
    def is_busy(self) -> bool:
        """Whether there are requests."""
        return any(self._rows)

    @property
    def shards(self) -> int:
        """The number of requests that are read together at the cost of one."""
        return self._programs.shards

    def admit(self, requests: Sequence[TextRequest]) -> list[Token]:
        """Reads the texts of requests, at most `num_free`, and draws their first tokens."""
        free = [n for n, row in enumerate(self._rows) if row is None]
        for n, request in zip(free, requests, strict=False):
            assert 0 < len(request.tokens) < self._longest or len(request.tokens) == self._longest == 1
            self._rows[n] = _Row(request)
        self._settings = self._settings_now()
        return self._read(free[: len(requests)]) if requests else []

    def step(self) -> list[Token]:
        """One more token of every request. A text that has to be read again gets two."""
        switches_at = self._programs.caching.switches_at
        switching = [n for n, row in enumerate(self._rows) if row is not None and len(row.tokens) - 1 == switches_at]
        tokens = self._read(switching) if switching else []
        busy = [n for n, row in enumerate(self._rows) if row is not None]
        if not busy:
            return tokens
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

    def _read(self, rows: Sequence[int]) -> list[Token]:
        """Reads the whole texts of rows into the cache, and draws a token of each."""
        texts = [row.tokens for n in rows if (row := self._rows[n]) is not None]
        longest = max(map(len, texts))
        self._make_room(longest)
        shards, caching = self._programs.shards, self._programs.caching
        count = min(shards * power_of_two(-(-len(texts) // shards)), len(self._rows))
        tokens = np.zeros((count, caching.padded(longest)), np.int32)
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
