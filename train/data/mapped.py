"""A file that stays mapped while a run reads it, and whether it is still the file that the run opened.

Every token is checked when a run starts. Mapped memory shows the file as it is now, though: a tool that writes the file once more also
writes into the run, and a read behind the new end of a file that was cut short kills the process with SIGBUS, which Python cannot catch.

So `check` compares size and modification time, for the price of one `stat`, before each read from the file: nearly all changes end the run
here, before a single wrong token was read. A change may still fall between this look and the copy, or leave no trace in the modification
time. `check_contents` therefore also compares the checksum of some blocks, and the caller calls it before each save. The invariant:
whatever a saved state was trained on was read before a look that found the file unchanged.

A file that was replaced by another one is a change too, because a restart would read the new one. The number of its inode shows this. Some
network file systems give a file a new number now and then; so a new number alone is not believed before the blocks differ.
"""

from __future__ import annotations

import os
import time
import zlib
from pathlib import Path

from ..files.ends import EndError

_BLOCK_BYTES = 4096
_MOST_BLOCKS = 16
_ATTEMPTS = 3
_PAUSE_SECONDS = 0.5


class DataChangedError(EndError):
    """A file of the data is not what it was when the run opened it. The message is `file: what changed`."""


class MappedFile:
    """A file, as it was when it was opened. opened: its state before anything of it was read."""

    def __init__(self, path: Path, opened: os.stat_result):
        self._path = path
        self._opened, self._inode = opened, _inode(opened)
        self._checksum = self._checksum_now()

    def check(self) -> None:
        """Raises DataChangedError if the file's size, modification time or inode shows that it changed."""
        try:
            state = self._path.stat()
        except OSError as error:
            state = self._state_later(error)
        opened = self._opened
        if state.st_size == opened.st_size and state.st_mtime_ns == opened.st_mtime_ns and _inode(state) == self._inode:
            return
        if state.st_size != opened.st_size:
            raise DataChangedError(f"{self._path}: has {state.st_size:,} bytes, but had {opened.st_size:,} when the run opened it")
        if state.st_mtime_ns != opened.st_mtime_ns:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.st_mtime))
            raise DataChangedError(f"{self._path}: was written after the run opened it (modified at {when})")
        if self._checksum_now() != self._checksum:
            raise DataChangedError(f"{self._path}: was replaced by a file with other contents after the run opened it")
        self._inode = _inode(state)

    def check_contents(self) -> None:
        """As `check`, and also compares some blocks of the contents."""
        self.check()
        if self._checksum_now() != self._checksum:
            raise DataChangedError(f"{self._path}: its contents changed after the run opened it, though its modification time did not")

    def _checksum_now(self) -> int:
        """The checksum of some blocks of the file that the path leads to: evenly spread, the first and the last one included."""
        size = self._opened.st_size
        last, count = max(size - _BLOCK_BYTES, 0), min(_MOST_BLOCKS, -(-size // _BLOCK_BYTES))
        checksum = 0
        with self._path.open("rb") as file:
            for i in range(count):
                file.seek(last * i // max(count - 1, 1))
                checksum = zlib.crc32(file.read(_BLOCK_BYTES), checksum)
        return checksum

    def _state_later(self, error: OSError) -> os.stat_result:
        """A failed look is not a change: a file server may be busy, or a tool may be replacing the file at this moment."""
        for _ in range(_ATTEMPTS):
            time.sleep(_PAUSE_SECONDS)
            try:
                return self._path.stat()
            except OSError as again:
                error = again
        raise DataChangedError(f"{self._path}: can no longer be read: {error.strerror or error}")


def _inode(state: os.stat_result) -> tuple[int, int]:
    return state.st_dev, state.st_ino
