"""TensorBoard's files, read back as TensorBoard reads them: all files of the folder, one after another."""

import pytest

pytest.importorskip("tensorboardX")

from train.records.tensorboard import _PREFIX, Board, _Event, _records


def start(folder, number, done, steps):
    """A start of a run that resumes from step `done` and logs these steps."""
    board = Board(folder)
    board._path = folder / f"{_PREFIX}{number:010d}.host"
    board._file._path = board._path
    board.forget_after(done)
    for step in steps:
        board.add(step, {"loss": step / 2})
    assert board.sink.lost == 0


def events(folder):
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            yield from (_Event.FromString(record) for _, record in _records(file))


def test_a_restart_leaves_each_step_once(tmp_path):
    start(tmp_path, 1, 0, [1, 2, 3, 4, 5])
    start(tmp_path, 2, 3, [4, 5, 6])
    start(tmp_path, 3, 2, [3, 4])
    found = [(event.step, event.summary.value[0].simple_value) for event in events(tmp_path) if event.HasField("summary")]
    assert found == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]
    # For a TensorBoard that has read the lost steps already.
    assert [event.step for event in events(tmp_path) if event.HasField("session_log")] == [1, 4, 3]


def test_a_damaged_end_and_a_foreign_file_stay(tmp_path):
    start(tmp_path, 1, 0, [1, 2])
    (path,) = tmp_path.iterdir()
    damaged = path.read_bytes() + b"\xff" * 30
    path.write_bytes(damaged)
    (tmp_path / "notes.txt").write_text("mine")
    Board(tmp_path).forget_after(2)
    assert path.read_bytes() == damaged
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_tensorboard_reads_each_step_once(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    start(tmp_path, 1, 0, [1, 2, 3, 4, 5])
    start(tmp_path, 2, 3, [4, 5, 6])
    accumulator = reader.EventAccumulator(str(tmp_path)).Reload()
    assert [scalar.step for scalar in accumulator.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
