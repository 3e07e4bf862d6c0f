"""Sinks: the places where a run writes about itself (metrics, events, TensorBoard, the screen), none of which may end or delay it.

Disks fill up, quotas end, the reader of a pipe dies, a terminal is stopped. For a checkpoint that is a failed save; for a line of a log it
is a lost line, and training is worth more than the line. So everything that a run writes about itself goes through `Sink.put`, which never
raises: the first failure of a sink is said on stderr, lost records are counted, and each later record is a new attempt. The run's exit code
at its end shows that records were lost (`train.files.ends.Exit`).

`AppendedFile` writes whole records: what a failed write left of a record is cut off again, at once or before the next record, so a file
stays readable wherever its disk filled up. The invariant: `put` returns, within `PATIENCE_SECONDS` and a write to a disk, whatever happens.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..files.json_text import LONGEST_LINE, json_value
from ..files.streams import StandardStream, say, write_all


class Sink:
    """A place to which records go, or are lost. name: for messages. write: writes a record, or raises OSError or ValueError."""

    def __init__(self, name: str, write: Callable[[Any], object]):
        self.name, self._write = name, write
        self.lost = 0
        """The number of records that could not be written."""

    def put(self, record: object) -> None:
        """Writes a record if that is possible."""
        self.attempt(lambda: self._write(record))

    def attempt(self, write: Callable[[], object]) -> None:
        """Calls `write`. If it raises OSError or ValueError, a record is lost."""
        try:
            write()
        except (OSError, ValueError) as error:
            self.lost += 1
            if self.lost == 1:
                # The system's words for an error, without the number and the path.
                why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
                say(f"{self.name} cannot be written: {why}. Training continues, and tries again with each record")


def describe_lost(lost: Mapping[str, int]) -> str:
    """`lost: 3 records of metrics.jsonl, 1 record of stdout`."""
    return "lost: " + ", ".join(f"{count:,} record{'' if count == 1 else 's'} of {name}" for name, count in lost.items())


class AppendedFile:
    """A file that grows by whole records, and has no other writer. is_text: its records are lines."""

    def __init__(self, path: Path, *, is_text: bool = True):
        self._path = path
        self._whole: int | None = None
        """The size that the file had before a failed write; None if the last write succeeded."""
        self._is_checked = not is_text
        # A save is noted by the thread that has written it, and the end of a process by its watch.
        self._lock = threading.Lock()

    def write(self, record: bytes) -> None:
        """Appends a record, or nothing. Raises OSError."""
        with self._lock:
            self._append(record)

    def _append(self, record: bytes) -> None:
        # Opened and closed each time: the record is with the system at once, and the file may be moved away meanwhile.
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_APPEND, 0o666)
        try:
            self._repair(descriptor)
            self._whole = os.fstat(descriptor).st_size
            write_all(descriptor, record)
            self._whole = None
        except OSError as error:
            self._repair(descriptor)
            error.filename = str(self._path)
            raise
        finally:
            os.close(descriptor)

    def _repair(self, descriptor: int) -> None:
        """Cuts off what a failed write left. If that fails too, the next record tries again."""
        if not self._is_checked:
            # A process that was killed, or whose disk was full, may have left the last line open.
            _end_last_line(descriptor)
            self._is_checked = True
        if self._whole is not None:
            with contextlib.suppress(OSError):
                # A file that someone has shortened or replaced must not grow by zeros.
                if os.fstat(descriptor).st_size > self._whole:
                    os.ftruncate(descriptor, self._whole)
                self._whole = None


class Stdout(io.TextIOBase):
    """stdout as a text file of which no write fails. sink: counts what was lost."""

    def __init__(self) -> None:
        self._stream = sys.stdout
        self.sink = Sink("stdout", StandardStream(lambda: self._stream).write)

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The stream's encoding."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str, /) -> int:
        """Writes text."""
        self.sink.put(text)
        return len(text)

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        with contextlib.suppress(OSError, ValueError):
            return self._stream is not None and self._stream.isatty()
        return False

    def fileno(self) -> int:
        """The stream's descriptor."""
        return self._stream.fileno()


def _end_last_line(descriptor: int) -> None:
    """Ends the last line of a file if it is open: whole JSON gets its newline, and half of a line is cut off."""
    size = os.fstat(descriptor).st_size
    begin = max(0, size - LONGEST_LINE)
    tail = os.pread(descriptor, size - begin, begin)
    if not tail or tail.endswith(b"\n"):
        return
    last = tail[tail.rfind(b"\n") + 1 :]
    try:
        json_value(last)
    except ValueError:
        os.ftruncate(descriptor, size - len(last))
    else:
        write_all(descriptor, b"\n")
