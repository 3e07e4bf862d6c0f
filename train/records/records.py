# pyright: reportAttributeAccessIssue=false
"""The files that a run writes about itself: metrics.jsonl, events.jsonl and, if tensorboardX is installed, TensorBoard's.

A run can be killed at any moment, so every record is appended and the file closed at once: a killed process loses at most the record that
it was writing. A record may also be impossible to write, because the disk is full or fails. So each file is a sink (`train.sink`): the
record is then lost as a whole, and the run goes on. Readers skip lines that are not valid JSON.

TensorBoard's file is written here, record by record, and not by tensorboardX's SummaryWriter. Its thread ends at the first failed write,
and the training thread then waits for ever for room in its queue.

Metrics and events have different histories. A restart trains the steps after its checkpoint again, so their metrics are
dropped and written once more: metrics.jsonl has each step once. Events are what really happened, the lost steps included, and
are never dropped. Process 0 writes everything; the others write only their events, each into a file of its own.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..sink import AppendedFile, Sink

try:
    from tensorboardX.crc32c import crc32c
    from tensorboardX.proto import event_pb2, summary_pb2

    # protobuf makes these classes at run time, where a type checker does not see them.
    _Event, _Summary = vars(event_pb2)["Event"], vars(summary_pb2)["Summary"]
except ImportError:
    crc32c = _Event = _Summary = None

_LONGEST_LINE = 1 << 20


class Records:
    """Writes the records of one process into the run directory. No method raises an error of the disk."""

    def __init__(self, folder: Path, *, process: int = 0):
        self._folder = folder
        # The metrics are the same on all processes.
        self._is_first = process == 0
        self._metrics = _lines(folder / "metrics.jsonl")
        self._events = _lines(folder / ("events.jsonl" if self._is_first else f"events-{process}.jsonl"))
        self._sample = Sink("sample.txt", AppendedFile(folder / "sample.txt"))
        self._board = _Board(folder / "tensorboard") if self._is_first and _Event is not None else None

    @property
    def lost(self) -> dict[str, int]:
        """The number of lost records of each sink that lost any."""
        sinks = [self._metrics, self._events, self._sample, *([] if self._board is None else [self._board.sink])]
        return {sink.name: sink.lost for sink in sinks if sink.lost}

    def metrics(self, step: int, values: dict[str, Any]) -> None:
        """Appends the metrics of a step, to metrics.jsonl and TensorBoard."""
        if not self._is_first:
            return
        # JSON has no NaN and no infinity.
        plain = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        self._metrics.put(_line({"step": step, **plain}))
        if self._board is not None:
            self._board.add(step, {name: value for name, value in plain.items() if isinstance(value, int | float)})

    @contextlib.contextmanager
    def phase(self, name: str, **details: Any) -> Iterator[None]:
        """Appends an event with the seconds that the phase inside took, such as init, compile, save or restore."""
        started, clock = time.time(), time.perf_counter()
        yield
        self.event(name, started, time.perf_counter() - clock, **details)

    def event(self, name: str, started: float, seconds: float, **details: Any) -> None:
        """Appends an event. started: seconds since 1970."""
        self._events.put(_line({"phase": name, "time": round(started, 3), "seconds": round(seconds, 4), **details}))

    def text(self, name: str, text: str) -> None:
        """Writes a text file into the run directory; process 0 only."""
        if self._is_first:
            self._sample.attempt(lambda: _write_text(self._folder / name, text))

    def forget_after(self, step: int) -> None:
        """Drops the metrics of later steps than the one that a restart resumes from: they will be written again."""
        if self._is_first:
            self._metrics.attempt(lambda: _forget_after(self._folder / "metrics.jsonl", step))


class _Board:
    """TensorBoard's file of one start: a sequence of records, each an `Event` of TensorFlow's with its length and two checksums.

    The format is TFRecord: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
    """

    def __init__(self, folder: Path):
        self._folder = folder
        # TensorBoard takes the files of a folder in the order of their names, and each as the continuation of the one before it.
        self._path = folder / f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}"
        self._file = AppendedFile(self._path, is_text=False)
        self.sink = Sink("tensorboard", self)

    def add(self, step: int, values: dict[str, float]) -> None:
        """Adds the metrics of a step, as one record."""
        assert _Event is not None and _Summary is not None
        scalars = [_Summary.Value(tag=name, simple_value=float(value)) for name, value in values.items()]
        event = _Event(wall_time=time.time(), step=step, summary=_Summary(value=scalars))
        self.sink.put(_framed(event.SerializeToString()))

    def write(self, record: bytes) -> None:
        """Appends a record. The first one of a file follows a header. Raises OSError."""
        assert _Event is not None
        if not self._path.exists() or not self._path.stat().st_size:
            self._folder.mkdir(parents=True, exist_ok=True)
            record = _framed(_Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString()) + record
        self._file.write(record)


def _framed(event: bytes) -> bytes:
    length = struct.pack("<Q", len(event))
    return length + _checksum(length) + event + _checksum(event)


def _checksum(data: bytes) -> bytes:
    assert crc32c is not None
    # TFRecord's masked CRC: rotated and shifted, because data may contain CRCs of its own.
    crc: int = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _lines(path: Path) -> Sink:
    return Sink(path.name, AppendedFile(path))


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _forget_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    # A rename replaces the file in one step: a restart that is killed here leaves the old file or the new one, never a part.
    new = path.with_name(f"{path.name}.new")
    try:
        with new.open("wb") as file:
            file.writelines(line + b"\n" for line, row in read_metrics(path) if row["step"] <= step)
        new.replace(path)
    except OSError:
        # Without room for a second file: rows ascend, so the later ones are its end.
        with contextlib.suppress(OSError):
            new.unlink()
        os.truncate(path, _end_of(path, step))


def _end_of(path: Path, step: int) -> int:
    """The number of bytes before the first row of a later step."""
    end = 0
    with path.open("rb") as file:
        for line in iter(lambda: file.readline(_LONGEST_LINE), b""):
            row = _row(line)
            if row is not None and row["step"] > step:
                return end
            end += len(line)
    return end


def read_metrics(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines of a metrics file and their contents. Skips lines that are cut short or damaged."""
    with path.open("rb") as file:
        # A longer line is not one that `Records` wrote. It is read in pieces to bound the memory, and each piece fails to parse.
        for line in iter(lambda: file.readline(_LONGEST_LINE), b""):
            if (row := _row(line)) is not None:
                yield line.rstrip(b"\r\n"), row


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None
