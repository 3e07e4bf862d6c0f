# pyright: reportAttributeAccessIssue=false
"""TensorBoard's files: one for each start.

The files are written here, record by record, and not by tensorboardX's SummaryWriter. Its thread ends at the first failed write, and the
training thread then waits for ever for room in its queue.

A restart trains the steps after its checkpoint again. TensorBoard reads the files of a folder as one sequence, and would draw these steps
twice. So a new file begins with the note that the run has started again, and TensorBoard forgets the steps from there on.

A file is a sequence of records, each an `Event` of TensorFlow's with its length and two checksums:
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..journal.sink import AppendedFile, Sink
from .loggers import Logger
from .media import Histogram, Image, Medium

_masked_crc32c: Any
_Event: Any
_Summary: Any
_SessionLog: Any
_Histogram: Any
_Metadata: Any
_Tensor: Any
try:
    from tensorboardX.proto import event_pb2, summary_pb2, tensor_pb2
    from tensorboardX.record_writer import masked_crc32c as _masked_crc32c

    # protobuf makes these classes at run time, where a type checker does not see them.
    _Event, _Summary, _SessionLog = event_pb2.Event, summary_pb2.Summary, event_pb2.SessionLog
    _Histogram, _Metadata, _Tensor = summary_pb2.HistogramProto, summary_pb2.SummaryMetadata, tensor_pb2.TensorProto
except ImportError:
    # `train.settings.packages.missing_loggers` has checked that it is installed for whoever makes a Board.
    pass

_PREFIX = "events.out.tfevents."


class Board(Logger):
    """TensorBoard's file of one start."""

    takes = (Image, Histogram, str)

    def __init__(self, folder: Path):
        super().__init__(Sink("tensorboard", self._write))
        self._folder, self._done = folder, 0
        # TensorBoard takes the files of a folder in the order of their names, and each as the continuation of the one before it.
        self._path = folder / f"{_PREFIX}{int(time.time()):010d}.{socket.gethostname()}"
        self._file = AppendedFile(self._path, is_text=False)

    def add(self, step: int, values: Mapping[str, object]) -> None:
        """Adds the metrics of a step, as one record. TensorBoard has its own time."""
        known = {name: value for name, value in values.items() if isinstance(value, int | float) and name != "time"}
        scalars = [_Summary.Value(tag=name, simple_value=float(value)) for name, value in known.items()]
        self.sink.put(_record(step=step, summary=_Summary(value=scalars)))

    def add_medium(self, step: int, name: str, value: Medium) -> None:
        """Adds an image, a histogram or a text."""
        if isinstance(value, Image):
            height, width, channels = value.pixels.shape
            shown = {"image": _Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=value.png())}
        elif isinstance(value, Histogram):
            counts, edges = value.counts.tolist(), value.edges.tolist()
            sums = {"num": sum(counts), "sum": value.total, "sum_squares": value.squares}
            shown = {"histo": _Histogram(min=edges[0], max=edges[-1], bucket_limit=edges[1:], bucket=counts, **sums)}
        else:
            plugin = _Metadata(plugin_data=_Metadata.PluginData(plugin_name="text"))
            # TensorBoard shows Markdown, in which four spaces in front of a line keep it as it is.
            text = "\n".join(f"    {line}" for line in value.split("\n"))
            shown = {"metadata": plugin, "tensor": _Tensor(dtype="DT_STRING", string_val=[text.encode()])}
        self.sink.put(_record(step=step, summary=_Summary(value=[_Summary.Value(tag=name, **shown)])))

    def forget_after(self, step: int) -> None:
        """Makes TensorBoard forget later steps of earlier starts, as soon as it reads this start's file."""
        self._done = step

    def _write(self, record: bytes) -> None:
        """Appends a record. The first one of a file follows a header. Raises OSError."""
        if not self._path.exists() or not self._path.stat().st_size:
            self._folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard forgets this step and later ones.
            start = _record(step=self._done + 1, session_log=_SessionLog(status=_SessionLog.START))
            record = _record(file_version="brain.Event:2") + start + record
        self._file.write(record)


def _record(**fields: object) -> bytes:
    event: bytes = _Event(wall_time=time.time(), **fields).SerializeToString()
    length = struct.pack("<Q", len(event))
    return b"".join([length, struct.pack("<I", _masked_crc32c(length)), event, struct.pack("<I", _masked_crc32c(event))])
