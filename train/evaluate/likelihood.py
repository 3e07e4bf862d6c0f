"""Scores of rows of tokens: how likely a model finds the last tokens of each, and whether it would have chosen them itself.

    scorer = Scorer(loaded)
    for index, score in scorer.scores([Row(tokens=[5, 3, 8, 1], first=2)]):
        ...                                     # -log p(8 | 5 3) - log p(1 | 5 3 8)

Rows are computed longest first, in batches of one number of rows, whose length is rounded up to a power of two. So few programs are
compiled, and a batch that does not fit the memory is the first. What follows a row's end in its batch is not scored, and a causal model
does not see it.
"""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jgt
from jgt.document import InputError

from ..data.tokenizer import Tokenizer
from ..files.streams import say
from ..generate.loaded import Loaded
from ..models.tables import scores
from ..setup import Setup
from ..step.loss import by_chunks, cross_entropy, num_chunks
from ..step.objective import Arrays
from ..step.state import Tree

ROWS = 16
"""The rows of a batch, unless the user says how many."""
_SHORTEST = 32
_REPORT_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """The tokens of a row, of which those from position `first` on are scored, each given all before it. first: at least 1."""

    tokens: Sequence[int]
    first: int


class Score(NamedTuple):
    """nats: the sum of -log p of a row's scored tokens. is_greedy: whether each of them is the likeliest one."""

    nats: float
    is_greedy: bool


def windows(tokens: Sequence[int], *, seq: int, stride: int) -> Iterator[Row]:
    """Rows of at most seq + 1 tokens that score each token but the first once.

    Each row scores `stride` tokens, after the first row, which scores `seq`; and so does the last one if there are as many. All tokens
    that fit are its context.
    """
    scored = 1
    while scored < len(tokens):
        end = min(scored + (seq if scored == 1 else stride), len(tokens))
        begin = max(end - seq - 1, 0)
        yield Row(tokens=tokens[begin:end], first=scored - begin)
        scored = end


def prefix_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token before a text, as in lm-evaluation-harness: the first of a text, or else the end of another. Empty if it has neither."""
    special = tokenizer.special
    return (*special.beginning, *(token for token in (special.first, special.end_of_text) if token is not None))[:1]


class Scorer:
    """Scores rows with a model. rows: the rows of a batch, rounded up to what the rules can split."""

    def __init__(self, loaded: Loaded, rows: int = ROWS):
        self.loaded, run, mesh = loaded, loaded.setup.run, loaded.setup.mesh
        # The rules may split a batch's rows, and its sequence.
        shards, self._multiple = (math.prod(mesh.shape.get(axis, 1) for axis in axes) for axes in run.batch_dims)
        self.rows = -(-rows // shards) * shards
        self._compiled = score_program(loaded.setup, self._multiple)

    def of(self, loaded: Loaded) -> Scorer:
        """This scorer, with its programs, of a model of the same setup."""
        other = copy.copy(self)
        other.loaded = loaded
        return other

    def scores(self, rows: Sequence[Row], *, what: str = "rows") -> Iterator[tuple[int, Score]]:
        """The index and the score of each row, as soon as its batch is computed. Reports on stderr how many there are. what: the rows.

        Raises InputError for a token that the model does not have: JAX would read another one in its place.
        """
        highest = max((max(row.tokens) for row in rows), default=0)
        if highest >= self.loaded.config.vocab:
            why = f"the text has the token {highest}, but the model has only {self.loaded.config.vocab}. Its tokenizer is another one"
            raise InputError([why])
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i].tokens))
        batches = [order[start : start + self.rows] for start in range(0, len(order), self.rows)]
        last = time.monotonic()
        # One batch ahead, so that the devices do not wait for the host.
        waiting = [(batch, self._dispatch([rows[i] for i in batch])) for batch in batches[:1]]
        for number, batch in enumerate(batches, 1):
            if number < len(batches):
                waiting.append((batches[number], self._dispatch([rows[i] for i in batches[number]])))
            nats, is_greedy = jax.device_get(waiting.pop(0)[1])
            yield from ((i, Score(float(nats[j]), bool(is_greedy[j]))) for j, i in enumerate(batch))
            if time.monotonic() - last > _REPORT_SECONDS:
                last = time.monotonic()
                say(f"{min(number * self.rows, len(rows)):,} of {len(rows):,} {what}")

    def sums(self, groups: Sequence[Sequence[Row]], *, what: str) -> Iterator[tuple[int, float]]:
        """The index and the nats of each group of rows, once all of them are computed."""
        owners = [index for index, rows in enumerate(groups) for _ in rows]
        found: list[list[float]] = [[] for _ in groups]
        yield from ((index, 0.0) for index, rows in enumerate(groups) if not rows)
        for row, score in self.scores([row for rows in groups for row in rows], what=what):
            index = owners[row]
            found[index].append(score.nats)
            if len(found[index]) == len(groups[index]):
                # A sum that does not depend on the order.
                yield index, math.fsum(found[index])

    def _dispatch(self, rows: Sequence[Row]) -> tuple[jax.Array, jax.Array]:
        length = self._length(max(len(row.tokens) for row in rows) - 1)
        tokens, is_scored = np.zeros((self.rows, length + 1), np.int32), np.zeros((self.rows, length), bool)
        for i, row in enumerate(rows):
            tokens[i, : len(row.tokens)] = row.tokens
            is_scored[i, row.first - 1 : len(row.tokens) - 1] = True
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": is_scored.astype(np.float32)}
        return self._compiled(self.loaded.params, self.loaded.variables, batch)

    def _length(self, count: int) -> int:
        """The length of a batch for so many inputs."""
        rounded = max(_SHORTEST, 1 << (count - 1).bit_length())
        return min(-(-rounded // self._multiple) * self._multiple, self.loaded.config.seq)


def score_program(setup: Setup, multiple: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """(params, variables, batch) → nats [b] and is_greedy [b]. multiple: the parts of a sequence, by the rules."""
    model, mesh, config = setup.program.model, setup.mesh, setup.run.config.model

    def score(params: Tree, variables: Tree, batch: Arrays) -> tuple[jax.Array, jax.Array]:
        rows, seq = batch["inputs"].shape
        chunks = num_chunks(rows, seq, config.vocab, mesh.size, local_seq=max(seq // multiple, 1))
        use = functools.partial(_of_tokens, batch=batch, chunks=chunks if model.has_features else 1, softcap=config.logits_softcap)
        nats, is_best = model.run(use, params, variables, False)[0]
        weights = batch["weights"]
        return jnp.sum(weights * nats, 1), jnp.all(is_best | (weights == 0), 1)

    storage = setup.storage
    rules = storage.model.rules.for_rows("plain")
    sharded = jgt.shard(score, rules, mesh, state="variables", partial=True, pad=bool(storage.padded))
    return jax.jit(sharded, out_shardings=storage.model.replicated())


def _of_tokens(module: Any, batch: Arrays, chunks: int, softcap: float | None) -> tuple[jax.Array, jax.Array]:
    """-log p of each target [b, s], and whether it is the likeliest token."""

    def of_logits(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        return cross_entropy(logits, targets), jnp.argmax(logits, axis=-1) == targets

    if not hasattr(module, "features"):
        return of_logits(module(batch["inputs"]).astype(jnp.float32), batch["targets"])
    x, table = module.features(batch["inputs"])
    return by_chunks(lambda chunk: of_logits(scores(chunk[0], table, softcap), chunk[1]), (x, batch["targets"]), chunks)
