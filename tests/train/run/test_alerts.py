"""Each kind of alert, and the command that it calls."""

import collections
import json
import os
import shutil
import sys
import time

import pytest

from train.run.hooks.alerts import Alerts
from train.run.train import train
from train.settings.sections import AlertsConfig


@pytest.fixture
def alerts(tmp_path):
    """Alerts of a run directory, which have not begun."""
    return lambda **config: Alerts(AlertsConfig(**config), tmp_path)


def kinds_of(alerts, *rows):
    """The kinds of alerts of each row."""
    return [[kind for kind, _ in alerts.of_metrics(row)] for row in rows]


def test_a_loss_that_is_not_finite_or_far_above_the_usual(alerts):
    usual = [{"loss": 2.0}] * 5
    assert kinds_of(alerts(), {"loss": 9.0}, *usual, {"loss": 3.9}, {"loss": 4.1}, {"loss": None}) == [*[[]] * 7, ["loss"], ["loss"]]
    assert kinds_of(alerts(spike=None), *usual, {"loss": 99.0}, {"loss": None}) == [*[[]] * 6, ["loss"]]
    # A loss may be negative, and the row of an evaluation has none.
    assert kinds_of(alerts(), *[{"loss": -2.0}] * 5, {"loss": -1.0}, {"loss": 0.5}, {"eval_loss": 9.0}) == [*[[]] * 6, ["loss"], []]


def test_a_drop_of_the_speed(alerts):
    usual = [{"tokens_per_s": 100.0}] * 5
    assert kinds_of(alerts(), *usual, {"tokens_per_s": 71.0}, {"tokens_per_s": 69.0}, {"tokens_per_s": None}) == [
        *[[]] * 6,
        ["throughput"],
        [],
    ]
    assert kinds_of(alerts(throughput=None), *usual, {"tokens_per_s": 1.0}) == [[]] * 6


def write_status(folder, process, *, age=0.0, idle=0.1, limit=60.0, data=0.1, end=None):
    now = time.time() - age
    window = {"seconds": 1.0, "steps": 1, "busy": data, "data": data}
    row = {"phase": "step", "time": now - 1, "seconds": 1.0}
    status = {
        "process": process,
        "host": "a",
        "pid": os.getpid(),
        "time": now,
        "idle_s": idle,
        "limit_s": limit,
        "recent": [window] * 2,
        "row": row,
    }
    (folder / f"status-{process}.json").write_text(json.dumps(status | ({"end": end} if end else {})))


@pytest.mark.parametrize(
    ("fault", "config", "kind"),
    [
        ({}, {}, None),
        ({"data": 0.5}, {}, "straggler"),
        ({"data": 0.5}, {"straggler": 3.0}, None),
        ({"data": 0.5}, {"straggler": None}, None),
        ({"idle": 31.0}, {}, "progress"),
        ({"idle": 31.0}, {"progress": 0.9}, None),
        ({"idle": 31.0, "limit": None}, {}, None),
        ({"age": 31.0}, {}, "progress"),
        ({"age": 31.0, "end": "done"}, {}, None),
    ],
)
def test_a_process_that_holds_up_the_others_or_does_nothing(alerts, tmp_path, fault, config, kind):
    for process in range(4):
        write_status(tmp_path, process, **(fault if process == 2 else {}))
    watched = alerts(**{"disk": None, **config})
    assert "straggler" not in dict(watched.of_run())
    found = dict(watched.of_run())
    assert list(found) == ([] if kind is None else [kind])
    assert all("process 2 on a" in text for text in found.values())


def test_a_disk_that_is_nearly_full(alerts, monkeypatch):
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100e9, 96e9, 4e9))
    assert dict(alerts().of_run())["disk"].endswith("has 4.0 of 100.0 GB left")
    assert dict(alerts(disk=0.03).of_run()) == {}


def test_an_alert_comes_once_until_its_reason_is_gone(alerts):
    events, watched = [], alerts()
    watched.begin(lambda name, at, seconds, **details: events.append((name, details["kind"], details["step"])))
    for step, loss in enumerate([2.0] * 5 + [None, None, 2.0, None], start=1):
        watched.add(step, {"loss": loss})
    watched.close()
    assert events == [("alert", "loss", 6), ("alert", "loss", 9)]


def test_the_command_has_the_facts(alerts, tmp_path):
    write = "import json, os; json.dump({k: v for k, v in os.environ.items() if k[:4] == 'JGT_'}, open('%s', 'w'))"
    watched = alerts(command=(sys.executable, "-c", write % (tmp_path / "said.json")))
    watched.begin(lambda *args, **details: None)
    watched.add(7, {"loss": None})
    watched._thread.join(0.0)
    watched.close()
    watched._thread.join()
    said = json.loads((tmp_path / "said.json").read_text())
    facts = {"JGT_ALERT": "loss", "JGT_MESSAGE": "the loss is not finite", "JGT_STEP": "7", "JGT_RUN": str(tmp_path)}
    assert facts.items() <= said.items()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("sleep", "60"), "it took more than 0.1 s"),
        (("false",), "it ended with exit code 1"),
        (("/no/such/program",), "No such file or directory"),
        (("a\0b",), "embedded null byte"),
    ],
)
def test_a_command_that_fails_costs_a_line(alerts, capsys, command, message):
    watched = alerts(command=command, seconds=0.1)
    watched.begin(lambda *args, **details: None)
    for step, loss in enumerate([None, 1.0, None], start=1):
        watched.add(step, {"loss": loss})
    watched.close()
    watched._thread.join()
    assert capsys.readouterr().err.count(f"alerts.command failed: {message}. Training continues") == 1
    assert watched.sink.lost == 0


def test_a_run_with_a_loss_that_is_not_finite(tiny, read_rows, tmp_path, capsys):
    run = tiny("train.steps=4", "alerts={disk: null}", "debug.faults=[{at_step: 3, kind: nan}]", "train.on_nonfinite=skip")
    assert train(run) == 0
    (event,) = [e for e in read_rows(tmp_path / "run" / "events.jsonl") if e["phase"] == "alert"]
    assert (event["kind"], event["step"], event["message"]) == ("loss", 3, "the loss is not finite")
    assert "alert: the loss is not finite" in capsys.readouterr().err
