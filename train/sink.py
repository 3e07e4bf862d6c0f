"""Sinks: the places where a run writes about itself (metrics, events, TensorBoard, the screen), none of which may end or delay it.

Disks fill up, quotas end, the reader of a pipe dies, a terminal is stopped. For a checkpoint that is a failed save; for a line of a log it
is a lost line, and training is worth more than the line. So everything that a run writes about itself goes through `Sink.put`, which never
raises: the first failure of a sink is said on stderr, lost records are counted, and each later record is a new attempt. The run's exit code
at its end shows that records were lost (`train.command_line.Exit`).

A sink has one of two outlets. `AppendedFile` writes whole records: what a failed write left of a record is cut off again, at once or before
the next record, so a file stays readable wherever its disk filled up. `StandardStream` writes stdout or stderr, and waits only a moment: a
pipe without a reader blocks its writer for ever, so another thread does the writing. A stream that is an object of another program in this
process, as in a notebook, cannot block, and knows by the thread of its writer to which cell the text belongs: it is written at once.

The invariant: `put` and `say` return, within `PATIENCE_SECONDS` and a write to a disk, whatever happens to the outlet.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

PATIENCE_SECONDS = 2.0
"""How long a stream may take for a record before training continues without it."""
_LONGEST_LINE = 1 << 20


class Sink:
    """A place to which records go, or are lost. name: for messages. write: writes a record, or raises OSError or ValueError."""

    def __init__(self, name: str, write: Callable[[Any], None]):
        self.name, self._write = name, write
        self.lost = 0
        """The number of records that could not be written."""

    def put(self, record: Any) -> None:
        """Writes a record if that is possible."""
        self.attempt(lambda: self._write(record))

    def attempt(self, write: Callable[[], None]) -> None:
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
        self._path, self._is_text = path, is_text
        self._whole: int | None = None
        """The size that the file had before a failed write; None if the last write succeeded."""
        self._is_checked = not is_text

    def write(self, record: bytes) -> None:
        """Appends a record, or nothing. Raises OSError."""
        # Opened and closed each time: the record is with the system at once, and the file may be moved away meanwhile.
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_APPEND, 0o666)
        try:
            self._repair(descriptor)
            self._whole = os.fstat(descriptor).st_size
            write_all(descriptor, record)
            self._whole = None
        except OSError:
            self._repair(descriptor)
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


class StandardStream:
    """stdout or stderr. write: writes a record to the stream, and may wait for its reader for ever."""

    def __init__(self, write: Callable[[bytes], None], may_block: Callable[[], bool] = lambda: True):
        self._write_to_stream, self._may_block = write, may_block
        self._lock = threading.Lock()
        self._writer: threading.Thread | None = None
        self._error: Exception | None = None

    def write(self, record: bytes) -> None:
        """Writes a record. Raises OSError or ValueError, also if it takes longer than PATIENCE_SECONDS."""
        if not self._may_block():
            self._write_to_stream(record)
            return
        with self._lock:
            # While an earlier record still waits for the reader, a record is lost at once.
            if self._writer is None or not self._writer.is_alive():
                self._error = None
                # A daemon, because it may still wait for its reader when the run is over.
                self._writer = threading.Thread(target=self._write_in_thread, args=(record,), name="stream", daemon=True)
                self._writer.start()
                self._writer.join(PATIENCE_SECONDS)
            # The record counts as lost from now on, although it still appears if the reader comes back.
            if self._writer.is_alive():
                raise TimeoutError("its reader has stopped reading")
            if self._error is not None:
                raise self._error

    def _write_in_thread(self, record: bytes) -> None:
        try:
            self._write_to_stream(record)
        except (OSError, ValueError) as error:
            self._error = error


class Stdout(io.TextIOBase):
    """stdout as a text file of which no write fails. sink: counts what was lost."""

    def __init__(self) -> None:
        self._stream = sys.stdout
        self.sink = Sink("stdout", StandardStream(self._write_bytes, lambda: _is_of_system(self._stream)).write)

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The stream's encoding."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str, /) -> int:
        """Writes text. A character that the encoding lacks becomes its escape sequence."""
        self.sink.put(text.encode(self.encoding, "backslashreplace"))
        return len(text)

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        with contextlib.suppress(OSError, ValueError):
            return self._stream is not None and self._stream.isatty()
        return False

    def fileno(self) -> int:
        """The stream's descriptor."""
        return self._stream.fileno()

    def _write_bytes(self, record: bytes) -> None:
        stream = self._stream
        if stream is None:
            return
        if _is_of_system(stream):
            with contextlib.suppress(io.UnsupportedOperation):
                descriptor = stream.fileno()
                # First what others have left in Python's buffer. The record itself does not go through it: a record that failed would stay
                # there, and be written again.
                stream.flush()
                write_all(descriptor, record)
                return
        # A stream inside this process. A notebook's has a descriptor too, which leads to the terminal of its server.
        stream.write(record.decode(self.encoding))
        stream.flush()


def say(text: str) -> None:
    """Prints a line for a person on stderr, if it works."""
    say_lines([f"jgt: {text}"])


def say_lines(lines: Iterable[str]) -> None:
    """Prints lines on stderr as they are, if it works."""
    with contextlib.suppress(OSError, ValueError):
        _STDERR.write("".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))


def settle_streams() -> None:
    """Drops what stdout and stderr still hold if it cannot be written: Python would try again at its exit, and exit with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


def write_all(descriptor: int, record: bytes) -> None:
    """Writes all bytes, in as many pieces as the system likes. Raises OSError."""
    left = memoryview(record)
    while left:
        left = left[os.write(descriptor, left) :]


def _is_of_system(stream: TextIO | None) -> bool:
    return isinstance(stream, io.TextIOWrapper)


def _write_stderr(record: bytes) -> None:
    # By its name at this moment, because others may replace it.
    if sys.stderr is not None:
        sys.stderr.write(record.decode())
        sys.stderr.flush()


def _end_last_line(descriptor: int) -> None:
    """Ends the last line of a file if it is open: whole JSON gets its newline, and half of a line is cut off."""
    size = os.fstat(descriptor).st_size
    begin = max(0, size - _LONGEST_LINE)
    tail = os.pread(descriptor, size - begin, begin)
    if not tail or tail.endswith(b"\n"):
        return
    last = tail[tail.rfind(b"\n") + 1 :]
    try:
        json.loads(last)
    except (ValueError, RecursionError):
        os.ftruncate(descriptor, size - len(last))
    else:
        write_all(descriptor, b"\n")


_STDERR = StandardStream(_write_stderr, lambda: _is_of_system(sys.stderr))
