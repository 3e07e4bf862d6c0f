# pyright: reportAttributeAccessIssue=false
"""TensorBoard's files: one for each start, with every step once.

The files are written here, record by record, and not by tensorboardX's SummaryWriter. Its thread ends at the first failed write, and the
training thread then waits for ever for room in its queue.

A restart trains the steps after its checkpoint again. TensorBoard reads the files of a folder as one sequence, and would draw these steps
twice. So their records are cut off the earlier files, and a new file begins with the note that the run has started again, for a TensorBoard
that has read the earlier ones already. The steps of a start ascend, so the records to cut are the end of a file.

A file is a sequence of records, each an `Event` of TensorFlow's with its length and two checksums:
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from .loggers import Logger
from .sink import AppendedFile, Sink

_masked_crc32c: Any
_Event: Any
_Summary: Any
_SessionLog: Any
try:
    from tensorboardX.proto import event_pb2, summary_pb2
    from tensorboardX.record_writer import masked_crc32c as _masked_crc32c

    # protobuf makes these classes at run time, where a type checker does not see them.
    _Event, _Summary, _SessionLog = event_pb2.Event, summary_pb2.Summary, event_pb2.SessionLog
except ImportError:
    # `train.sections.missing_loggers` has checked that it is installed for whoever makes a Board.
    pass

_PREFIX = "events.out.tfevents."
_AROUND = struct.Struct("<QI")
_CHECKSUM_BYTES = 4
_MAX_RECORD = 1 << 24


class Board(Logger):
    """TensorBoard's file of one start."""

    def __init__(self, folder: Path):
        super().__init__(Sink("tensorboard", self._write))
        self._folder, self._done = folder, 0
        # TensorBoard takes the files of a folder in the order of their names, and each as the continuation of the one before it.
        self._path = folder / f"{_PREFIX}{int(time.time()):010d}.{socket.gethostname()}"
        self._file = AppendedFile(self._path, is_text=False)

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds the metrics of a step, as one record. TensorBoard has its own time."""
        known = {name: value for name, value in values.items() if isinstance(value, int | float) and name != "time"}
        scalars = [_Summary.Value(tag=name, simple_value=float(value)) for name, value in known.items()]
        self.sink.put(_record(step=step, summary=_Summary(value=scalars)))

    def forget_after(self, step: int) -> None:
        """Cuts the records of later steps off the files of earlier starts."""
        self._done = step
        self.sink.attempt(lambda: _cut_files(self._folder, step))

    def _write(self, record: bytes) -> None:
        """Appends a record. The first one of a file follows a header. Raises OSError."""
        if not self._path.exists() or not self._path.stat().st_size:
            self._folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard forgets this step and later ones.
            start = _record(step=self._done + 1, session_log=_SessionLog(status=_SessionLog.START))
            record = _record(file_version="brain.Event:2") + start + record
        self._file.write(record)


def _cut_files(folder: Path, step: int) -> None:
    for path in folder.glob(f"{_PREFIX}*"):
        if not path.is_symlink() and path.is_file():
            with path.open("r+b") as file:
                for begin, record in _records(file):
                    if _step_of(record) > step:
                        file.truncate(begin)
                        break


def _records(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The records of a file, each with the number of bytes before it. What is cut short or damaged ends them."""
    size, begin = os.fstat(file.fileno()).st_size, 0
    while len(head := file.read(_AROUND.size)) == _AROUND.size:
        length, _ = _AROUND.unpack(head)
        end = begin + _AROUND.size + length + _CHECKSUM_BYTES
        if length > _MAX_RECORD or end > size:
            return
        yield begin, file.read(length)
        file.seek(end)
        begin = end


def _step_of(record: bytes) -> int:
    try:
        event = _Event.FromString(record)
    # protobuf's DecodeError, which is a class of the installed implementation.
    except Exception:
        return 0
    # The note of a start names the step after it.
    return 0 if event.HasField("session_log") else event.step


def _record(**fields: Any) -> bytes:
    event: bytes = _Event(wall_time=time.time(), **fields).SerializeToString()
    length = struct.pack("<Q", len(event))
    return b"".join([length, struct.pack("<I", _masked_crc32c(length)), event, struct.pack("<I", _masked_crc32c(event))])
