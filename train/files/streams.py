"""stdout and stderr: lines for a person, which may be lost but never delay or end a process.

Everything here is needed before JAX may be imported, and by programs that never import it, such as the launcher.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TextIO

from jgt.document import shown

PATIENCE_SECONDS = 2.0
"""How long a stream may take for a record before training continues without it."""


class StandardStream:
    """stdout or stderr, which may delay a run only for a moment.

    A pipe without a reader blocks its writer for ever, so another thread does the writing. A stream that is an object of another program in
    this process, as in a notebook, cannot block, and knows by the thread of its writer to which cell the text belongs: it is written at
    once. find: the stream at this moment, because others may replace it.
    """

    def __init__(self, find: Callable[[], TextIO | None]):
        self._find = find
        self._lock = threading.Lock()
        self._writer: threading.Thread | None = None
        self._error: Exception | None = None

    def write(self, text: str) -> None:
        """Writes text. A character that the encoding lacks becomes its escape sequence.

        Raises OSError or ValueError, also if it takes longer than PATIENCE_SECONDS.
        """
        stream = self._find()
        if stream is None:
            return
        if not isinstance(stream, io.TextIOWrapper):
            _write_to(stream, text)
            return
        with self._lock:
            # While an earlier text still waits for the reader, this one is lost at once.
            if self._writer is None or not self._writer.is_alive():
                self._error = None
                # A daemon, because it may still wait for its reader when the run is over.
                self._writer = threading.Thread(target=self._write_in_thread, args=(stream, text), name="stream", daemon=True)
                try:
                    self._writer.start()
                except RuntimeError:
                    # The system allows no further thread. Most streams do not block.
                    self._writer = None
                    self._write_in_thread(stream, text)
                else:
                    self._writer.join(PATIENCE_SECONDS)
            # The text counts as lost from now on, although it still appears if the reader comes back.
            if self._writer is not None and self._writer.is_alive():
                raise TimeoutError("its reader has stopped reading")
            if self._error is not None:
                raise self._error

    def _write_in_thread(self, stream: TextIO, text: str) -> None:
        try:
            _write_to(stream, text)
        except (OSError, ValueError) as error:
            self._error = error


def _write_to(stream: TextIO, text: str) -> None:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    record = text.encode(encoding, "backslashreplace")
    # A notebook's stream has a descriptor too, which leads to the terminal of its server.
    if isinstance(stream, io.TextIOWrapper):
        with contextlib.suppress(io.UnsupportedOperation):
            descriptor = stream.fileno()
            # First what others have left in Python's buffer. The text itself does not go through it: what failed would stay there, and be
            # written again.
            stream.flush()
            write_all(descriptor, record)
            return
    stream.write(record.decode(encoding))
    stream.flush()


def say(text: str, *, who: str = "jgt") -> None:
    """Prints a line for a person on stderr, if it works."""
    say_lines([f"{who}: {text}"])


def say_lines(lines: Iterable[str]) -> None:
    """Prints lines on stderr, if it works. Control characters, which a terminal would obey, become escapes."""
    parts = [shown(part, sys.maxsize, quotes=False) for line in lines for part in line.split("\n")]
    with contextlib.suppress(OSError, ValueError):
        _STDERR.write("".join(f"{part}\n" for part in parts))


def discard_unwritten() -> None:
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


_STDERR = StandardStream(lambda: sys.stderr)
