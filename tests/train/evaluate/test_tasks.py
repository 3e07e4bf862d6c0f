"""Tasks of lm-evaluation-harness: the answers of its own model `hf`, and an evaluation that is killed."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from local_tasks import ANSWERS, write_model, write_tasks

from jgt.__main__ import main
from jgt.document import InputError
from train.evaluate.likelihood import Scorer
from train.run.load import load_model

pytest.importorskip("lm_eval")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
TASKS = ("local_choice", "local_rolling", "local_writing")


@pytest.fixture(autouse=True)
def _without_helpers(monkeypatch):
    """The harness looks for transformers, and there is a helper of that name."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path).name != "helpers"])
    monkeypatch.delitem(sys.modules, "transformers", raising=False)


@pytest.mark.parametrize("layout", [[], ["--mesh", "data=2,fsdp=2,tensor=2", "--rules", "jgt:fsdp_tensor"]], ids=["alone", "2x2x2"])
def test_results_are_those_of_hf(layout, tmp_path, capsys):
    model, tasks, out = write_model(tmp_path / "model"), write_tasks(tmp_path / "tasks"), tmp_path / "out"
    arguments = ["--tasks", ",".join(TASKS), "--include", str(tasks), "--out", str(out)]
    assert main(["eval", str(model), *arguments, *layout, "--json"]) == 0
    found, expected = json.loads(capsys.readouterr().out)["tasks"], json.loads(ANSWERS.read_text())
    for task in TASKS:
        metrics = expected["results"][task]
        assert {name: found["results"][task][name] for name in metrics} == pytest.approx(metrics, rel=1e-4), task
    (file,) = out.glob("results_*.json")
    assert json.loads(file.read_text())["results"] == found["results"]


