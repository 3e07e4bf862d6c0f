"""The phases of a process: each second is in exactly one event, and the one that has not ended is on disk."""

import json
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.journal.accounts import account
from train.journal.events import read_process
from train.journal.status import Status, left_open, read_status, status_file
from train.journal.timeline import Timeline
from train.records.clock import Stretches
from train.records.records import Records


@pytest.fixture
def time(monkeypatch):
    """The clock of phases and of stretches, set by hand, in seconds."""
    now = [1000.0]
    clock = SimpleNamespace(time=lambda: now[0], perf_counter=lambda: now[0])
    for name in ("journal.timeline", "records.clock", "records.records"):
        monkeypatch.setattr(f"train.{name}.time", clock)
    return now


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["save", "eval", "fails", "nothing"]), st.integers(0, 5000), st.integers(0, 5000))))
def test_each_second_is_in_exactly_one_event(parts):
    now, rows = [500.0], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.journal.timeline.time", SimpleNamespace(time=lambda: now[0], perf_counter=lambda: now[0]))
        timeline = Timeline(rows.append, "open", 490.0)
        for name, before, inside in parts:
            now[0] += before / 1000
            if name == "nothing":
                continue
            try:
                with timeline.phase(name, step=1):
                    now[0] += inside / 1000
                    if name == "fails":
                        raise ValueError
            except ValueError:
                assert not inside or rows[-1] == {**rows[-1], "phase": "other", "what": "fails", "failed": True}
        timeline.end()
        timeline.begin("late")
    end = 490.0
    for row in rows:
        # A phase between two others that took no time has no event.
        assert row["time"] == pytest.approx(end, abs=2e-3)
        end = row["time"] + row["seconds"]
    # Only the last moment may be missing: shorter ones than an event are part of the phase behind them.
    assert sum(row["seconds"] for row in rows) == pytest.approx(now[0] - 490.0, abs=1e-3 + 1e-4 * len(rows))


def test_stretches_grow_with_the_age_of_the_run(time):
    rows = []
    stretches = Stretches(0, Timeline(rows.append))
    for step in range(1, 30 * 24 * 3600 // 5):
        time[0] += 5
        stretches.step(step)
    steps = [step for row in rows for step in range(row["first"], row["last"] + 1)]
    assert steps == list(range(1, rows[-1]["last"] + 1))
    lengths = [row["seconds"] for row in rows]
    assert lengths == sorted(lengths) and lengths[0] == 15 and lengths[-1] == 605
    assert len(rows) < 6_000


def test_a_stretch_has_the_time_that_the_host_waited_for_data_and_for_devices(time):
    def read():
        while True:
            time[0] += 1
            yield {}

    rows = []
    timeline = Timeline(rows.append)
    stretches = Stretches(0, timeline)
    for step, _ in zip(range(1, 4), stretches.reading(read()), strict=False):
        time[0] += 0.5
        with stretches.waiting():
            time[0] += 1.5
        stretches.step(step)
    assert timeline.figures["recent"] == [{"seconds": 3, "steps": 1, "busy": 1.5, "data": 1}] * 2
    with stretches.interrupted(3):
        time[0] += 100
    stretches.end(3)
    (step, other) = rows
    assert step == {"phase": "step", "time": 1000.0, "seconds": 9, "first": 1, "last": 3, "steps": 3, "busy": 4.5, "data": 3}
    assert other == {"phase": "other", "time": 1009.0, "seconds": 100}


def write_status(folder, process, **values):
    status_file(folder, process).write_text(json.dumps(values))


def test_what_a_killed_process_did_is_added_by_readers_and_by_its_next_start(tmp_path, time, read_rows):
    records = Records(tmp_path, process=2, begun=990.0)
    records.event("start", 980.0, 10.0)
    records.timeline.begin("compile")
    time[0] += 30
    row = {"phase": "compile", "time": 1000.0, "seconds": 30.0}
    assert records.timeline.open_row() == row
    write_status(tmp_path, 2, time=1030.0, row=row)
    assert [event.phase for event in read_process(tmp_path, 2)[0]] == ["start", "open", "compile"]
    # The process is killed here.
    for _ in range(2):
        Records(tmp_path, process=2).event("start", 1040.0, 1.0)
    rows = read_rows(tmp_path / "events-2.jsonl")
    assert [row["phase"] for row in rows] == ["start", "open", "compile", "start", "start"]
    assert rows[2] == {**row, "killed": True} and left_open(tmp_path, 2) is None


@pytest.mark.parametrize(
    "status",
    [
        {"time": 1030.0, "row": None},
        {"time": 1030.0, "row": [1]},
        {"time": "x", "row": {"phase": "compile", "time": 1000.0, "seconds": 1.0}},
        {"time": 500.0, "row": {"phase": "compile", "time": 400.0, "seconds": 1.0}},
        {"time": 1030.0, "row": {"phase": "compile", "time": 990.0, "seconds": 1.0}},
    ],
    ids=["ended", "foreign", "no time", "of an earlier start", "written since"],
)
def test_what_is_not_open_is_not_added(status, tmp_path):
    records = Records(tmp_path)
    records.event("compile", 990.0, 10.0)
    write_status(tmp_path, 0, **status)
    assert left_open(tmp_path, 0) is None
    assert len(account("run", read_process(tmp_path, 0)[0]).starts) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"row": {"phase": "save"', "[" * 100_000, "\x00" * 50])
def test_a_damaged_status_is_none(text, tmp_path):
    status_file(tmp_path, 0).write_text(text)
    assert read_status(tmp_path, 0) is None and left_open(tmp_path, 0) is None


def test_the_last_status_says_why_the_process_ended(tmp_path):
    records = Records(tmp_path, process=1, begun=990.0)
    status = Status(tmp_path, 1, records.timeline, lambda: {"doing": "step 7"})
    records.stop(why="SIGTERM")
    status.close()
    found = read_status(tmp_path, 1)
    assert (found["end"], found["row"], found["doing"], found["process"]) == ("SIGTERM", None, "step 7", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events-1.jsonl", "status-1.json"]


def test_a_disk_that_does_not_answer_holds_up_nobody(tmp_path, monkeypatch):
    is_there, answers = threading.Event(), threading.Event()
    monkeypatch.setattr(Status, "_replace", lambda self, text: (is_there.set(), answers.wait()))
    records = Records(tmp_path)
    status = Status(tmp_path, 0, records.timeline)
    assert is_there.wait(10)
    with records.phase("save", step=1):
        pass
    status.close()
    assert status._worker._thread.is_alive()
    answers.set()


def test_a_run_without_its_directory_writes_no_status(tmp_path, capsys):
    timeline = Timeline(lambda row: None)
    Status(tmp_path, 0, timeline, is_ours=lambda: False).close()
    assert not list(tmp_path.iterdir())
    Status(tmp_path / "gone", 0, timeline).close()
    assert capsys.readouterr().err.count("status-0.json cannot be written") == 1
