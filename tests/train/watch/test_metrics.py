"""Metrics for Prometheus: the text as its own parser reads it, ports of processes, and the queries of the dashboard."""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from jgt.document import InputError
from train.commands.serve.traffic import Traffic
from train.journal.openmetrics import Distribution, MetricFamily, MetricSample, as_text
from train.watch.exporter.__main__ import main
from train.watch.exporter.endpoint import RunSource, served, text_of

ROOT = Path(__file__).parent.parent.parent.parent
NOW = time.time()


def parsed(text):
    """Each sample as Prometheus has it: its name and labels, and its value."""
    families = text_string_to_metric_families(text)
    return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


def write_run(folder):
    folder.mkdir(exist_ok=True)
    # A status of more than 2.5 s ago is a process that does not run.
    at = {"time": time.time(), "total": 100, "finished": 41, "begun": 42, "idle_s": 0.5, "limit_s": 20}
    for process in range(2):
        recent = [{"seconds": 2.0, "steps": 2, "busy": 0.4 + process, "data": 0.2}] * 2
        row = {"phase": "step", "time": NOW - 9, "seconds": 9.0}
        status = {
            "host": f"h{process}",
            "process": process,
            **at,
            "memory": [[3e9, 8e9], [4e9, 8e9]],
            "recent": recent,
            "row": row,
            "power_w": 300.5,
            "slowed": "hw thermal",
        }
        (folder / f"status-{process}.json").write_text(json.dumps(status))
    speed = {"tokens_per_s": 2e5, "step_time_s": 0.5, "samples_per_s": None, "mfu": 0.4, "lr": 1e-3, "grad_norm": 1.0, "tokens": 1e6}
    rows = [{"step": step, "loss": 2.5, "time": NOW - 40 + step, 'a "b"\\': 7, **speed} for step in (20, 40)]
    rows += [{"step": 40, "eval_loss": 2.75, "time": NOW}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    starts = [{"phase": "start", "time": NOW - ago, "seconds": 10.0} for ago in (100, 50)]
    steps = [
        {"phase": "step", "time": at, "seconds": 30.0, "first": first, "last": first + 19} for at, first in ((NOW - 90, 1), (NOW - 40, 21))
    ]
    spike = {"phase": "spike", "time": NOW - 20, "seconds": 0, "step": 30}
    events = [starts[0], steps[0], starts[1], {"phase": "restore", "time": NOW - 40, "seconds": 0, "step": 20}, steps[1], spike]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_text_is_what_prometheus_reads():
    waited = Distribution(bounds=(0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 7.0):
        waited.add(seconds)
    values = MetricSample(1, {"of": 'x\n"y"\\'}), MetricSample(float("nan")), MetricSample(float("inf"), {"of": "z"})
    families = [
        MetricFamily(name="a_bytes", text='two\n"lines"', samples=values),
        MetricFamily(name="b", text="-", kind="counter", samples=(MetricSample(3, suffix="_total"),)),
        MetricFamily(name="c_seconds", text="-", kind="histogram", samples=tuple(waited.samples())),
        MetricFamily(name="none", text="-"),
    ]
    found = parsed(as_text(families))
    assert found["a_bytes", ("of", 'x\n"y"\\')] == 1 and found["b_total",] == 3
    assert [found["c_seconds_bucket", ("le", le)] for le in ("0.1", "1.0", "+Inf")] == [2, 3, 4]
    assert found["c_seconds_count",] == 4 and found["c_seconds_sum",] == pytest.approx(7.65)
    assert not [key for key in found if key[0] == "none"]


def test_a_run_as_metrics(tmp_path):
    found = parsed(text_of([RunSource(write_run(tmp_path / "a"))]))
    run = ("run", "a")
    known = {"jgt_step": 41, "jgt_last_step": 100, "jgt_loss": 2.5, "jgt_eval_loss": 2.75, "jgt_tokens_per_second": 2e5}
    known |= {"jgt_left_seconds": 59.0, "jgt_learning_rate": 1e-3}
    assert {name: found[name, run] for name in known} == known
    assert found["jgt_restarts_total", run] == 1 and found["jgt_skipped_updates_total", run] == 1
    assert found["jgt_goodput_ratio", run] == pytest.approx(60 / 90)
    assert found["jgt_wall_seconds", ("cause", "steps"), run] == pytest.approx(60)
    assert found["jgt_metric", ("metric", 'a "b"\\'), run] == 7
    one = (("host", "h1"), ("process", "1"), run)
    assert found["jgt_device_memory_bytes", ("device", "1"), *one] == 4e9
    assert found["jgt_process_straggler_ratio", ("cause", "host"), *one] == pytest.approx(2.0)
    shares = {part: found["jgt_process_share_ratio", one[0], ("part", part), *one[1:]] for part in ("data", "host", "device")}
    assert shares == pytest.approx({"data": 0.1, "host": 0.6, "device": 0.3})
    assert found["jgt_process_state", *one, ("state", "runs")] == 1 and found["jgt_process_state", *one, ("state", "killed")] == 0


def test_processes_together_say_everything_once(tmp_path):
    folder = write_run(tmp_path / "a")
    parts = [parsed(text_of([RunSource(folder, process)])) for process in range(2)]
    assert not parts[0].keys() & parts[1].keys()
    assert parts[0].keys() | parts[1].keys() == parsed(text_of([RunSource(folder)])).keys()
    assert text_of([RunSource(tmp_path / "later", 1)]) == "# EOF\n"
    both = parsed(text_of([RunSource(folder), RunSource(write_run(tmp_path / "b"))]))
    assert {key for key in both if key[0] == "jgt_step"} == {("jgt_step", ("run", "a")), ("jgt_step", ("run", "b"))}


def test_a_port_answers_and_a_taken_one_is_refused(tmp_path):
    with served("127.0.0.1", 0, lambda: "# EOF\n", "key") as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert answer.read() == b"# EOF\n" and answer.headers["Content-Type"].startswith("application/openmetrics-text")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10)
        with pytest.raises(InputError, match=f"key: cannot listen at 127.0.0.1:{port}: Address already in use. Choose another port"):
            served("127.0.0.1", port, str, "key").__enter__()
    socket.create_server(("127.0.0.1", port)).close()


def test_the_command_prints_once_and_refuses_what_is_no_run(tmp_path, capsys):
    assert main([str(write_run(tmp_path / "a"))]) == 0
    assert parsed(capsys.readouterr().out)["jgt_step", ("run", "a")] == 41
    assert main([str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [pytest.param(["train"], marks=pytest.mark.slow), ["launch", "--processes", "1", "--"]], ids=["train", "launch"]
)
def test_a_taken_port_ends_a_run_before_it_trains(tmp_path, command):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = ["configs/quickstart.yaml", f"run.dir={tmp_path}/run", "train.steps=1", "model.layers=1", f"metrics={{port: {port}}}"]
        done = subprocess.run([sys.executable, "-m", "jgt", *command, *run], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert re.search(rf"metrics.port: cannot listen at 127.0.0.1:{port}: Address already in use", done.stderr), done.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_run_without_the_section_loads_nothing_of_it():
    code = "import sys, train.run.directory.folder, train.launch.__main__; print([m for m in sys.modules if 'exporter' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "[]\n"


def families_of(text):
    return set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))


def test_the_dashboard_asks_for_metrics_that_exist(tmp_path):
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    asked = {name for query in queries for name in re.findall(r"\bjgt_\w+", query)}
    traffic = Traffic()
    traffic.asked("/v1/completions", 200, 1.5, 0.5, prompt=3, tokens=7)
    run = {f.name: f for f in RunSource(write_run(tmp_path / "a")).families()}
    known = {f"{f.name}{s.suffix}" for f in [*run.values(), *traffic.families(1, "m")] for s in f.samples}
    assert len(queries) > 15 and asked and asked <= known, asked - known
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
