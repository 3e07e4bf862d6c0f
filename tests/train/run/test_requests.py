"""A run that a file asks for a save or a profile does so before a common step, and goes on."""

import json
import os

import jax
import pytest

from train.journal.status import ask, read_status
from train.processes.peers import Requests
from train.records.profiler import Profiler
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


@pytest.mark.parametrize(
    ("entry", "kind"),
    [
        *((entry, kind) for entry in ("signals.json", "slices-0.json") for kind in ("folder", "pipe", "link")),
        *((entry, kind) for entry in (".", "plugins") for kind in ("file", "pipe")),
    ],
)
def test_a_profile_that_cannot_be_written_ends_no_run(tiny, tmp_path, capsys, monkeypatch, entry, kind):
    run, outside = tmp_path / "run", tmp_path / "outside"
    outside.write_text("precious")
    begin = Profiler.begins

    def spoiled(self, step, *, is_asked_for=False):
        """Somebody puts something in the way while the run trains."""
        if is_asked_for:
            path = run / "profile" / entry
            path.parent.mkdir(exist_ok=True)
            {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "file": path.touch, "link": lambda: path.symlink_to(outside)}[kind]()
        return begin(self, step, is_asked_for=is_asked_for)

    monkeypatch.setattr(Profiler, "begins", spoiled)
    run.mkdir()
    ask(run, "profile")
    train(tiny("train.steps=4", "checkpoint.every=4"))
    assert read_status(run, 0)["end"] == "done" and outside.read_text() == "precious"
    if kind in ("folder", "file") and entry != "slices-0.json":
        assert "profile" in capsys.readouterr().err
    if (entry, kind) in (("signals.json", "pipe"), ("signals.json", "link")):
        assert "signals" in json.loads((run / "profile" / "signals.json").read_text())
    # JAX has ended the trace: the process can begin another.
    with jax.profiler.trace(str(tmp_path / "next")):
        pass


def test_a_request_after_the_report_is_for_the_next_agreement():
    requests = Requests(None)
    assert requests.due(1) == frozenset()
    requests.request("save")
    requests.request("save")
    requests.request("profile")
    assert requests.due(2) == {"save"}
    assert requests.due(3) == {"profile"}
    assert requests.due(4) == frozenset()
