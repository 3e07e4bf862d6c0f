"""Writing a state into a folder, by Orbax: its arrays, and what each process stores about its data. As `uploads.py` does for a bucket.

Orbax's writes contain collectives, so all processes make the same calls in the same order. A save that fails leaves a writer behind whose
state is unknown, so the next one has a new writer.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from jgt import amount

from ..files.disk import write_whole
from ..step.state import State
from .contents import file_entries
from .listing import Manifest
from .restore import ARRAYS
from .saved import DATA
from .steps import Steps

_CHUNK_BYTES = 1 << 24
"""A shard is stored in parts of this size, so that whoever reads a part of an array (`pieces.py`) needs little memory."""
_ROOM = 1.1
"""Free space that a save needs, as a multiple of its arrays: Orbax adds metadata, and blocks of files are rounded up."""


class FilesWriter:
    """Writes the steps of a folder. free(folder): bytes free on its disk. sha256: whether the manifest has a SHA-256 of each file."""

    def __init__(self, steps: Steps, free: Callable[[Path], int], *, sha256: bool):
        self._steps, self._free, self._sha256 = steps, free, sha256
        self._writer = _make_writer()

    def space_problem(self, state: State) -> OSError | None:
        """Why this process's part of a save does not fit on the disk; None if it does."""
        # A replicated shard is written once, by the device that has replica 0.
        needed = _ROOM * sum(shard.data.nbytes for x in jax.tree.leaves(state) for shard in x.addressable_shards if shard.replica_id == 0)
        folder = self._steps.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            free = self._free(folder)
        except OSError as error:
            return error
        return None if free >= needed else OSError(f"{amount(needed, 'B')} are needed in {folder}, but {amount(free, 'B')} are free")

    def data_problem(self, step: int, data: str | None) -> OSError | None:
        """Writes what this process stores about its data. Returns why that failed."""
        if data is None:
            return None
        path = self._steps.saving(step) / DATA / f"{jax.process_index()}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, data)
        except OSError as error:
            return error
        return None

    def begin(self, arrays: Mapping[str, object], step: int) -> None:
        """Begins to write arrays, and returns when they are copied."""
        chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), dict(arrays))
        # `force` replaces a folder of this name, which a save that was interrupted may have left.
        self._writer.save(self._steps.saving(step) / ARRAYS, args=ocp.args.PyTreeSave(dict(arrays), save_args=chunks), force=True)

    def wait(self) -> None:
        """Returns when every process has written its shards."""
        self._writer.wait_until_finished()

    def finish(self, listing: Manifest) -> None:
        """Commits a written step: writes its manifest, then renames it. For the first process."""
        self._steps.finish(replace(listing, files=file_entries(self._steps.saving(listing.step), sha256=self._sha256)))

    def tidy(self) -> None:
        """Nothing: the first process removes the folder of a step as a whole."""

    def restart(self) -> None:
        """Begins anew after a save that failed."""
        # The old writer raises the failure of its save once more when it is closed.
        with contextlib.suppress(Exception):
            self._writer.close()
        self._writer = _make_writer()

    def close(self) -> None:
        """Ends the writer, which has nothing under way."""
        self._writer.close()


def _is_not_orbax(record: logging.LogRecord) -> bool:
    return not Path(record.pathname).is_relative_to(Path(ocp.__file__).parent)


def _make_writer() -> ocp.AsyncCheckpointer:
    # When a save fails, Orbax logs hundreds of lines, and leaves one asyncio task behind for each array, for which asyncio prints a
    # traceback. SaveError says it once. Logging is changed here, where the first writer is made, and not by an import of this file.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    logging.getLogger("absl").addFilter(_is_not_orbax)
    # Orbax lets each device that has a copy of an array write a part of it, which it cuts with a program that is compiled for each shape,
    # while training waits. Arrays that are written in one part anyway are not worth it.
    handler = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=_CHUNK_BYTES)
    types = ocp.type_handlers.create_type_handler_registry((jax.Array, handler))
    return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=types), timeout_secs=600)
