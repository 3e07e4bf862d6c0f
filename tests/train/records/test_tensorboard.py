"""TensorBoard's files, read back as TensorBoard reads them: all files of the folder, one after another."""

import struct

import pytest

pytest.importorskip("tensorboardX")

from train.records.tensorboard import _PREFIX, Board, _Event


def start(folder, number, done, steps):
    """A start of a run that resumes from step `done` and logs these steps."""
    board = Board(folder)
    board._path = folder / f"{_PREFIX}{number:010d}.host"
    board._file._path = board._path
    board.forget_after(done)
    for step in steps:
        board.add(step, {"loss": step / 2})
    assert board.sink.lost == 0


def test_a_start_names_the_step_from_which_its_steps_count(tmp_path):
    start(tmp_path, 1, 0, [1, 2, 3, 4, 5])
    start(tmp_path, 2, 3, [4])
    _, second = sorted(tmp_path.iterdir())
    data, events = second.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        events.append(_Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    _, begin, step = events
    assert begin.HasField("session_log") and begin.step == 4
    assert (step.step, step.summary.value[0].simple_value) == (4, 2.0)


def test_tensorboard_reads_each_step_once(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    start(tmp_path, 1, 0, [1, 2, 3, 4, 5])
    start(tmp_path, 2, 3, [4, 5, 6])
    start(tmp_path, 3, 5, [6, 7])
    accumulator = reader.EventAccumulator(str(tmp_path)).Reload()
    assert [scalar.step for scalar in accumulator.Scalars("loss")] == [1, 2, 3, 4, 5, 6, 7]
