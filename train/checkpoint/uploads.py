"""Writing a state into a bucket: its arrays in pieces, and what each process stores about its data. As `files.py` does for a folder.

Training waits only while the shards are copied to the host, as with Orbax. Then each process writes the pieces of its own shards, a few at
a time, so that memory is the copy and a few pieces. A shard that several devices have is written by the one with replica 0.

A process that fails must free the others. So all meet after their writes, in JAX's coordination service because training goes on meanwhile,
tell each other what failed, and wait for a bounded time. Only then the first process creates the manifest.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jgt import path_text

from ..processes.processes import failure_of_any, number_of_first_process
from ..step.state import State
from .bucket_steps import BucketSteps, piece_grid, piece_name, seal
from .listing import FileEntry, Manifest, ObjectsEntry
from .objects import piece_shape
from .saved import DATA

_THREADS = 8
_MEET_SECONDS = 600.0
"""As long as Orbax waits."""


class ObjectsWriter:
    """Writes the steps of a bucket."""

    def __init__(self, steps: BucketSteps):
        self._steps = steps
        # A folder for each save: what is left of a killed or failed one is never written to again.
        self._start, self._saves = number_of_first_process(secrets.randbits(31)), 0
        self._folder, self._data = "", None
        self._next = threading.Lock()
        self._written: dict[str, tuple[int, list[str]]] = {}
        """By the folder of a save, its step and the objects that this process has written."""
        steps.start = f"{self._start:x}"
        self._shapes: tuple[tuple[int, ...], ...] = ()
        self._shards: list[tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]] = []

    def space_problem(self, state: State) -> OSError | None:
        """None: a store has no free space to ask for. A quota is an error of a write."""
        return None

    def data_problem(self, step: int, data: str | None) -> OSError | None:
        """Keeps what this process stores about its data, until the arrays are written."""
        self._data = data
        return None

    def begin(self, arrays: Mapping[str, object], step: int) -> None:
        """Returns when the arrays are copied."""
        self._folder, self._saves = f"{step}-{self._start:x}-{self._saves}", self._saves + 1
        self._written[self._folder] = step, []
        leaves = jax.tree.leaves_with_path(dict(arrays))
        own = [(path_text(path), shard) for path, x in leaves for shard in x.addressable_shards if shard.replica_id == 0]
        for _, shard in own:
            shard.data.copy_to_host_async()
        pieces = {path_text(path): piece_shape(x.shape, x.sharding.shard_shape(x.shape), x.dtype.itemsize) for path, x in leaves}
        self._shapes = tuple(pieces.values())
        self._shards = [(path, pieces[path], tuple(part.start or 0 for part in shard.index), _on_host(shard.data)) for path, shard in own]

    def wait(self) -> None:
        """Writes this process's shards, and returns when every process has. Raises OSError, on all processes, if one has failed."""
        failure = None
        try:
            # A piece is made when a thread is free to write it.
            with ThreadPoolExecutor(_THREADS) as pool:
                writes = itertools.chain(self._pieces(), self._files())
                running = [pool.submit(self._write_all, writes) for _ in range(_THREADS)]
                for future in running:
                    future.result()
        except OSError as error:
            failure = error
        self._shards = []
        text = None if failure is None else f"{failure.filename}: {failure.strerror}"
        if (why := failure_of_any(f"save/{self._folder}", text, _MEET_SECONDS)) is not None:
            raise failure or OSError(why)

    def finish(self, listing: Manifest) -> None:
        """Creates the manifest of a step that is written. For the first process."""
        files = () if self._data is None else [f"{DATA}/{process}.json" for process in range(jax.process_count())]
        # The objects have checksums of their own.
        entries = tuple(FileEntry(path=path, size=0, crc32=0) for path in files)
        self._steps.finish(replace(listing, files=entries, objects=ObjectsEntry(folder=self._folder, pieces=self._shapes, time=0.0)))

    def tidy(self) -> None:
        """Removes this process's objects of steps that are not listed any more: for the first process alone they would be too many.

        Another process than the first one finds that a step is gone when it saves the next one, or at the end. What cannot be removed is
        tried again then, and by the next start.
        """
        with contextlib.suppress(OSError):
            # The first process may not have listed the newest one yet.
            old = self._written.keys() - {self._folder}
            listed = self._steps.listed() if old else []
            for folder in [folder for folder in old if self._written[folder][0] not in listed]:
                self._steps.bucket.remove(self._written[folder][1])
                del self._written[folder]

    def restart(self) -> None:
        """Begins anew after a save that failed."""
        self._shards = []

    def close(self) -> None:
        """Ends the writer, which has nothing under way."""
        self.tidy()

    def _write_all(self, writes: Iterator[tuple[str, bytes | np.ndarray]]) -> None:
        while True:
            with self._next:
                found = next(writes, None)
            if found is None:
                return
            name, content = found
            self._written[self._folder][1].append(name)
            view: Any = content if isinstance(content, bytes) else np.ascontiguousarray(content).reshape(-1).view(np.uint8)
            self._steps.bucket.write(name, seal(name, memoryview(view)))

    def _pieces(self) -> Iterator[tuple[str, np.ndarray]]:
        for path, piece, begin, shard in self._shards:
            first = [at // size for at, size in zip(begin, piece, strict=True)]
            for index in piece_grid(shard.shape, piece):
                part = tuple(slice(n * size, (n + 1) * size) for n, size in zip(index, piece, strict=True))
                place = [a + b for a, b in zip(first, index, strict=True)]
                yield piece_name(self._folder, path, place), shard[part]

    def _files(self) -> Iterator[tuple[str, bytes]]:
        if self._data is not None:
            yield f"data/{self._folder}/{DATA}/{jax.process_index()}.json", self._data.encode()


def _on_host(x: jax.Array) -> np.ndarray:
    """The values of an array, which stay when a step takes its memory.

    On CPUs they are a view: XLA leaves such memory alone, and gives the step a copy. Moments in the host's memory would be a view beside
    accelerators too, where XLA may refuse the step.
    """
    return np.array(x) if x.sharding.memory_kind == "pinned_host" else np.asarray(x)
