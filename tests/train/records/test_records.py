"""The metrics and events that a run writes."""

import json
import os

import pytest

from train.records.records import Records
from train.records.summary import describe_end


def test_metrics_and_events(tmp_path, read_rows):
    records = Records(tmp_path)
    records.metrics(1, {"loss": 2.5, "mfu": None})
    with records.phase("save", step=1):
        pass
    records.event("step", 12.3456789, 1.0000004, steps=3)
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.5, "mfu": None}]
    # This test ignores what happens between the phases.
    save, step = (row for row in read_rows(tmp_path / "events.jsonl") if row["phase"] != "other")
    assert save.keys() == {"phase", "time", "seconds", "step"}
    assert step == {"phase": "step", "time": 12.345679, "seconds": 1.0, "steps": 3}


def test_a_restart_forgets_later_steps_and_a_line_cut_short(tmp_path, read_rows):
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (1, 2, 3, 4)] + ['{"step": 5, "lo']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    records = Records(tmp_path)
    records.forget_after(2)
    records.metrics(3, {"loss": 0.5})
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": 0.5}]


@pytest.mark.parametrize("place", ["pipe", "device"])
def test_the_last_lines_of_a_run_do_not_wait_for_what_is_no_file(tmp_path, place):
    for name in ("metrics.jsonl", "events.jsonl"):
        os.mkfifo(tmp_path / name) if place == "pipe" else (tmp_path / name).symlink_to("/dev/full")
    first, second = describe_end(tmp_path, seconds=3.0, tokens=None, samples=7)
    assert first == "Trained for 3s, 7 samples in all"
    assert second.startswith(f"In {tmp_path}: ")


def test_what_is_not_finite_is_null(tmp_path, read_rows):
    records = Records(tmp_path)
    records.metrics(1, {"loss": float("nan"), "grad_norm": float("inf"), "lr": 0.5})
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": None, "grad_norm": None, "lr": 0.5}]


def test_nothing_to_forget(tmp_path):
    Records(tmp_path).forget_after(2)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_other_processes_write_their_events_alone(tmp_path, read_rows):
    records = Records(tmp_path, process=3)
    records.metrics(1, {"loss": 2.5})
    records.sample("a")
    with records.phase("init"):
        pass
    records.forget_after(0)
    assert [path.name for path in tmp_path.iterdir()] == ["events-3.jsonl"]
    assert [row["phase"] for row in read_rows(tmp_path / "events-3.jsonl")] == ["init"]


@pytest.mark.parametrize(("left", "stays"), [('{"ini', ""), ('{"a": 1}\n{"ini', '{"a": 1}\n'), ('{"a": 1}', '{"a": 1}\n')])
def test_an_event_after_a_line_cut_short_has_a_line_of_its_own(left, stays, tmp_path):
    (tmp_path / "events.jsonl").write_text(left)
    Records(tmp_path).event("start", 1.0, 0.5)
    assert (tmp_path / "events.jsonl").read_text() == stays + '{"phase": "start", "time": 1.0, "seconds": 0.5}\n'
