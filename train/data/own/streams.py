"""Batches of a user's stream, and the positions from which a run continues with them.

A run divides a stream into as many shards as it had processes at its first step, and each shard has its own rows of every batch: row r of b
belongs to shard r * shards // b. A process reads the shards of the rows that its devices need. So batches do not depend on the processes: a
run that continues on fewer of them reads several shards in each, and on more of them, several processes read the same shard. A function
that returns the whole stream is a stream of one shard, whose samples each process reads, to keep its own rows.

A thread reads ahead. With each batch comes the position of every shard behind it, so that a checkpoint stores the position of its own step,
however far the thread has come. Nothing else of a stream is kept.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jgt.document import InputError

from ...files.json_text import json_value
from ...files.streams import say
from .samples import Sample
from .shard import Shard, ShardPosition, StreamSource

_AHEAD = 4
"""Batches that the thread reads ahead."""
_KEPT = 64
"""Places of the latest batches that are remembered. A run is never so many steps ahead of what it saves."""

_Value = TypeVar("_Value")
_Place = dict[int, ShardPosition]
"""The positions of some shards; one that is not there is at its beginning."""


class Streams:
    """The batches of a stream, in an order that depends on the seed. buffer: see `Shard`. processes: the shards of a new run."""

    def __init__(self, source: StreamSource, *, buffer: int = 0, seed: int = 0, processes: int = 1):
        self._source, self._buffer, self._seed = source, buffer, seed
        self._processes, self._shards = processes, 0
        self._places: dict[int, _Place] = {0: {}}

    def restore(self, samples: int, stored: Sequence[str]) -> None:
        """Sets the place after so many samples. stored: what `stored` returned in each process; none: the stream begins there.

        Raises InputError.
        """
        place: dict[int, ShardPosition] = {}
        shards = 0
        try:
            for values in map(json_value, stored):
                shards = int(values["shards"])
                place |= {int(shard): ShardPosition(**position) for shard, position in values["positions"].items()}
            if sorted(place) != [*range(shards)]:
                raise ValueError(f"of {shards} shards it has {sorted(place)}")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError([f"{self._source.where}: the checkpoint has no place of the stream that can be read: {error}"]) from error
        self._shards, self._places = shards, {samples: place}

    def stored(self, samples: int) -> str:
        """The place after so many samples, which a batch has come to, as a checkpoint stores it."""
        positions = {str(shard): vars(position) for shard, position in self._places[samples].items()}
        return json.dumps({"shards": self._shards, "positions": positions})

    def batches(self, start: int, batch: int, rows: Sequence[int], stack: Callable[[Sequence[Sample]], Sample]) -> Iterator[Sample]:
        """Rows of the batches from the place after `start` samples on, without end. Returns when it is there, and says how long it took.

        Raises SampleError and InputError.
        """
        if self._shards == 0:
            self._shards = math.gcd(self._processes, batch) if self._source.is_sharded else 1
        if self._shards > batch:
            why = f"the run reads its stream in {self._shards} shards, more than the rows of a batch of {batch}. Raise train.batch"
            raise InputError([f"{self._source.where}: {why}"])
        begun, values = time.monotonic(), _ahead(self._read(start, batch, rows, stack))
        read_again, _ = next(values)
        # All processes do the same; one of them says so.
        if read_again and 0 in rows:
            say(f"the stream was read again up to sample {start:,}: {read_again:,} samples in {time.monotonic() - begun:.1f} s")
        return self._with_places(values, start, batch)

    def _with_places(self, values: Iterator[tuple[Sample, _Place]], start: int, batch: int) -> Iterator[Sample]:
        """Batches, whose places are remembered when they are given, and not when they are read."""
        for number, (made, place) in enumerate(values, 1):
            self._places[start + number * batch] = place
            if len(self._places) > _KEPT:
                # All but the one of the checkpoint, from which --replay begins.
                del self._places[list(self._places)[1]]
            yield made

    def _read(
        self, start: int, batch: int, rows: Sequence[int], stack: Callable[[Sequence[Sample]], Sample]
    ) -> Iterator[tuple[Any, _Place]]:
        """First the number of samples that were read again, then batches with the place behind each."""
        base = max(samples for samples in self._places if samples <= start)
        count, shards = self._shards, dict[int, tuple[list[int], Shard]]()
        try:
            for number in sorted({row * count // batch for row in rows}):
                its_rows = [row for row in range(batch) if row * count // batch == number]
                shard = Shard(self._source, number, count, self._places[base].get(number), buffer=self._buffer, seed=self._seed)
                shards[number] = its_rows, shard
                shard.skip((start - base) * len(its_rows) // batch)
            yield sum(shard.read_again for _, shard in shards.values()), {}
            for first in itertools.count(start, batch):
                samples = {row: shard.take() for its_rows, shard in shards.values() for row in its_rows}
                made = stack([self._source.drawn(first + row, samples[row]) for row in rows])
                yield made, {number: shard.position() for number, (_, shard) in shards.items()}
        finally:
            for _, shard in shards.values():
                shard.close()


def _ahead(values: Iterator[_Value]) -> Iterator[_Value]:
    """Values without end, read ahead by one thread. Closing the generator ends the thread, after what it does at this moment."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="stream")
    waiting = deque(pool.submit(next, values) for _ in range(_AHEAD))
    try:
        while True:
            value = waiting.popleft().result()
            waiting.append(pool.submit(next, values))
            yield value
    finally:
        for future in waiting:
            future.cancel()
        pool.shutdown(wait=False)