def test_a_chat_has_the_results_of_hf(tmp_path, capsys):
    model, tasks = write_model(tmp_path / "model"), write_tasks(tmp_path / "tasks")
    arguments = ["--tasks", "local_choice", "--include", str(tasks), "--out", str(tmp_path / "out"), "--fewshot", "2"]
    assert main(["eval", str(model), *arguments, "--chat", "--json"]) == 0
    found, expected = json.loads(capsys.readouterr().out)["tasks"]["results"]["local_choice"], json.loads(ANSWERS.read_text())["chat"]
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert main(["eval", str(model), *arguments, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)["tasks"]["results"]["local_choice"]
    assert any(plain[name] != pytest.approx(value, rel=1e-4) for name, value in expected.items())
    (model / "chat_template.jinja").unlink()
    assert main(["eval", str(model), *arguments, "--chat"]) == 2
    assert "has no chat template" in capsys.readouterr().err


def test_written_texts_are_those_of_hf(tmp_path):
    from train.evaluate.harness import HarnessModel

    model = HarnessModel(Scorer(load_model(str(write_model(tmp_path / "model")))), "tasks:")
    expected = json.loads(ANSWERS.read_text())["written"]
    given = {"until": ["k", "TT"], "max_gen_toks": 24, "do_sample": False}
    assert model.generate_until([SimpleNamespace(args=(text, given)) for text, _ in expected]) == [answer for _, answer in expected]
    with pytest.raises(InputError, match=r"generation_kwargs: num_beams: jgt has only temperature, top_k"):
        model.generate_until([SimpleNamespace(args=("a", {**given, "num_beams": 4}))])
    with pytest.raises(InputError, match="leaves no room for the question"):
        model.generate_until([SimpleNamespace(args=("a", {**given, "max_gen_toks": 4096}))])


def test_tasks_that_cannot_be_evaluated_are_refused(tmp_path, capsys):
    model, tasks = write_model(tmp_path / "model"), write_tasks(tmp_path / "tasks")
    arguments = ["eval", str(model), "--include", str(tasks), "--out", str(tmp_path / "out"), "--tasks"]
    assert main([*arguments, "local_choise"]) == 2
    assert "--tasks local_choise: no such task. Did you mean 'local_choice'?" in capsys.readouterr().err


def test_an_evaluation_that_is_killed_continues(tmp_path, monkeypatch, capsys):
    model, tasks, out = write_model(tmp_path / "model"), write_tasks(tmp_path / "tasks"), tmp_path / "out"
    arguments = ["eval", model, "--tasks", "local_choice", "--include", tasks, "--out", out, "--batch", 1]
    command = [sys.executable, "-m", "jgt", *map(str, arguments)]
    root = Path(__file__).parents[3]
    first = subprocess.Popen(command, cwd=root, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and first.poll() is None and count(out) < 20:
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    stored = count(out)
    assert 20 <= stored < 120
    computed, scores = [], Scorer.scores
    monkeypatch.setattr(Scorer, "scores", lambda self, rows, **what: (computed.extend(rows), scores(self, rows, **what))[1])
    assert main([*map(str, arguments), "--json"]) == 0
    printed = capsys.readouterr()
    assert len(computed) == 120 - stored and "Earlier answers are read from" in printed.err
    found, expected = json.loads(printed.out)["tasks"]["results"], json.loads(ANSWERS.read_text())["results"]
    assert {name: found["local_choice"][name] for name in expected["local_choice"]} == pytest.approx(expected["local_choice"], rel=1e-4)
    assert count(out) == 120


def count(out):
    return sum(len(file.read_bytes().splitlines()) for file in out.glob("answers-*.jsonl"))


LAYOUTS = {
    "alone": ["mesh={data: 1}", "rules=null"],
    "2x2x2": ["mesh={data: 2, fsdp: 2, tensor: 2}", "rules=jgt:fsdp_tensor"],
    "stages": ["mesh={stage: 2, data: 1, fsdp: 2, tensor: 2}", "rules=jgt:pipeline", "pipeline={signal: layers, microbatches: 2}"],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_training_evaluates_tasks_as_the_command_does(layout, tmp_path, capsys):
    model, tasks = write_model(tmp_path / "model"), write_tasks(tmp_path / "tasks")
    (tmp_path / "text.txt").write_text("a small text of letters and digits 0123 " * 400)
    config = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"hf": str(model), "seq": 256},
        "data": {"source": "text", "path": str(tmp_path / "text.txt")},
        "train": {"steps": 4, "batch": 8, "log_every": 1},
        "eval": {"tasks": [*TASKS], "include": str(tasks), "every": 2},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    # They are code.
    assert main(["train", str(tmp_path / "run.yaml"), *layout]) == 2
    assert main(["train", str(tmp_path / "run.yaml"), "--allow-command", *layout]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = {row["step"]: row for row in rows if "eval_acc/local_choice" in row}
    assert sorted(logged) == [2, 4] and logged[2] != logged[4]
    capsys.readouterr()
    command = ["eval", str(tmp_path / "run"), "--tasks", ",".join(TASKS), "--include", str(tasks), "--out", str(tmp_path / "out"), "--json"]
    assert main(command) == 0
    for task, values in json.loads(capsys.readouterr().out)["tasks"]["results"].items():
        metrics = {key.partition(",")[0]: value for key, value in values.items() if key.endswith(",none") and "stderr" not in key}
        assert metrics
        for metric, value in metrics.items():
            assert logged[4][f"eval_{metric}/{task}"] == pytest.approx(value, rel=1e-4), (task, metric)


def test_tasks_of_training_that_do_not_exist_are_refused_with_their_line(tmp_path, capsys):
    model, tasks = write_model(tmp_path / "model"), write_tasks(tmp_path / "tasks")
    (tmp_path / "text.txt").write_text("a small text of letters " * 400)
    (tmp_path / "run.yaml").write_text(
        f"run: {{dir: {tmp_path / 'run'}}}\nmodel: {{hf: {model}, seq: 64}}\ndata: {{source: text, path: {tmp_path / 'text.txt'}}}\n"
        f"eval:\n  include: {tasks}\n  tasks: [local_choise]\n"
    )
    assert main(["train", str(tmp_path / "run.yaml"), "--allow-command"]) == 2
    assert "run.yaml:6: eval.tasks: local_choise: no such task. Did you mean 'local_choice'?" in capsys.readouterr().err
