"""A run that a file asks for a save or a profile does so before a common step, and goes on."""

import json

from train.processes.peers import Requests
from train.report.status import ask, read_status
from train.run.train import train


def test_a_file_asks_a_run_for_a_profile_of_a_step(tiny, tmp_path, read_rows):
    run = tmp_path / "run"
    run.mkdir()
    ask(run, "profile")
    train(tiny("train.steps=4"))
    assert not (run / "request.json").exists() and not (run / "profile" / "trial").exists()
    (step,) = (event["step"] for event in read_rows(run / "events.jsonl") if event["phase"] == "profile")
    assert json.loads((run / "profile" / "signals.json").read_text())["first"] == step
    assert read_status(run, 0)["end"] == "done"


def test_a_run_that_died_soon_after_a_profile_takes_none(tiny, tmp_path, capsys):
    run = tmp_path / "run"
    (run / "profile").mkdir(parents=True)
    (run / "profile" / "trial").touch()
    ask(run, "profile")
    train(tiny("train.steps=2"))
    assert "the request for a profile is ignored: a process died within 60 s of the last one" in capsys.readouterr().err
    assert [path.name for path in (run / "profile").iterdir()] == ["trial"]


def test_a_request_after_the_report_is_for_the_next_agreement():
    requests = Requests(None)
    assert requests.due(1) == frozenset()
    requests.request("save")
    requests.request("save")
    requests.request("profile")
    assert requests.due(2) == {"save"}
    assert requests.due(3) == {"profile"}
    assert requests.due(4) == frozenset()
