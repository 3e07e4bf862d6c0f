"""The load of experts as `jgt plot --experts` draws it, and as `jgt report` shows it."""

import json

import pytest

from train.journal.loads import Loads, read_loads
from train.watch.__main__ import main as report
from train.watch.__main__ import plot
from train.watch.heat_map import describe_loads


@pytest.fixture
def run(tmp_path):
    """A run of two layers and four experts, whose second layer becomes unequal."""
    (tmp_path / "events.jsonl").write_text(json.dumps({"phase": "start", "time": 100.0, "seconds": 1.0, "processes": 1}) + "\n")
    rows = [{"step": step, "load": [[1, 1, 1, 1], [0, 1, 1, step / 2]]} for step in range(1, 9)]
    damaged = ['{"step": 3, "load"', '{"step": 4, "load": [[1, 1], [1, 1]]}', '{"step": 4, "load": "much"}']
    four = "[[1, 1, 1, 1], [1, 1, 1, %s]]"
    damaged += [f'{{"step": 4, "load": {four % load}}}' for load in ("NaN", "Infinity", "-1", "1" + "0" * 400, "null")]
    (tmp_path / "experts.jsonl").write_text("\n".join([*damaged, *map(json.dumps, rows)]) + "\n")
    return tmp_path


def test_records_of_another_shape_are_left_out(run):
    loads = read_loads(run)
    assert loads.steps == tuple(range(1, 9))
    assert loads.worst_layer == 1


def test_columns_are_means_over_records(run):
    assert read_loads(run).of_layer(1, 4) == [[0] * 4, [1] * 4, [1] * 4, [0.75, 1.75, 2.75, 3.75]]
    assert len(read_loads(run).of_layer(1, 100)[0]) == 8


LINES = [
    "Experts: the fullest of a layer had 1.00 mean loads at step 1 and has 2.50 at step 8",
    "Layer 1 is the least equal: most used 3 (4.00), 1 (1.00), 2 (1.00); least used 0 (0.00), 2 (1.00), 1 (1.00)",
    "         3 |:*##",
    "         1 |::::",
    "         2 |::::",
    "         0 |    ",
    "            steps 1 to 8; mean loads: . from 0.25  : from 0.75  * from 1.25  # from 2",
]


def test_the_lines(run):
    assert list(describe_loads(read_loads(run), 4, is_ascii=True)) == LINES


@pytest.mark.parametrize("columns", [0, -5])
def test_a_terminal_without_room_has_one_column(run, columns):
    assert list(describe_loads(read_loads(run), columns, is_ascii=True))[2] == "         3 |#"


def test_a_report_has_the_same_lines(run, capsys):
    assert report([str(run)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-7:-5] == LINES[:2]
    # Eight records have eight columns.
    assert [line.rstrip() for line in shown[-5:-1]] == [
        "         3 |░▒▓█████",
        *(f"         {e} |▒▒▒▒▒▒▒▒" for e in (1, 2)),
        "         0 |",
    ]
    assert report([str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["experts"] == {
        "steps": [1, 8],
        "load_max": [1.0, 2.5],
        "worst_layer": 1,
        "most_used": [3, 1, 2],
        "least_used": [0, 2, 1],
    }


def test_a_report_of_a_run_without_experts_has_none(run, capsys):
    (run / "experts.jsonl").unlink()
    assert report([str(run)]) == 0
    assert "Experts" not in capsys.readouterr().out
    assert report([str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["experts"] is None


def test_of_many_experts_the_most_and_the_least_used_have_rows():
    loads = Loads(steps=(1,), loads=((tuple(float(e) for e in range(100)),),))
    rows = [line.split("|")[0].strip() for line in describe_loads(loads, 10) if "|" in line]
    assert rows == [str(e) for e in [*range(99, 91, -1), *range(7, -1, -1)]]


def test_the_picture(run, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (run / "config.yaml").write_text("run: {}")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}')
    picture = tmp_path / "loads.png"
    assert plot([str(run), "--experts", "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert plot([str(run), "--experts", "--terminal"]) == 0
    assert "Layer 1 is the least equal" in capsys.readouterr().out
    assert plot([str(run), str(run), "--experts"]) == 2
    (run / "experts.jsonl").unlink()
    assert plot([str(run), "--experts"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "command line: --experts: draws one run, not 2. Name one",
        f"{run}: has no records of experts. --experts is for runs with model.experts",
    ]
