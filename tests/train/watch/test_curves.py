"""`jgt plot` and `jgt compare`, on run directories that a test writes."""

import json

import pytest

from jgt import document
from jgt.command.commands import find_command
from train.watch.__main__ import compare, plot
from train.watch.runs import Point, read_runs, thinned


def rows(count, *, slope=0.1, batch=100):
    for step in range(1, count + 1):
        speed = {"tokens_per_s": 1000.0, "step_time_s": 0.1} if step > 2 else {"tokens_per_s": None, "step_time_s": None}
        yield {
            "step": step,
            "loss": 5.0 - slope * step,
            "time": 1000.0 + 36 * step,
            "tokens": batch * step,
            "memory_peak_bytes": 7,
            **speed,
        }
        if step % 10 == 0:
            yield {"step": step, "eval_loss": 5.5 - slope * step, "time": 1001.0 + 36 * step}


@pytest.fixture
def write(tmp_path):
    """Writes a run directory."""

    def _write(name, lines, config=None):
        run = tmp_path / name
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if config is not None:
            (run / "config.yaml").write_text(document.dump(config))
        return run

    return _write


# -- curves --------------------------------------------------------------------------------------------------------------


def test_a_curve_over_each_axis(write):
    (run,) = read_runs([write("a", rows(20))])
    assert run.curve("loss")[0] == Point(1, 4.9) and len(run.curve("loss")) == 20
    assert run.curve("loss", "hours")[-1] == Point(pytest.approx(0.19), 3.0)
    # An evaluation has read what the step before it has.
    assert run.curve("eval_loss", "tokens") == [Point(1000, 4.5), Point(2000, 3.5)]
    assert run.curve("tokens_per_s")[0].x == 3
    assert run.curve("loss", "samples") == []


def test_damaged_lines_and_values_are_left_out(tmp_path, write):
    run = write("a", [*rows(3), {"step": 4, "loss": "high", "flag": True}])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"step": 5, "lo')
    (curves,) = read_runs([run])
    assert len(curves.curve("loss")) == 3 and "flag" not in curves.metrics
    assert curves.config == {}


def test_many_points_become_means():
    points = [Point(float(n), float(n % 2)) for n in range(1000)]
    assert [p.y for p in thinned(points, 10)] == [0.5] * 10
    assert thinned(points[:7], 10) == points[:7]


# -- plot ----------------------------------------------------------------------------------------------------------------


def test_a_picture_of_two_runs(write, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    runs = [str(write(name, rows(count))) for name, count in (("a", 20), ("b", 30))]
    assert plot(runs) == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG") and "Drawn to curves.png" in capsys.readouterr().out
    assert plot([*runs, "--over", "hours", "--metrics", "loss", "--output", "one.png"]) == 0
    assert (tmp_path / "one.png").stat().st_size < (tmp_path / "curves.png").stat().st_size


def test_diagrams_in_the_terminal(write, monkeypatch, capsys):
    monkeypatch.setattr("train.watch.__main__.importlib.util.find_spec", lambda name: None)
    first, second = write("a", rows(20)), write("b", rows(20, slope=0.05))
    assert plot([str(first), str(second), "--over", "tokens"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["a a", "b b"] and max(map(len, lines)) <= 80
    begin = lines.index("loss") + 1
    diagram = [line[12:] for line in lines[begin : begin + 10]]
    # The steeper curve is below, and ends at the lowest value.
    assert diagram[0][0] == "*" and diagram[-1].rstrip().endswith("a") and "b" in "".join(diagram[:6]) and "b" not in diagram[-1]
    assert lines[begin].startswith("      4.95 |") and lines[begin + 9].startswith("         3 |")
    assert lines[begin + 10].split() == ["100", "2,000", "tokens"]
    assert "eval_loss" in lines and "tokens_per_s" in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{a}x"], "{a}x: is not a run directory. Did you mean '{a}'?"),
        (["{empty}"], "{empty}: is not a run directory: it has no metrics.jsonl. "),
        (["{a}", "--metrics", "los"], "command line: --metrics: no run has 'los'. Did you mean 'loss'?"),
        (["{a}", "--metrics", ","], "command line: --metrics: names no metric."),
        (["{a}", "--terminal", "--output", "x.png"], "command line: --output: --terminal writes no file."),
    ],
)
def test_mistakes(arguments, message, write, tmp_path, capsys):
    places = {"a": write("a", rows(3)), "empty": tmp_path / "empty"}
    places["empty"].mkdir()
    assert plot([argument.format(**places) for argument in arguments]) == 2
    assert capsys.readouterr().err.startswith(message.format(**places))


def test_a_picture_that_cannot_be_written(write, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert plot([str(write("a", rows(3))), "--output", str(tmp_path / "no" / "x.png")]) == 1
    assert "No such file or directory" in capsys.readouterr().err


# -- compare -------------------------------------------------------------------------------------------------------------


def test_a_comparison_names_what_differs(write, capsys):
    configs = [
        {"run": {"name": name}, "optimizer": {"lr": lr, "b1": 0.9}, "mesh": {"data": 2} | mesh, "rules": None}
        for name, lr, mesh in (("a", 0.003, {}), ("b", 0.001, {"tensor": 4}))
    ]
    first = write("a", rows(20), configs[0])
    second = write("b", [row if row["step"] <= 12 else row | {"loss": 1.0} for row in rows(20)], configs[1])
    assert compare([str(first), str(second)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:4] == ["Config", "key a b", "optimizer.lr 0.003 0.001", "mesh.tensor (none) 4"]
    assert "best eval_loss 3.5 3.5 +0.00%" in lines
    assert "median tokens_per_s 1,000 1,000 +0.00%" in lines and "memory_peak_bytes 7 7 +0.00%" in lines
    assert "20 3 1 -66.67%" in lines
    assert lines[-1] == "The losses are equal up to step 12, bit for bit, and differ after it, by at most 0.7 of themselves"


def test_a_comparison_as_json(write, capsys):
    assert compare([str(write("a", rows(5))), str(write("b", rows(7))), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["config"], found["common"], found["equal_up_to"]) == ([], 5, 5)
    assert {"name": "steps", "first": 5.0, "second": 7.0, "change": pytest.approx(0.4)} in found["results"]


@pytest.mark.parametrize(
    ("second", "verdict"),
    [
        (list(rows(20)), "The losses of all 20 common steps are equal, bit for bit"),
        (list(rows(20, slope=0.2)), "The losses differ from the first of 20 common steps on, by at most 0.7 of themselves"),
        ([{"step": 50, "loss": 1.0}], "The runs have no logged step in common"),
    ],
)
def test_the_last_line_is_the_verdict(second, verdict, write, capsys):
    assert compare([str(write("a", rows(20))), str(write("b", second))]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == verdict


def test_both_are_commands_of_jgt():
    assert {find_command("plot").load().plot, find_command("compare").load().compare} == {plot, compare}
